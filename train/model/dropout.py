"""Setting the probability of `--dropout` in torch's layers."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..errors import UsageError


def apply(model: nn.Module, probability: float, *, task: str) -> None:
    """Set the probability of all dropout layers of a model, in place.

    Raises:
        UsageError: the model has no dropout layer.
    """
    places = list(_places(model))
    if not places:
        raise UsageError(
            f"--dropout {probability}: the model of task {task!r} has no dropout layer"
            f"{_except(model)}; leave it out"
        )
    for _, module, attribute in places:
        setattr(module, attribute, probability)


def describe(model: nn.Module) -> str:
    """Name the layers that `apply()` changes, and other attributes that look like probabilities."""
    names = [name or type(module).__name__ for name, module, _ in _places(model)]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"holds for {shown}{_except(model)}"


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield name, layer, and the name of its probability attribute."""
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            yield name, module, "p"
        elif isinstance(module, nn.MultiheadAttention):
            yield name, module, "dropout"
        elif isinstance(module, nn.RNNBase) and module.num_layers > 1:
            # Between its layers.
            yield name, module, "dropout"


def _except(model: nn.Module) -> str:
    """Name probabilities that the user's modules keep as numbers."""
    others = [
        f"{name}.{attribute}" if name else attribute
        for name, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for attribute, value in vars(module).items()
        if isinstance(value, float) and "drop" in attribute.lower()
    ]
    return f", and does not reach {', '.join(others)}" if others else ""
