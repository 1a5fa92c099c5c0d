"""Does a model compute for a part of a sequence what it computes there for all of it?

Context parallelism gives attention and positions what they need to know of other parts. A user's
own layer that counts positions, or looks beyond one, would start anew in each part: no error,
another model. So one sample is sent through before the first step: two parts at once, and the
second by itself. Attention is replaced by something that looks at each position alone, so any
difference comes from such a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from train.layers import CausalAttention, Placed
from train.model.trees import Tree, mapped, tensors_of
from train.parallel.base import full

# Beside the size of the outputs. In single precision rounding makes 1e-6 of it; halves round by
# half a percent, layer after layer.
FAR, FAR_IN_HALVES = 1e-3, 0.1


def differs(run: Callable[[Tree], Tree], model: nn.Module, inputs: Tree, *, halves: bool) -> bool:
    """Say whether a model takes the second part of a sequence for the first.

    Args:
        run: computes outputs without gradients; `None` where another rank has them.
        model: the model, or this rank's stages of it.
        inputs: two parts of some sequences. Shape [batch, time, ...], of each tensor.
        halves: the model computes in half precision.
    """
    part = mapped(lambda tensor: tensor.chunk(2, dim=1)[1].contiguous(), inputs)
    # Modules are compiled for the shapes of training, later.
    with torch.compiler.set_stance("force_eager"):
        with _placed(model, 0):
            whole = run(inputs)
        with _placed(model, tensors_of(part)[0].shape[1]):
            alone = run(part)
    outputs = zip(tensors_of(whole), tensors_of(alone), strict=False)
    # Of all of them, as putting them together takes all ranks.
    return any([_differ(full(one), full(other), halves=halves) for one, other in outputs])


def _differ(whole: Tensor, alone: Tensor, *, halves: bool) -> bool:
    """Compare one of the outputs for two parts with that for the second by itself."""
    if whole.dim() != alone.dim():
        return False
    # Along which dimension positions follow each other is the model's own affair.
    along = [dim for dim, size in enumerate(alone.shape) if whole.shape[dim] == 2 * size]
    if not along:
        return False
    second_half = whole.chunk(2, dim=along[0])[1].float()
    far = FAR_IN_HALVES if halves else FAR
    return bool((second_half - alone.float()).norm() > far * second_half.norm())


@contextmanager
def _placed(model: nn.Module, offset: int) -> Iterator[None]:
    """Have a model believe that its input begins at `offset`, and attend to nothing else."""
    kept = []
    handles = []

    def begin(module: Placed, arguments: Sequence[object]) -> None:
        module.offset = offset

    for module in model.modules():
        if isinstance(module, CausalAttention):
            kept.append((module, module.context))
            module.context = _Itself()
        elif isinstance(module, Placed):
            # The last word: context parallelism has a hook of its own.
            handles.append(module.register_forward_pre_hook(begin))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for attention, context in kept:
            attention.context = context


class _Itself:
    """Attends to nothing but a position's own query, key and value, and shows all three."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix them so that it shows if a query or a key is turned by another angle."""
        return value + query.sum(-1, keepdim=True) - 2 * key.sum(-1, keepdim=True)
