"""Gradients are cleared after a continue."""

import torch
opt = torch.optim.Adam(model.parameters())
for n, batch in enumerate(loader):
    opt.zero_grad()  # finds zero-grad-in-micro-step
    model(batch).backward()
    if n % 8 == 7:
        opt.step()
