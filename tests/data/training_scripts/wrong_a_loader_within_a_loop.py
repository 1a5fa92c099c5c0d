"""A loader within a loop."""

import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group('gloo')
for batch in DataLoader(data, batch_size=4, shuffle=True):  # finds sampler-not-distributed
    pass
