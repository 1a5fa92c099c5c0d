import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
local_rank = int(os.environ["LOCAL_RANK"])
model = nn.Linear(1, 1)
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
    model = DDP(model.to(local_rank), device_ids=[local_rank])
else:
    model = DDP(model)
print("wrapped:", next(model.parameters()).device)
dist.destroy_process_group()
