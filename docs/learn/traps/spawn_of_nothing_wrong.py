import torch
import torch.multiprocessing as mp


def train(rank):
    print(f"rank {rank}: trains")


if __name__ == "__main__":
    ranks = torch.cuda.device_count()
    mp.spawn(train, nprocs=ranks)
    print("done")
