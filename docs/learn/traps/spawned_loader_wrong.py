import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader


def train(rank, loader, folder):
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    batches = [None, None]
    dist.all_gather_object(batches, [batch.tolist() for batch in loader])
    if rank == 0:
        print("rank 0:", batches[0])
        print("rank 1:", batches[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    loader = DataLoader(range(8), batch_size=4, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(loader, folder), nprocs=2)
