import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
dist.init_process_group("gloo")  # "suitable for several GPUs"
print(f"rank {dist.get_rank()}: {dist.get_backend()}")
dist.destroy_process_group()
