import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.short, self.long = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, inputs):
        return self.long(inputs) if inputs.mean() > 0.5 else self.short(inputs)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(TwoBranches(), find_unused_parameters=True)
inputs = torch.full((4, 1), 0.2 + 0.6 * rank)  # rank 0 takes one branch, rank 1 the other
for step in range(2):
    model.zero_grad()
    try:
        model(inputs).mean().backward()
        print(f"rank {rank}, step {step}: gradient {model.module.short.weight.grad}")
    except RuntimeError as error:
        print(f"rank {rank}, step {step}: {str(error).partition(' before')[0]}")
dist.destroy_process_group()
