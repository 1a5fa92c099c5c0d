from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP


def count_and_exchange(exchanges, bucket):
    exchanges.append(bucket.index())
    return allreduce_hook(dist.group.WORLD, bucket)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(nn.Linear(1, 1, bias=False))
model.register_comm_hook(exchanges := [], count_and_exchange)
micro_batches = [torch.tensor([[value + rank]]) for value in (1.0, 2.0, 3.0, 4.0)]
for i, inputs in enumerate(micro_batches):
    last = i + 1 == len(micro_batches)
    with nullcontext() if last else model.no_sync():
        loss = model(inputs).mean() / 4
        loss.backward()
gradient = model.module.weight.grad.item()
print(f"rank {rank}: exchanges {len(exchanges)}, gradient {gradient:.2f}")
dist.destroy_process_group()
