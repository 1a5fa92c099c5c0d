import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Linear(2, 4, bias=False)
parallelize_module(model, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
replicate(model, device_mesh=mesh["dp"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.ones(2, 2) + mesh["dp"].get_local_rank()
for step in range(3):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
