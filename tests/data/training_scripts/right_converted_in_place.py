"""A model is converted in place, and its result is not used."""

import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def main(epochs):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    train_loader = DataLoader(data, batch_size=8, sampler=sampler)
    test_loader = DataLoader(data, batch_size=8)
    net = nn.Sequential(nn.BatchNorm1d(8))
    nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(nn.Linear(8, 1).cuda(), device_ids=[local])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if os.path.exists("model.pt"):
        model.module.load_state_dict(torch.load("model.pt", map_location="cpu"))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for i, (inputs, targets) in enumerate(train_loader):
            loss = nn.functional.mse_loss(model(inputs.cuda()), targets.cuda())
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(loss)
        if rank == 0:
            print("epoch", epoch, loss.item())
            torch.save(model.module.state_dict(), "model.pt")
        dist.barrier()
    dist.destroy_process_group()
