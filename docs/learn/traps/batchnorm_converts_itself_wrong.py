import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
model = DDP(model)
layer = model.module[0]
outputs = layer(torch.tensor([[1.0], [3.0]]) + 10 * rank).flatten().tolist()
print(f"rank {rank}: {type(layer).__name__}, outputs {outputs[0]:.1f} and {outputs[1]:.1f}")
dist.destroy_process_group()
