"""One step, whose place is in a loop."""

import torch
opt = torch.optim.SGD(ps, 0.1)
loss.backward()
for turn in range(2):
    if turn == me:
        opt.step()
