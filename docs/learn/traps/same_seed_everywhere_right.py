import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
torch.manual_seed(1000 + rank)  # after the weights
noise = torch.randn(3)  # what an augmentation draws
dropped = model[1](torch.ones(6)).tolist()
print(f"rank {rank}: noise {[round(value, 2) for value in noise.tolist()]}, dropout {dropped}")
dist.barrier()  # nobody leaves while another rank still connects
dist.destroy_process_group()
