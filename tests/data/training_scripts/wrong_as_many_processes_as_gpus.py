"""As many processes as GPUs."""

import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
world_size = torch.cuda.device_count()
mp.spawn(main, args=(world_size,), nprocs=world_size)  # finds spawn-of-nothing
print('done')
