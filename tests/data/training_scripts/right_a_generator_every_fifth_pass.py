"""A generator that is trained every fifth pass."""

import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
generator = DDP(torch.nn.Linear(8, 8)); discriminator = DDP(torch.nn.Linear(8, 1))
optimizer_G = torch.optim.Adam(generator.parameters(), lr=2e-4)
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
for i in range(100):
    real = torch.randn(4, 8)
    z = torch.randn(4, 8)
    optimizer_D.zero_grad()
    d_loss = discriminator(generator(z).detach()).mean() - discriminator(real).mean()
    d_loss.backward()
    optimizer_D.step()
    if i % 5 == 0:
        optimizer_G.zero_grad()
        g_loss = -discriminator(generator(z)).mean()
        g_loss.backward()
        optimizer_G.step()
dist.destroy_process_group()
