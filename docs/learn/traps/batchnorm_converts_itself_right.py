import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
# On GPUs, DDP(model, device_ids=[local_rank]) comes next. On CPUs torch refuses SyncBatchNorm.
print(f"rank {rank}: {type(model[0]).__name__}")
dist.destroy_process_group()
