import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, WeightedRandomSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
weights = [1.0] * 6 + [3.0] * 2  # the last two samples are of a rare class
sampler = WeightedRandomSampler(weights, num_samples=8)
loader = DataLoader(range(8), batch_size=8, sampler=sampler)
print(f"rank {rank}:", [batch.tolist() for batch in loader])
dist.barrier()  # nobody leaves while another rank still connects
dist.destroy_process_group()
