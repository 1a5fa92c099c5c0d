"""An optimizer before sharding."""

import torch
from torch.distributed.fsdp import fully_shard
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # finds optimizer-before-sharding
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
