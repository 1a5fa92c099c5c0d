import torch.multiprocessing as mp

epochs = 3


def train(rank):
    for epoch in range(epochs):
        if rank == 0:
            print(f"epoch {epoch}")


if __name__ == "__main__":
    mp.spawn(train, nprocs=2)
