"""Strategies, which share a step's work between processes; one module per strategy."""

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from .base import Parts, Strategy

_COMPOSED = (".hybrid", "Composed")
STRATEGIES = {
    "single": (".one_process", "Single"),
    "dataparallel": (".one_process", "Threaded"),
    "ddp": (".ddp", "DataParallel"),
    "fsdp": _COMPOSED,
    "hsdp": _COMPOSED,
    "manual": (".one_process", "Manual"),
    "pp": (".pipeline.schedule", "Pipelined"),
    "tp": _COMPOSED,
    "cp": _COMPOSED,
    "hybrid": _COMPOSED,
    "ps": (".parameter_server.strategy", "Served"),
    "local-sgd": (".local_sgd", "LocalSgd"),
    "exact": (".ddp", "ExactDataParallel"),
}
"""Module and class by name; imported only when used: DistributedDataParallel alone takes a second.
"""


WHOLE = ("ddp", "ps", "local-sgd")
"""Strategies with a whole model on each rank: without training, ranks exchange nothing."""


def build(name: str, parts: "Parts", *, trains: bool = True) -> "Strategy":
    """Make the strategy of that name; a layout with stages always gets the pipeline.

    Without training, ranks with whole models run them separately, each on its samples.
    """
    if not trains and name in WHOLE:
        name = "single"
    elif trains and parts.config.reduce == "exact":
        name = "exact"
    elif parts.layout.pp > 1:
        name = "pp"
    module, attribute = STRATEGIES[name]
    return cast("Strategy", getattr(import_module(module, __name__), attribute)(parts))
