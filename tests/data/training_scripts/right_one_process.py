"""One process."""

import torch
from torch.utils.data import DataLoader
for b in DataLoader(d, shuffle=True): pass
