import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist

rank = int(os.environ["RANK"])
meeting = dist.FileStore("meeting", 2)  # as init_method="file:///home/me/meeting"
second_run = sys.argv[1:] != ["killed"]
time.sleep(60 * rank * second_run)  # rank 1 starts later, as on another machine
limit = timedelta(seconds=5)
dist.init_process_group("gloo", store=meeting, rank=rank, world_size=2, timeout=limit)
print(f"rank {dist.get_rank()}: connected")
if not second_run:
    dist.barrier()
    os._exit(0)  # as a process that is killed: nothing is cleaned up
dist.destroy_process_group()
