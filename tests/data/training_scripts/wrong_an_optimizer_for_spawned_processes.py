"""An optimizer for spawned processes."""

import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.optim import Adam
model = nn.Linear(1, 1)
optimizer = Adam(model.parameters())
mp.spawn(main, (model, optimizer), 2)  # finds spawned-optimizer
