import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, WeightedRandomSampler


class WeightedShare(WeightedRandomSampler):
    def __iter__(self):
        return iter(list(super().__iter__())[dist.get_rank() :: dist.get_world_size()])

    def __len__(self):
        return self.num_samples // dist.get_world_size()


dist.init_process_group("gloo")
rank = dist.get_rank()
weights = [1.0] * 6 + [3.0] * 2  # the last two samples are of a rare class
common = torch.Generator().manual_seed(0)  # the same on all ranks
sampler = WeightedShare(weights, num_samples=8, generator=common)
loader = DataLoader(range(8), batch_size=4, sampler=sampler)
print(f"rank {rank}:", [batch.tolist() for batch in loader])
dist.barrier()  # nobody leaves while another rank still connects
dist.destroy_process_group()
