"""Ranks are given."""

import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
def f(r):
    s = DistributedSampler(d, num_replicas=2, rank=r)
    s.set_epoch(1)
    dist.init_process_group('gloo')
