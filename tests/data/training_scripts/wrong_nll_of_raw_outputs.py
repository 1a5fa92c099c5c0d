"""The outputs of a linear layer taken for logarithms of probabilities."""

import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).to(device)
model = DDP(model)
for inputs, targets in batches:
    outputs = model(inputs)
    loss = F.nll_loss(outputs, targets)  # finds nll-of-raw-outputs
    print(nn.functional.nll_loss(input=model(inputs), target=targets))  # finds nll-of-raw-outputs
