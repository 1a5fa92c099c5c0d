import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
sums = {"loss": torch.tensor(0.5), "count": torch.tensor(32.0)}
for name in sorted(sums):
    dist.all_reduce(sums[name])
print(f"rank {rank}: loss {sums['loss'].item()}, count {sums['count'].item()}")
dist.destroy_process_group()
