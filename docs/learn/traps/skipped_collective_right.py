from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()
targets = torch.tensor([[1, 9], [1, 2]][rank])
rare = (targets == 9).sum()
dist.all_reduce(rare)
seen = torch.tensor(100)
dist.all_reduce(seen)
print(f"rank {rank}: {rare.item()} rare of {seen.item()}")
dist.destroy_process_group()
