import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(nn.Linear(1, 1, bias=False))
batches = torch.full((3, 4, 1), 2.0)[rank::2]  # rank 0 has 2 batches, rank 1 has 1
with Join([model], divide_by_initial_world_size=False):
    for step, inputs in enumerate(batches):
        model.zero_grad()
        model(inputs).mean().backward()
        gradient = model.module.weight.grad.item()
        print(f"rank {rank}, step {step}: gradient {gradient:.1f}")
dist.destroy_process_group()
