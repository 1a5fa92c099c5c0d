"""What ranks must have in common: initial weights, data, counters, which parameters a step trains.

A step trains the parameters to which some rank's data have given a gradient. A layer that only some
batches use, or none, has no gradient, and an optimizer leaves it alone. Ranks that exchange
gradients must send one for every parameter, so zeros stand in for those that a rank has none of.
Where no rank has one, the zeros have to go again: momentum and weight decay would move the
parameter, which one process does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.data.order import Batch, Source
from train.errors import UsageError
from train.model.trees import tensors_of
from train.runtime.process_group import Group

if TYPE_CHECKING:
    from train.parallel.base import Strategy
    from train.parallel.inventory import Inventory

# Elements of a tensor that are compared: random numbers differ in each of them.
LOOKED_AT = 32


def fingerprint(tensor: Tensor) -> str:
    """Give a text that two tensors have in common if they are likely to hold the same.

    Of a tensor on the device `meta`, which holds nothing, only shape and type count.
    """
    digest = hashlib.sha256(f"{list(tensor.shape)} {tensor.dtype}".encode())
    # What torch packs into types of its own (quantised, sparse) is left alone.
    with suppress(RuntimeError):
        if not tensor.is_meta and tensor.numel():
            flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            # As bytes: not every type can be indexed.
            rows = flat.view(torch.uint8).view(len(flat), -1)
            count = min(LOOKED_AT, len(rows))
            numbers = torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).long()
            digest.update(rows[numbers.to(rows.device)].cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def differing(mine: Mapping[str, str], group: Group) -> list[str]:
    """Name what this rank and rank 0 do not have in common; all ranks call this."""
    joint = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    if len({*group.gather(joint)}) == 1:
        return []
    first = group.broadcast(dict(mine))
    names = [n for n in sorted({*mine, *first}) if mine.get(n) != first.get(n)]
    return sorted({name for rank in group.gather(names) for name in rank})


def check_alike(given: Inventory, group: Group, *, task: str) -> None:
    """Make sure that all ranks begin with the same model, and that it has no hidden ties.

    Raises:
        UsageError: on all ranks; names what differs.
    """
    for names in given.overlaps:
        raise UsageError(
            f"task {task!r}: {' and '.join(names)} are different parameters in the same memory, "
            "which do not stay together when the model is cut or moved; share the parameter itself "
            "(`head.weight = embedding.weight`, without .data)"
        )
    if others := differing(given.fingerprints, group):
        raise UsageError(
            f"task {task!r}: model() has given the ranks different initial values of "
            f"{some_of(frozenset(others))}; draw them from torch's global generator, which is "
            "seeded alike everywhere, or from a generator with a fixed seed"
        )


def check_data(train: Source, test: Source, group: Group, *, task: str) -> None:
    """Make sure that all ranks have the same data: each rank takes slices of all of it.

    Only data in memory are compared: a Dataset may draw its samples anew each time.

    Raises:
        UsageError: on all ranks; the data differ.
    """
    mine = {"the number of test samples": str(len(test))}
    for name, data in (("training", train), ("test", test)):
        if isinstance(data, Batch):
            for place, tensor in enumerate(tensors_of((data.inputs, data.targets))):
                mine[f"the {name} data (tensor {place})"] = fingerprint(tensor)
    if names := differing(mine, group):
        raise UsageError(
            f"task {task!r}: the ranks were given different data: {names[0]}; every rank must be "
            "given all of it, and random data come from a generator with a fixed seed"
        )


def check_counters(strategy: Strategy, group: Group, *, task: str) -> None:
    """Make sure that buffers of whole numbers have moved alike on all ranks.

    Running statistics are floats, and the ranks take their mean. A buffer that counts a rank's own
    samples has no mean, and a checkpoint would hold one rank's count only.

    Raises:
        UsageError: on all ranks; names the buffer.
    """
    parameters = {name for name, _ in strategy.named_parameters()}
    mine = {}
    for name, tensor in strategy.model_state().items():
        if name not in parameters and not (tensor.is_floating_point() or tensor.is_complex()):
            # Tensor parallelism gives each rank a whole copy of a buffer.
            held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            mine[name] = f"{fingerprint(held)} {int(held.sum())}"
    seen: dict[str, str] = {}
    for rank in group.gather(mine):
        for name, value in rank.items():
            if seen.setdefault(name, value) != value:
                raise UsageError(
                    f"task {task!r}: buffer {name!r} holds whole numbers that differ from rank to "
                    "rank, each of its own samples; nothing says how they belong together: make it "
                    "a buffer of floats, of which ranks take the mean after each step, or one that "
                    "is not saved (persistent=False), or count in one process"
                )


class Untrained:
    """Agrees between the ranks on the parameters that a step leaves alone.

    Each rank knows for which of its own it has no gradient. As long as that stays as it was when
    they last agreed, nothing is exchanged: that it does travels with the step's loss.
    """

    def __init__(self, strategy: Strategy, group: Group) -> None:
        """Begin with every parameter trained."""
        self._strategy, self._group = strategy, group
        self._agreed_for = frozenset[str]()
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: Sequence[str] = ()
        self.names = frozenset[str]()
        """Parameters, on any rank, for which no rank has a gradient."""

    def changed(self) -> bool:
        """Say whether this rank's data have left out other parameters than when last agreed."""
        return self._strategy.without_gradient() != self._agreed_for

    def agree(self) -> None:
        """Find out what no rank has a gradient for; all ranks call this."""
        if not self._names:
            self._parameters = dict(self._strategy.named_parameters())
            mine = [name for name, p in self._parameters.items() if p.requires_grad]
            self._names = sorted({name for rank in self._group.gather(mine) for name in rank})
        lacking = self._agreed_for = self._strategy.without_gradient()
        trained = torch.tensor(
            [name in self._parameters and name not in lacking for name in self._names],
            dtype=torch.int32,
            device=self._group.device,
        )
        if self._group.connected:
            dist.all_reduce(trained)
        counts: list[int] = trained.tolist()
        self.names = frozenset(n for n, count in zip(self._names, counts, strict=True) if not count)

    def forget_zeros(self) -> None:
        """Take away the zeros that stand for gradients which no rank has."""
        for name in self.names:
            if (parameter := self._parameters.get(name)) is not None:
                parameter.grad = None


def some_of(names: frozenset[str], most: int = 4) -> str:
    """Write names, the first of many."""
    rest = len(names) - most
    return ", ".join(sorted(names)[:most]) + (f" and {rest} more" if rest > 0 else "")
