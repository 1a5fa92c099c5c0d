import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
model = nn.Linear(2, 1)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
dist.barrier()
state = torch.load("model.pt", map_location="cpu")
model.load_state_dict(state)
print("loaded from", state["weight"].device)
dist.destroy_process_group()
