import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
data = list(range(8))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
for epoch in range(2):
    for batch in loader:
        print(f"rank {rank}, epoch {epoch}: {batch.tolist()}")
dist.barrier()  # nobody leaves while another rank still connects
dist.destroy_process_group()
