"""An exchange is waited for."""

import torch
import torch.distributed as dist
total = torch.ones(1)
work = dist.all_reduce(total, async_op=True)
works = [dist.broadcast(one, 0, async_op=True) for one in total]
dist.all_reduce(total, async_op=True).wait()
dist.all_reduce(total, async_op=False)
work.wait()
