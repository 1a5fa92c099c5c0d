"""The probability of `--dropout`, wherever layers of torch keep theirs."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..errors import UsageError


def apply(model: nn.Module, probability: float, *, task: str) -> None:
    """Give all dropout layers of a model a probability, in place.

    Raises:
        UsageError: there is none.
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
    """Name the layers that `apply()` reaches, and what looks like a probability elsewhere."""
    names = [name or type(module).__name__ for name, module, _ in _places(model)]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"holds for {shown}{_except(model)}"


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield name, layer, and the attribute that the layer drops by."""
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            yield name, module, "p"
        elif isinstance(module, nn.MultiheadAttention):
            yield name, module, "dropout"
        elif isinstance(module, nn.RNNBase) and module.num_layers > 1:
            # Between its layers.
            yield name, module, "dropout"


def _except(model: nn.Module) -> str:
    """Name probabilities that modules of the user's own keep as numbers."""
    others = [
        f"{name}.{attribute}" if name else attribute
        for name, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for attribute, value in vars(module).items()
        if isinstance(value, float) and "drop" in attribute.lower()
    ]
    return f", and does not reach {', '.join(others)}" if others else ""
