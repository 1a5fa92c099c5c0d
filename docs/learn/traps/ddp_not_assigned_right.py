import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(1, 1)
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.tensor([[1.0 + rank]])  # each rank has samples of its own
for _ in range(3):
    optimizer.zero_grad()
    loss = (model(inputs) - 3.0).square().mean()
    loss.backward()
    optimizer.step()
print(f"rank {rank}: weight {next(model.parameters()).item():.4f}")
dist.destroy_process_group()
