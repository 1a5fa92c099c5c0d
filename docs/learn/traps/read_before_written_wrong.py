import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Linear(2, 1)
if rank == 0:
    time.sleep(3)  # as long as a large file takes
    torch.save(model.state_dict(), "model.pt")
model.load_state_dict(torch.load("model.pt", map_location="cpu"))
print(f"rank {rank}: loaded")
dist.destroy_process_group()
