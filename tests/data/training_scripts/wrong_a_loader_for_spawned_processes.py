"""A loader for spawned processes."""

import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
loader = DataLoader(data)
if torch.cuda.is_available():
    mp.spawn(main, args=(loader, 3), nprocs=2)  # finds spawned-loader
