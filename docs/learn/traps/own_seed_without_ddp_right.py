import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Linear(1, 1, bias=False)
for parameter in model.parameters():
    dist.broadcast(parameter.detach(), src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    (model(torch.ones(4, 1)) - 1.0).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
print(f"rank {rank}: weight {model.weight.item():.4f}")
dist.destroy_process_group()
