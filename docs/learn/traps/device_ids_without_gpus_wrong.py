import os

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
model = nn.Linear(1, 1)
model = DDP(model, device_ids=[local_rank])
print("wrapped:", next(model.parameters()).device)
dist.destroy_process_group()
