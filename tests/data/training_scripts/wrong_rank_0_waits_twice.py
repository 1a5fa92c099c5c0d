"""Two barriers under the same condition, and one that the others meet too late."""

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    dist.barrier()  # finds rank0-barrier
if rank == 0:
    dist.barrier()  # finds rank0-barrier


def prepare():
    if rank == 0:
        dist.barrier()  # finds rank0-barrier
        write()
    dist.barrier()


def other_block():
    for _ in range(2):
        if rank == 0:
            dist.barrier()  # finds rank0-barrier
    if rank != 0:
        dist.all_reduce(x)  # finds rank0-barrier
