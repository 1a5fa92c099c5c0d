"""Activation checkpointing: the recomputation of a pass starts from the state of the first pass.

In `forward()`, modules may read and update buffers, such as a moving average, write parameters,
such as a clamp or a teacher that follows its student, or count passes in an attribute. When the
backward pass recomputes activations, this state has already changed. Without care, the
recomputation would start from another state, give the gradient of other activations, and update the
state once more.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ..errors import UsageError

SMALL = 2**16
"""Buffers up to this many elements are copied in every pass; larger ones only if they change."""
_PLAIN = (bool, int, float, str, type(None))


def recompute(module: nn.Module, name: str = "") -> None:
    """Make the backward pass recompute a piece's activations, instead of keeping them.

    This replaces `forward()`: wrapping the module would change the names of parameters.
    """
    forward: Callable[..., Any] = module.forward
    known = _Known(name)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first = _FirstPass(module, known)
        return first, _Repetition(first)

    module.forward = partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def plain_attributes(owner: object) -> dict[str, object]:
    """Return the plain Python attributes of a module or task, such as a number of passes."""
    return {name: value for name, value in vars(owner).items() if type(value) in _PLAIN}


def held_tensors(owner: object) -> dict[str, Tensor]:
    """Copy small tensors that a module or task keeps as attributes, such as its last activation.

    Tensors with a gradient, such as views of weights, are excluded: they lead to the parameters.
    """
    return {
        name: value.detach().clone()
        for name, value in vars(owner).items()
        if isinstance(value, Tensor) and not value.requires_grad and value.numel() <= SMALL
    }


def attributes_of(owner: object) -> dict[str, object]:
    """Return plain attributes and held tensors, for `changed_attributes()`."""
    return plain_attributes(owner) | held_tensors(owner)


def changed_attributes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Name the attributes that are new or have changed."""

    def same(one: object, other: object) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.equal(other)
        return type(one) is type(other) and one == other

    return [name for name, value in after.items() if not same(value, before.get(name))]


@contextmanager
def left_alone(owner: object) -> Iterator[None]:
    """Restore attributes after passes that must leave no trace, as a loss may count its calls."""
    own, before = vars(owner), attributes_of(owner)
    given = {name: own[name] for name in before}
    try:
        yield
    finally:
        for name in attributes_of(owner).keys() - before.keys():
            del own[name]
        for name, value in before.items():
            own[name] = given[name]
            if isinstance(value, Tensor):
                given[name].copy_(value)


@dataclass
class _Known:
    """Facts about a piece, collected in earlier passes."""

    piece: str
    """Its name."""
    constant: set[tuple[int, str]] = field(default_factory=set)
    """Large buffers, by module and name, that have not moved."""
    written: list[str] | None = None
    """Names of the parameters that forward() writes; None before the first pass."""


