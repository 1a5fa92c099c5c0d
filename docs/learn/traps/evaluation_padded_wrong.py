import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
data = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])  # 1: the model is right
sampler = DistributedSampler(data, shuffle=False)
test_loader = DataLoader(data, batch_size=2, sampler=sampler)
sums = torch.zeros(2)
for batch in test_loader:
    sums += torch.tensor([batch.sum(), len(batch)])
dist.all_reduce(sums)
if rank == 0:
    print(f"{sums[0].item():.0f} of {sums[1].item():.0f} samples are right")
dist.destroy_process_group()
