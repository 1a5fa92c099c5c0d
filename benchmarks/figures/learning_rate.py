"""The figure of docs/learn/learning-rate.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.figures.figure import Data, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing
from benchmarks.figures.gradients import digits

GLOBAL_BATCHES = (2, 8, 32, 128, 512)
SAMPLES, SEEDS = 12_288, 6
RATES = {
    "SGD": [0.08 * 2 ** (k / 2) for k in range(10)],
    "Adam": [0.001 * 2 ** (k / 2) for k in range(14)],
}


def batch_and_learning_rate() -> Data:
    """Find the learning rate of the lowest training loss after a fixed number of samples."""
    inputs, classes = digits()
    found: dict[str, Any] = {"global_batches": list(GLOBAL_BATCHES), "samples": SAMPLES}
    for optimizer, rates in RATES.items():
        best, lowest = [], []
        for batch in GLOBAL_BATCHES:
            losses = _losses(inputs.float(), classes, optimizer, rates, batch)
            number = int(losses.argmin())
            best.append(round(rates[number], 5))
            lowest.append(round(float(losses[number]), 4))
        found[optimizer] = {"best_rate": best, "loss": lowest}
    return found


def _losses(
    inputs: Tensor, classes: Tensor, optimizer: str, rates: list[float], batch: int
) -> Tensor:
    """Train a model for each rate and seed, all at once; return the loss by rate, [rates]."""
    generator = torch.Generator().manual_seed(0)
    many = len(rates) * SEEDS

    def weights(*shape: int) -> Tensor:
        # The same first weights for each rate.
        bound = shape[0] ** -0.5
        one = (torch.rand(SEEDS, *shape, generator=generator) * 2 - 1) * bound
        all_rates: Tensor = one.repeat(len(rates), 1, 1)
        return all_rates.requires_grad_()

    parameters = [weights(64, 32), weights(1, 32), weights(32, 10), weights(1, 10)]
    rate = torch.tensor(rates).repeat_interleave(SEEDS)[:, None, None]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        first, first_bias, second, second_bias = parameters
        scores = torch.tanh(x @ first + first_bias) @ second + second_bias
        found: Tensor = functional.cross_entropy(
            scores.flatten(0, 1), y.expand(many, -1).flatten(), reduction="none"
        )
        return found.view(many, -1).mean(dim=1)

    for step in range(1, SAMPLES // batch + 1):
        chosen = torch.randint(len(inputs), (batch,), generator=generator)
        gradients = torch.autograd.grad(loss(inputs[chosen], classes[chosen]).sum(), parameters)
        with torch.no_grad():
            for parameter, gradient, (first, second) in zip(
                parameters, gradients, moments, strict=True
            ):
                if optimizer == "SGD":
                    parameter -= rate * gradient
                    continue
                first.lerp_(gradient, 0.1)
                second.lerp_(gradient.square(), 0.001)
                size = (second / (1 - 0.999**step)).sqrt() + 1e-8
                parameter -= rate * first / (1 - 0.9**step) / size
    with torch.no_grad():
        losses: Tensor = loss(inputs, classes).view(len(rates), SEEDS).mean(dim=1)
        # What has diverged is no candidate.
        losses[losses.isnan()] = torch.inf
        return losses


def draw_batch_and_learning_rate(data: Data) -> Drawing:
    """Draw the best rates, with lines of both rules from the smallest batch on."""
    from benchmarks.figures.drawing import COLOURS, TEXT, axes

    batches = data["global_batches"]
    with axes(height=3.8) as ax:
        for optimizer, colour, power, rule in (
            ("SGD", COLOURS[0], 1.0, "linear"),
            ("Adam", COLOURS[1], 0.5, "square root"),
        ):
            rates = data[optimizer]["best_rate"]
            ax.plot(batches, rates, "o-", color=colour)
            middle = len(batches) // 2
            factor, place = (1.3, "bottom") if optimizer == "Adam" else (0.75, "top")
            y = rates[middle] * factor
            ax.text(batches[middle], y, optimizer, color=colour, ha="center", va=place)
            line = [rates[0] * (batch / batches[0]) ** power for batch in batches]
            shown = [(b, r) for b, r in zip(batches, line, strict=True) if r < 30]
            ax.plot(*zip(*shown, strict=True), ":", color=TEXT, linewidth=1.2)
            x, y = shown[-1]
            ax.text(x * 1.1, y, rule, va="center")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlim(batches[0] * 0.85, batches[-1] * 2.6)
        ax.set_xticks(batches, [str(batch) for batch in batches])
        ax.set_xlabel("global batch")
        ax.set_ylabel("best learning rate")
        return ax.figure  # type: ignore[return-value]


def table_batch_and_learning_rate(data: Data) -> str:
    """Write the best rate and its loss by global batch."""
    head = " | ".join(map(str, data["global_batches"]))
    rows = [f"| global batch | {head} |", "|---" * (len(data["global_batches"]) + 1) + "|"]
    for optimizer in RATES:
        for key, label in (("best_rate", "best rate"), ("loss", "its loss")):
            cells = " | ".join(f"{value:.2g}" for value in data[optimizer][key])
            rows.append(f"| {optimizer}, {label} | {cells} |")
    return "\n".join(rows)


FIGURES = (
    Figure(
        name="batch_and_learning_rate",
        page="learning-rate",
        title="The best learning rate by global batch, for SGD and for Adam",
        measure=batch_and_learning_rate,
        draw=draw_batch_and_learning_rate,
        table=table_batch_and_learning_rate,
    ),
)
