from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()
# toolkit: allow batchnorm-not-converted: the buffers are what this trap needs
model = DDP(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)))
if rank == 0:
    model.eval()
    with torch.no_grad():
        model(torch.ones(4, 1))
    print("rank 0: evaluated")
    model.train()
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {rank}: {total.item():.0f} ranks")
dist.destroy_process_group()
