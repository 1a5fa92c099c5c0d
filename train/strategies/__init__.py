"""How a step's work is shared between processes. One module per strategy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from train.strategies.base import Parts, Strategy

# Module and class by name; imported only when asked for: DistributedDataParallel alone takes a
# second.
_COMPOSED = ("train.strategies.hybrid", "Composed")
STRATEGIES = {
    "single": ("train.strategies.single", "Single"),
    "dataparallel": ("train.strategies.dataparallel", "Threaded"),
    "ddp": ("train.strategies.ddp", "DataParallel"),
    "fsdp": _COMPOSED,
    "hsdp": _COMPOSED,
    "manual": ("train.strategies.manual", "Manual"),
    "pp": ("train.strategies.pp", "Pipelined"),
    "tp": _COMPOSED,
    "cp": _COMPOSED,
    "hybrid": _COMPOSED,
    "ps": ("train.strategies.ps", "Served"),
    "local-sgd": ("train.strategies.local_sgd", "LocalSgd"),
    "exact": ("train.strategies.exact", "ExactDataParallel"),
}


def build(name: str, parts: Parts) -> Strategy:
    """Make the strategy of that name; whatever its name, a layout with stages is a pipeline's."""
    if parts.config.reduce == "exact":
        name = "exact"
    elif parts.layout.pp > 1:
        name = "pp"
    module, attribute = STRATEGIES[name]
    return cast("Strategy", getattr(import_module(module), attribute)(parts))
