"""By its full name."""

import torch
model = torch.nn.Linear(1, 1)
torch.nn.parallel.DistributedDataParallel(model)  # finds ddp-not-assigned
