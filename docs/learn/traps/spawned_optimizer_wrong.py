import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(rank, model, optimizer, folder):
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    model = DDP(model)
    model(torch.ones(4, 1)).mean().backward()
    for turn in range(2):  # one after the other, so that each run prints the same
        if turn == rank:
            optimizer.step()
        dist.barrier()
    if rank == 0:
        print(f"a step of 0.1 from 1.0 leads to {model.module.weight.item():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(model, optimizer, folder), nprocs=2)
