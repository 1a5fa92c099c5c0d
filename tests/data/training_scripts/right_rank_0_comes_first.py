"""Rank 0 writes a file first, in three usual forms."""

import contextlib

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank not in [-1, 0]:
    torch.distributed.barrier()  # the others wait until rank 0 has written the file
data = download()
if rank == 0:
    torch.distributed.barrier()


@contextlib.contextmanager
def rank_0_first():
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


def prepare():
    if rank > 0:
        dist.barrier()
        return read()
    written = write()
    dist.barrier()
    return written
