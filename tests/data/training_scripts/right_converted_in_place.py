"""A model is converted in place, and its result is not used."""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
nn.SyncBatchNorm.convert_sync_batchnorm(net)
model = DistributedDataParallel(net)
