import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(4, 1)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
inputs = torch.ones(2, 4) + rank
for step in range(3):
    optimizer.zero_grad()
    loss = (model(inputs) - 3.0).square().mean()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
