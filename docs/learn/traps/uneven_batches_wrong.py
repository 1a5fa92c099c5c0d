from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()
model = DDP(nn.Linear(1, 1))
batches = torch.ones(5, 4, 1)[rank::2]  # rank 0 has 3 batches, rank 1 has 2
for step, inputs in enumerate(batches):
    model(inputs).mean().backward()
    print(f"rank {rank}: step {step}")
dist.barrier()
dist.destroy_process_group()
