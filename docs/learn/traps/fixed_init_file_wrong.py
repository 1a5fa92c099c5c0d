import os
import sys
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group(
    "gloo",
    store=dist.FileStore("meeting", 2),  # as init_method="file:///home/me/meeting"
    rank=int(os.environ["RANK"]),
    world_size=2,
    timeout=timedelta(seconds=5),
)
print(f"rank {dist.get_rank()}: connected")
dist.barrier()
if sys.argv[1:] == ["fail"]:
    if dist.get_rank() == 1:
        raise ValueError("a mistake in the first run")
    dist.barrier()
dist.destroy_process_group()
