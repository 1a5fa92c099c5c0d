from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Linear(2, 1)
if rank == 0:
    torch.save(model.state_dict(), "model.pt.tmp")
    Path("model.pt.tmp").replace("model.pt")
writers = torch.tensor([1.0 if rank == 0 else 0.0])
dist.all_reduce(writers)
if rank == 0:
    print(f"model.pt: written by {writers.item():.0f} of 2 ranks")
dist.destroy_process_group()
