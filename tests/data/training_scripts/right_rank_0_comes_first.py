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


@contextlib.contextmanager
def main_process_first(is_main_process, desc):
    try:
        if not is_main_process:
            print(desc)
            dist.barrier()
        yield
    finally:
        if is_main_process:
            dist.barrier()


def stop_of_all(stop, RANK):
    if RANK != -1:
        flags = [stop if RANK == 0 else None]
        dist.broadcast_object_list(flags, 0)
        stop = flags[0]
    if stop and RANK > -1:
        dist.reduce(stop, dst=0)
    return stop


def gathered(stats, RANK):
    if RANK == 0:
        every = [None] * dist.get_world_size()
        dist.gather_object(stats, every, dst=0)
    elif RANK > 0:
        dist.gather_object(stats, None, dst=0)
