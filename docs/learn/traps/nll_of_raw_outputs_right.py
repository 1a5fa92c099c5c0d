import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
inputs = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
targets = torch.tensor([0, 1])
for step in range(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print(f"step {step}: loss {loss.item():.2g}")
