"""How a step's work is shared between processes. One module per strategy."""

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from train.parallel.base import Parts, Strategy

_COMPOSED = ("train.parallel.hybrid", "Composed")
STRATEGIES = {
    "single": ("train.parallel.one_process", "Single"),
    "dataparallel": ("train.parallel.one_process", "Threaded"),
    "ddp": ("train.parallel.ddp", "DataParallel"),
    "fsdp": _COMPOSED,
    "hsdp": _COMPOSED,
    "manual": ("train.parallel.one_process", "Manual"),
    "pp": ("train.parallel.pipeline.schedule", "Pipelined"),
    "tp": _COMPOSED,
    "cp": _COMPOSED,
    "hybrid": _COMPOSED,
    "ps": ("train.parallel.parameter_server.strategy", "Served"),
    "local-sgd": ("train.parallel.local_sgd", "LocalSgd"),
    "exact": ("train.parallel.ddp", "ExactDataParallel"),
}
"""Module and class by name; imported only when used: DistributedDataParallel alone takes a second.
"""


def build(name: str, parts: "Parts") -> "Strategy":
    """Make the strategy of that name; a layout with stages always gets the pipeline."""
    if parts.config.reduce == "exact":
        name = "exact"
    elif parts.layout.pp > 1:
        name = "pp"
    module, attribute = STRATEGIES[name]
    return cast("Strategy", getattr(import_module(module), attribute)(parts))
