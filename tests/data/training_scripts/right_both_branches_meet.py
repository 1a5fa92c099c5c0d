"""Both branches meet."""

import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group('gloo')
if dist.get_rank() == 0:
    download()
    dist.barrier()
else:
    dist.barrier()