def _parameters(module: nn.Module) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Return a module's parameters, each with this rank's part of it.

    An FSDP unit returns none, as its ranks gather copies for the pass.
    """
    # An FSDPModule; importing that class would take a tenth of a second.
    if hasattr(module, "unshard"):
        return {}
    return {name: (one, _own(one.data)) for name, one in module.named_parameters()}


def _own(data: Tensor) -> Tensor:
    return data.to_local() if isinstance(data, DTensor) else data


class _FirstPass(AbstractContextManager[None]):
    """Notes parameters, buffers, attributes and random generators as a pass begins."""

    def __init__(self, module: nn.Module, known: _Known) -> None:
        self.module, self._known = module, known
        self.parameters: list[tuple[Tensor, Tensor]] = []
        """Parameters that forward() writes, with their earlier values."""
        self.buffers: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self.attributes: list[tuple[dict[str, Any], dict[str, object]]] = []

    def __enter__(self) -> None:
        # torch itself restores the state of the torch generators.
        self.generators = random.getstate(), np.random.get_state()
        self._parameters = _parameters(self.module)
        names = self._parameters if self._known.written is None else self._known.written
        self._before = {name: self._parameters[name][1].clone() for name in names}
        self._versions = {name: one._version for name, (one, _) in self._parameters.items()}
        self._kept: list[tuple[nn.Module, str, Tensor, int]] = []
        self._compared: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for own in self.module.modules():
            # Layers of torch keep no counters in Python, and normalise a training batch by itself.
            if not type(own).__module__.startswith("torch.nn."):
                self.attributes.append((vars(own), plain_attributes(own) | held_tensors(own)))
            elif isinstance(own, _BatchNorm) and own.training:
                continue
            for name, buffer in own._buffers.items():
                if buffer is None:
                    continue
                large = buffer.numel() > SMALL
                if large and (id(own), name) in self._known.constant:
                    self._kept.append((own, name, buffer, buffer._version))
                    continue
                before = buffer.clone()
                self.buffers.append((own._buffers, name, before))
                if large:
                    self._compared.append((own, name, buffer, before))

    def __exit__(self, *failure: object) -> None:
        for own, name, buffer, before in self._compared:
            # Tensors without contents cannot be compared.
            with suppress(RuntimeError):
                if own._buffers[name] is buffer and torch.equal(buffer, before):
                    self._known.constant.add((id(own), name))
        for own, name, buffer, version in self._kept:
            if buffer._version != version:
                raise UsageError(
                    f"--activation-checkpointing: buffer {name!r} of a {type(own).__name__} has "
                    "not moved in the first passes, and moves now: it is too large to be copied in "
                    "each pass, so that a repetition could not start from what the first pass saw; "
                    "leave out --activation-checkpointing"
                )
            if own._buffers[name] is not buffer:
                self.buffers.append((own._buffers, name, buffer))
        self._note_parameters()

    def _note_parameters(self) -> None:
        """Record the parameters that the pass has written."""
        written = [
            n for n, (one, _) in self._parameters.items() if one._version != self._versions[n]
        ]
        if self._known.written is None:
            # torch does not count writes through `.data`.
            changed = (n for n, before in self._before.items() if self._differs(n, before))
            self._known.written = [*dict.fromkeys([*written, *changed])]
        if late := [name for name in written if name not in self._known.written]:
            raise UsageError(
                f"--activation-checkpointing: forward() writes parameter {late[0]!r} of "
                f"{self._known.piece!r} now, and has not in the first pass: a repetition could not "
                "start from what this pass saw; leave out --activation-checkpointing"
            )
        self.parameters = [(self._parameters[n][1], self._before[n]) for n in self._known.written]
        self._before, self._parameters = {}, {}

    def _differs(self, name: str, before: Tensor) -> bool:
        # Tensors without contents cannot be compared.
        with suppress(RuntimeError):
            return not torch.equal(self._parameters[name][1], before)
        return False


class _Repetition(AbstractContextManager[None]):
    """Makes a module start from the state of the first pass, and discards its updates.

    It can be entered repeatedly: pipeline schedules that traverse a graph in two passes recompute
    the activations in each.
    """

    def __init__(self, first: _FirstPass) -> None:
        self._first = first

    def __enter__(self) -> None:
        first = self._first
        self._generators = random.getstate(), np.random.get_state()
        _set(first.generators)
        self._buffers = [(own._buffers, dict(own._buffers)) for own in first.module.modules()]
        for buffers, _ in self._buffers:
            buffers.update({n: None if b is None else b.clone() for n, b in buffers.items()})
        for buffers, name, before in first.buffers:
            buffers[name] = before.clone()
        self._parameters = [(tensor, tensor.clone()) for tensor, _ in first.parameters]
        for tensor, before in first.parameters:
            tensor.copy_(before)
        self._attributes = [(own, dict(own)) for own, _ in first.attributes]
        for own, values in first.attributes:
            own.update(values)

    def __exit__(self, *failure: object) -> None:
        _set(self._generators)
        for buffers, originals in self._buffers:
            buffers.update(originals)
        for tensor, now in self._parameters:
            tensor.copy_(now)
        for (own, values), (_, before) in zip(
            self._attributes, self._first.attributes, strict=True
        ):
            own.update({name: values[name] for name in before})


def _set(generators: tuple[Any, Any]) -> None:
    random.setstate(generators[0])
    np.random.set_state(generators[1])
