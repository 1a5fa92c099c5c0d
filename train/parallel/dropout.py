"""Dropout on activations that tensor parallelism has cut.

Ranks that share matrices share their random numbers, so that replicated activations are equal.
Between a matrix cut by columns and the next one, cut by rows, each rank has different units, but
would drop the same positions. A dropout layer there uses a separate seed per rank. Other kinds of
dropout there, such as `functional.dropout()`, are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..errors import UsageError
from ..model.trees import Tree, mapped
from ..tasks.styles import drop_by_rank
from .base import Parts

DROPPING = {
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout,
}  # fmt: skip
Use = tuple[str, int]
"""The innermost module around a dropout, and the number of earlier dropouts in that module."""


def draw_by_rank(
    modules: Sequence[nn.Module], run: Callable[[], object], inputs: Tree, parts: Parts
) -> None:
    """Make dropout layers that receive a part of a tensor draw different numbers on each rank.

    Args:
        modules: the cut model, or this rank's cut stages.
        run: sends `inputs` through the modules, without gradients; all ranks call it.
        inputs: the inputs of `run`.
        parts: the ranks, and the uncut model.

    Raises:
        UsageError: on all ranks; another kind of dropout receives a part.
    """
    if parts.layout.tp == 1 or parts.config.infers:
        return
    with _Dropping(modules) as cut:
        run()
    problem = ""
    if any(shape is not None for shape in cut.shapes.values()):
        whole = _whole(parts, inputs)
        layers = {name: layer for module in modules for name, layer in module.named_modules()}
        rank = parts.layout.coordinates(parts.group.rank_info.rank)["tp"]
        for use, shape in cut.shapes.items():
            if shape is None or whole.get(use, shape) == shape:
                continue
            layer = layers[use[0]]
            if type(layer) is nn.Dropout:
                drop_by_rank(layer, rank)
            else:
                problem = problem or (
                    f"--tp {parts.layout.tp}: layer {use[0]!r} ({type(layer).__name__}) of task "
                    f"{parts.task.name!r} drops from what tensor_plan() cuts, {list(shape)} of "
                    f"{list(whole[use] or ())}, and would drop the same places on all ranks: use "
                    "torch.nn.Dropout there, or leave its neighbours out of the plan"
                )
    if problem := next(filter(None, parts.group.gather(problem)), ""):
        raise UsageError(problem)


def _whole(parts: Parts, inputs: Tree) -> Mapping[Use, torch.Size | None]:
    """Return the dropout inputs' shapes without tensor parallelism."""
    for device in (torch.device("meta"), torch.device("cpu")):
        # Models that read values of tensors run on the CPU only.
        with suppress(RuntimeError, NotImplementedError):
            model = parts.sketch(device).eval()
            given = mapped(partial(Tensor.to, device=device), inputs)
            with torch.no_grad(), _Dropping([model]) as whole:
                model(given)
            return whole.shapes
    return {}


class _Dropping(TorchFunctionMode):
    """Records the shape of each dropout's input by module; `None` for a DTensor."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.shapes: dict[Use, torch.Size | None] = {}
        self._modules, self._running = modules, [""]

    def __enter__(self) -> "_Dropping":
        self._hooks = ExitStack()
        self._hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for root in self._modules:
            for name, module in root.named_modules():
                before = module.register_forward_pre_hook(
                    lambda *_, name=name: self._running.append(name)
                )
                after = module.register_forward_hook(self._leave)
                self._hooks.callback(before.remove)
                self._hooks.callback(after.remove)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def _leave(self, *_: object) -> None:
        # The hook must return None: another value would replace the layer's output.
        self._running.pop()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]  # torch's
        self._hooks.close()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in DROPPING:
            given = args[0] if args else named["input"]
            module = self._running[-1]
            number = sum(name == module for name, _ in self.shapes)
            self.shapes[module, number] = None if isinstance(given, DTensor) else given.shape
        return func(*args, **named)
