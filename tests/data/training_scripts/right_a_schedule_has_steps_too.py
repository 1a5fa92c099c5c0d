"""A schedule has steps, too."""

import torch
opt = torch.optim.SGD(ps, 0.1)
sched = torch.optim.lr_scheduler.StepLR(opt, 1)
for n, b in enumerate(bs):
    opt.zero_grad()
    f(b).backward()
    opt.step()
    if n % 9 == 0:
        sched.step()
