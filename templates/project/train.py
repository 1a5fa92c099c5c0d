"""Train a small network on any number of processes; after a kill, it resumes.

`toolkit run job.yaml`, or by hand: `torchrun --standalone --nproc-per-node 2 train.py`.
Put your own data and network into `dataset()` and `network()`.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = Path(os.environ.get("TRAIN_RUN_DIR", "runs/by-hand"), "checkpoint.pt")


def dataset() -> TensorDataset:
    """Return points of a square, and whether they lie in a circle: the same on every rank."""
    points = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return TensorDataset(points, (points.norm(dim=1) < 0.7).long())


def network() -> nn.Module:
    """Return a network of two layers."""
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))


def main(epochs: int, batch: int) -> None:
    """Train, and write a checkpoint after each epoch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # "cuda" means this one from here on
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if batch % ranks:
        raise SystemExit(f"--batch {batch} is not a multiple of the {ranks} ranks")
    torch.manual_seed(0)
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = DistributedSampler(data := dataset(), seed=0)  # each rank gets its part of each epoch
    loader = DataLoader(data, batch_size=batch // ranks, sampler=sampler)
    first = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epochs"]
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, and the same one after a restart
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1} step {(epoch + 1) * len(loader)} loss {loss:.4f}", flush=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
            torch.save({**state, "epochs": epoch + 1}, draft := CHECKPOINT.with_suffix(".draft"))
            draft.replace(CHECKPOINT)  # a kill leaves the old one or the new one, never a half
    del model  # before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, over all ranks")
    main(**vars(parser.parse_args()))
