import torch.multiprocessing as mp


def train(rank):
    for epoch in range(epochs):
        if rank == 0:
            print(f"epoch {epoch}")


if __name__ == "__main__":
    epochs = 3
    mp.spawn(train, nprocs=2)
