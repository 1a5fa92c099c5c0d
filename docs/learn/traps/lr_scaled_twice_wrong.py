import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
base_lr, base_batch = 0.6, 8  # tuned on one process
batch_size = base_batch // ranks
lr = base_lr * ranks
model = DDP(nn.Linear(1, 1, bias=False))
nn.init.zeros_(model.module.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
for step in range(4):
    optimizer.zero_grad()
    loss = (model(torch.ones(batch_size, 1)) - 3.0).square().mean()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.2f}")
dist.destroy_process_group()
