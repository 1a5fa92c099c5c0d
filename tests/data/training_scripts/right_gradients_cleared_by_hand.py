"""Gradients cleared by hand."""

import torch
opt = torch.optim.SGD(ps, 0.1)
for b in bs:
    f(b).backward()
    opt.step()
    for p in ps:
        p.grad = None
