"""What ranks of sharded data parallel must do alike: gather in turn, and reduce every gradient.

torch shards a model in units: here the task's pieces, and one unit for the rest of the model.
Before a unit runs, its ranks gather its parameters; in the backward pass they gather again, and
reduce its gradients. All of that goes by position and size: ranks that do it in another order, or
for other parameters, get each other's numbers without an error, or wait for ever. Data that take
another branch through the model on each rank must therefore change nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from train.errors import UsageError
from train.model.trees import mapped, tensors_of
from train.parallel.fsdp_precision import widen_gradients


class Units:
    """The units of one model on this rank, watched from within torch's own hooks."""

    def __init__(self, model: nn.Module, pieces: Sequence[str], *, task: str) -> None:
        """Watch a model that has been sharded.

        Args:
            model: the whole, itself a unit.
            pieces: names of the units in it, in the order of the forward pass.
            task: the task's name, for messages.
        """
        self._model, self.pieces, self._task = model, tuple(pieces), task
        self._next = 0
        self._with_gradient: set[int] = set()
        self._groups: list[Any] = []
        self._names: dict[int, str] = {}
        numbers = {id(model.get_submodule(name)): n for n, name in enumerate(self.pieces)}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Public hooks would be compiled along with a piece, or come too early or too late.
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    self._watch(group, module, numbers.get(id(module)))
        if self.pieces:
            model.register_forward_pre_hook(self._begin_pass)
            model.register_forward_hook(self._end_pass)

    def begin_step(self) -> None:
        """Forget which parameters have had gradients."""
        self._with_gradient.clear()

    def without_gradient(self) -> frozenset[str]:
        """Name the parameters to which this rank's data have given no gradient in this step."""
        if not self._names:
            # Not before: weights that begin on the device `meta` are replaced after sharding.
            owners = {id(p): name for name, p in self._model.named_parameters()}
            self._names = {
                id(parameter): owners[id(parameter.sharded_param)]
                for group in self._groups
                for parameter in group.fsdp_params
                if parameter.sharded_param.requires_grad
            }
        if len(self._with_gradient) == len(self._names):
            return frozenset()
        missing = self._names.keys() - self._with_gradient
        return frozenset(self._names[number] for number in missing)

    def _watch(self, group: Any, module: nn.Module, number: int | None) -> None:
        self._groups.append(group)
        group.post_backward = self._noting(group, group.post_backward)
        if any(parameter.requires_grad for parameter in module.parameters()):
            group.post_forward = _wanting_gradient(group.post_forward)
        if number is not None:
            group.pre_forward = self._in_turn(number, group.pre_forward)

    def _noting(self, group: Any, post_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Note which of a unit's parameters have gradients, before zeros stand in for the rest."""

        def note(*arguments: Any) -> Any:
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if parameter.unsharded_accumulated_grad is not None or (
                    whole is not None and whole.grad is not None
                ):
                    self._with_gradient.add(id(parameter))
            widen_gradients(group)
            return post_backward(*arguments)

        return note

    def _in_turn(self, number: int, pre_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Refuse to run a piece when another is due: its peers would gather that one."""

        def enter(*arguments: Any) -> Any:
            if number != self._next:
                self._refuse(number)
            self._next += 1
            return pre_forward(*arguments)

        return enter

    def _begin_pass(self, module: nn.Module, arguments: object) -> None:
        self._next = 0

    def _end_pass(self, module: nn.Module, arguments: object, outputs: object) -> None:
        if self._next != len(self.pieces):
            self._refuse(len(self.pieces))

    def _refuse(self, number: int) -> None:
        if number < self._next:
            what = f"{self.pieces[number]!r} runs a second time"
        else:
            what = f"{self.pieces[self._next]!r} is left out"
        raise UsageError(
            f"task {self._task!r}: the pieces of its model are sharded one by one and must run in "
            f"each pass, once and one after the other ({', '.join(map(repr, self.pieces))}), but "
            f"{what}: ranks whose data take another way would mix up each other's parameters; have "
            "pieces() name a module around the branch (or '', the whole model), or use "
            "--strategy ddp"
        )


def _wanting_gradient(post_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Have the backward pass reach a unit on every rank, also where its data went around it.

    Otherwise this rank would gather and reduce it later than its peers, or not at all.
    """

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        outputs = post_forward(module, inputs, outputs)
        if torch.is_grad_enabled() and not any(t.requires_grad for t in tensors_of(outputs)):
            return mapped(_leaf, outputs)
        return outputs

    return leave


def _leaf(value: object) -> object:
    """Give a tensor at which the backward pass arrives, and ends."""
    if isinstance(value, Tensor) and value.is_floating_point():
        # Another one than was given, which may be the data themselves.
        return value.detach().requires_grad_()
    return value
