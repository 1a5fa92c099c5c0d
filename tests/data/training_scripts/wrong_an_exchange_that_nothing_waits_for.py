"""An exchange that nothing waits for."""

import torch
import torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total, async_op=True)  # finds async-not-waited
print(total)
