import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(nn.Linear(2, 1))
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
    plain = nn.Linear(2, 1)
    state = torch.load("model.pt", map_location="cpu")
    print(plain.load_state_dict(state))
    print("loaded:", torch.equal(plain.weight, model.module.weight))
dist.destroy_process_group()
