"""A port only where nobody has set one, as torchrun does."""

import os

import torch.distributed as dist

if "MASTER_PORT" not in os.environ:
    os.environ["MASTER_PORT"] = "29500"
if not os.environ.get("MASTER_PORT", None):
    os.environ["MASTER_PORT"] = "29500"
os.environ.setdefault("MASTER_PORT", "29500")
dist.init_process_group("gloo")
