"""A port in the address."""

import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group('gloo', init_method='tcp://localhost:23456', rank=r, world_size=2)  # finds fixed-master-port
