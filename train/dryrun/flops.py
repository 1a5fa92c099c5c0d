"""Floating-point operations: a mode that adds up those of matrix products and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from train.dryrun.op_mode import Observer

_aten = torch.ops.aten
# The CPU's attention, of which torch's table knows only the GPU's.
_LIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}


class Flops(Observer):
    """Counts by torch's own formulas; unlike its `FlopCounterMode`, also the CPU's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def seen(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add up."""
        operation = func._overloadpacket
        formula = flop_registry.get(_LIKE.get(operation, operation))
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
