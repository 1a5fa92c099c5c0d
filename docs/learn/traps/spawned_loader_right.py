import tempfile

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, DistributedSampler


def train(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    sampler = DistributedSampler(range(8))
    sampler.set_epoch(0)
    loader = DataLoader(range(8), batch_size=4, sampler=sampler)
    batches = [None, None]
    dist.all_gather_object(batches, [batch.tolist() for batch in loader])
    if rank == 0:
        print("rank 0:", batches[0])
        print("rank 1:", batches[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(folder,), nprocs=2)
