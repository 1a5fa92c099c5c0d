import os
import sys

import torch.distributed as dist

dist.init_process_group("gloo")
print(f"rank {dist.get_rank()}: connected")
if sys.argv[1:] == ["killed"]:
    dist.barrier()
    os._exit(0)  # as a process that is killed: nothing is cleaned up
dist.destroy_process_group()
