import sys

import torch.distributed as dist

dist.init_process_group("gloo")
print(f"rank {dist.get_rank()}: connected")
dist.barrier()
if sys.argv[1:] == ["fail"]:
    if dist.get_rank() == 1:
        raise ValueError("a mistake in the first run")
    dist.barrier()
dist.destroy_process_group()
