import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
loss = torch.tensor([1.0, 3.0][rank])
if rank == 1:
    time.sleep(3)  # a slower rank
dist.all_reduce(loss, async_op=True)
mean = loss / dist.get_world_size()
if rank == 0:
    print(f"mean loss {mean.item()}")
dist.barrier()
dist.destroy_process_group()
