import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(torch.arange(4.0))
sampler = DistributedSampler(data, shuffle=False)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=2, sampler=sampler)
print(f"{len(loader)} batches")
dist.destroy_process_group()
