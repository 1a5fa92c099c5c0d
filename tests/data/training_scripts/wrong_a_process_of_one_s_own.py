"""A process of one's own."""

import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
opt = torch.optim.SGD(model.parameters(), 0.1)
mp.Process(target=main, args=(0, opt)).start()  # finds spawned-optimizer
