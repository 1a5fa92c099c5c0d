import torch
from torch import nn

model = nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
micro_batches = [torch.tensor([[value]]) for value in (1.0, 2.0, 3.0, 4.0)]
for i, inputs in enumerate(micro_batches):
    loss = model(inputs).mean() / 2
    loss.backward()
    if (i + 1) % 2 == 0:
        print(f"gradient of the step: {model.weight.grad.item():.2f}")
        optimizer.step()
        optimizer.zero_grad()
