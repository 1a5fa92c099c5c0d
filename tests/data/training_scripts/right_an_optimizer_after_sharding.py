"""An optimizer after sharding, or of another model."""

import torch
from torch.distributed.fsdp import fully_shard
from torch.optim import Adam
model, teacher = Net(), Net()
other = Adam(teacher.parameters())
if shard:
    fully_shard(model)
    optimizer = Adam(model.parameters())
else:
    optimizer = Adam(model.parameters())

def whole_or_sharded(model, shard):
    if not shard:
        return Adam(model.parameters())
    fully_shard(model)
    return None
