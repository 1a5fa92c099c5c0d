"""A test for GPUs."""

import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
n = torch.cuda.device_count()
assert n > 0, 'no GPU'
mp.spawn(main, nprocs=n)
