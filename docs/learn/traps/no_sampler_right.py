import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = list(range(8))
sampler = DistributedSampler(data)
sampler.set_epoch(0)
loader = DataLoader(data, batch_size=2, sampler=sampler)
print(f"rank {rank}:", [batch.tolist() for batch in loader])
dist.barrier()  # nobody leaves while another rank still connects
dist.destroy_process_group()
