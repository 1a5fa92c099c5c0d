"""The figure of docs/learn/local-sgd.md."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.figures.figure import Data, Figure
from train.data.order import Batch
from train.tasks.digits import Digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing
from benchmarks.figures.asynchrony import RANKS, _whole

LOCAL_STEPS = (1, 4, 16, 64, 256)
LOCAL_TOTAL, LOCAL_BATCH, LOCAL_LR = 256, 16, 0.3
SEEDS = 5
SPLITS = {
    "alike": "each rank sees all digits",
    "unlike": "each rank sees two or three digits",
}


def local_sgd(local_steps: int, split: str, seed: int) -> tuple[float, int]:
    """Return the test accuracy of local SGD on four ranks, and the bytes that each has exchanged.

    The four ranks' models are computed as one batch of matrices, in one process: the same numbers
    as in four processes, as nothing but the mean of the weights joins them.
    """
    task = Digits()
    train, test = task.train(), task.test()
    assert isinstance(train, Batch)
    assert isinstance(test, Batch)
    assert isinstance(train.inputs, Tensor)
    assert isinstance(train.targets, Tensor)
    order = torch.arange(len(train))
    if split == "unlike":
        order = train.targets.argsort(stable=True)
    parts = torch.stack([part[: len(train) // RANKS] for part in order.tensor_split(RANKS)])
    generator = torch.Generator().manual_seed(seed)
    model = task.model()
    for parameter in model.parameters():
        bound = parameter.shape[-1] ** -0.5
        parameter.data.uniform_(-bound, bound, generator=generator)
    # Shape [ranks, inputs, outputs] and [ranks, 1, outputs].
    tensors = [
        (p.detach().T if p.dim() == 2 else p.detach()[None]).repeat(RANKS, 1, 1).requires_grad_()
        for p in model.parameters()
    ]
    exchanged = 0
    for step in range(1, LOCAL_TOTAL + 1):
        places = torch.randint(parts.shape[1], (RANKS, LOCAL_BATCH), generator=generator)
        numbers = parts.gather(1, places)
        outputs = _outputs(tensors, train.inputs[numbers])
        losses = functional.cross_entropy(
            outputs.flatten(0, 1), train.targets[numbers].flatten(), reduction="sum"
        )
        gradients = torch.autograd.grad(losses / LOCAL_BATCH, tensors)
        with torch.no_grad():
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor -= LOCAL_LR * gradient
                if step % local_steps == 0:
                    tensor.copy_(tensor.mean(dim=0, keepdim=True).expand_as(tensor))
                    exchanged += tensor[0].nbytes
    with torch.no_grad():
        assert isinstance(test.inputs, Tensor)
        outputs = _outputs([tensor[:1] for tensor in tensors], test.inputs[None])[0]
        return (outputs.argmax(dim=1) == test.targets).float().mean().item(), exchanged


def _outputs(tensors: list[Tensor], inputs: Tensor) -> Tensor:
    *hidden, weights, bias = tensors
    for before, offset in zip(hidden[::2], hidden[1::2], strict=True):
        inputs = (inputs @ before + offset).relu()
    return inputs @ weights + bias


def measure_local_sgd() -> Data:
    """Train with averagings after so many steps; the same samples and steps each time."""
    runs = []
    for split in SPLITS:
        for steps in LOCAL_STEPS:
            results = [local_sgd(steps, split, seed) for seed in range(SEEDS)]
            runs.append(
                {
                    "split": split,
                    "local_steps": steps,
                    "bytes": results[0][1],
                    "accuracies": [round(accuracy, 4) for accuracy, _ in results],
                }
            )
    return {"steps": LOCAL_TOTAL, "seeds": SEEDS, "runs": runs}


def draw_local_sgd(data: Data) -> Drawing:
    """Draw the accuracy against the bytes that each rank exchanges."""
    from benchmarks.figures.drawing import COLOURS, axes

    with axes(height=3.2) as ax:
        for number, (split, name) in enumerate(SPLITS.items()):
            runs = [run for run in data["runs"] if run["split"] == split]
            sizes = [run["bytes"] / 1e6 for run in runs]
            means = [100 * statistics.fmean(run["accuracies"]) for run in runs]
            ax.plot(sizes, means, "o-", color=COLOURS[number])
            for run, size, mean in zip(runs, sizes, means, strict=True):
                if number == 1:
                    ax.annotate(
                        str(run["local_steps"]),
                        (size, mean),
                        xytext=(4, -14),
                        textcoords="offset points",
                        color=COLOURS[number],
                    )
            ax.annotate(
                name,
                (sizes[2], means[2]),
                xytext=(0, 6 if number == 0 else -34),
                textcoords="offset points",
                color=COLOURS[number],
                ha="center" if number == 0 else "left",
            )
        ax.set_xscale("log")
        ax.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        ax.set_ylim(20, 104)
        ax.set_xlabel("MB that a rank exchanges in the run (labels: steps between two averagings)")
        ax.set_ylabel("test accuracy, %")
        return _whole(ax.figure)


def table_local_sgd(data: Data) -> str:
    """Return bytes and accuracies by the steps between two averagings."""
    lines = [
        "| steps between two averagings | MB exchanged by a rank | "
        + " | ".join(f"accuracy, {name}" for name in SPLITS.values())
        + " |",
        "|---|---|---|---|",
    ]
    for steps in LOCAL_STEPS:
        both = [run for run in data["runs"] if run["local_steps"] == steps]
        cells = " | ".join(f"{100 * statistics.fmean(run['accuracies']):.0f} %" for run in both)
        lines.append(f"| {steps} | {both[0]['bytes'] / 1e6:.2f} | {cells} |")
    return "\n".join(lines)


FIGURES = (
    Figure(
        name="local-sgd",
        page="local-sgd",
        title="Test accuracy of local SGD against the bytes that a rank exchanges",
        measure=measure_local_sgd,
        draw=draw_local_sgd,
        table=table_local_sgd,
    ),
)
