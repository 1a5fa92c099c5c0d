import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.ones(5, 4, 1)
accumulate = 2
samples = 0
for i, inputs in enumerate(batches):
    first = i - i % accumulate
    window = min(accumulate, len(batches) - first)
    loss = model(inputs).mean() / window
    loss.backward()
    samples += len(inputs)
    if i + 1 == first + window:
        optimizer.step()
        optimizer.zero_grad()
        print(f"a step of {samples} samples")
        samples = 0
print(f"without a step: {samples} samples")
