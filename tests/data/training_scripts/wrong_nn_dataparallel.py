"""Nn.DataParallel."""

from torch import nn
model = nn.DataParallel(nn.Linear(1, 1))  # finds data-parallel
