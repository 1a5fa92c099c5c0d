"""Does a strategy train the model that it was given, and do all ranks train the same one?

Cutting a model replaces its parameters by other objects. A lost tie between two layers, a weight
that is no longer frozen or a lost buffer raises no error. Therefore each strategy compares the
model that it has made with the model that it was given, before the first step. And ranks compare
what they must have in common: initial weights, data, counters in buffers, and which parameters a
step trains.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..data.order import Batch, Source
from ..errors import UsageError
from ..model.trees import tensors_of
from ..runtime.process_group import RankGroup

if TYPE_CHECKING:
    from .base import Strategy

SAMPLED = 6
"""Samples of a Dataset that are read and compared."""
LOOKED_AT = 32
"""Elements of a tensor that are compared: random numbers differ in each of them."""


def fingerprint(tensor: Tensor) -> str:
    """Return a text that two tensors have in common if they are likely to hold the same.

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


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Everything that a model consists of."""

    entries: Mapping[str, tuple[str, str]]
    """Kind of each tensor, such as `frozen parameter`, its shape and type; if sharded, the whole's.

    By name; a tied tensor has an entry for each of its names.
    """
    ties: tuple[tuple[str, ...], ...]
    """Names of one and the same tensor, two or more, sorted."""
    overlaps: tuple[tuple[str, ...], ...]
    """Names of different parameters that lie in the same memory."""
    fingerprints: Mapping[str, str]
    """What each tensor holds; of one that is sharded, nothing."""

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> "Inventory":
        """List what a model, or the stages that a rank holds of it, consist of."""
        entries: dict[str, tuple[str, str]] = {}
        names: dict[int, list[str]] = {}
        places: dict[int, dict[int, str]] = {}
        fingerprints: dict[str, str] = {}
        for module in modules:
            tensors: list[tuple[str, str, Tensor]] = [
                ("parameter" if parameter.requires_grad else "frozen parameter", name, parameter)
                for name, parameter in module.named_parameters(remove_duplicate=False)
            ]
            for prefix, owner in module.named_modules(remove_duplicate=False):
                for own, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
                    saved = own not in owner._non_persistent_buffers_set
                    kind = "buffer" if saved else "buffer that is not saved"
                    tensors.append((kind, f"{prefix}.{own}" if prefix else own, buffer))
            for kind, name, tensor in tensors:
                dtype = str(tensor.dtype).removeprefix("torch.")
                entries[name] = kind, f"{list(tensor.shape)} {dtype}"
                names.setdefault(id(tensor), []).append(name)
                if isinstance(tensor, DTensor):
                    continue
                fingerprints[name] = fingerprint(tensor)
                if not kind.startswith("buffer") and tensor.numel() and not tensor.is_meta:
                    places.setdefault(tensor.data_ptr(), {})[id(tensor)] = name
        ties = tuple(tuple(sorted({*same})) for same in names.values())
        return cls(
            entries=entries,
            ties=tuple(tie for tie in ties if len(tie) > 1),
            overlaps=tuple(tuple(own.values()) for own in places.values() if len(own) > 1),
            fingerprints=fingerprints,
        )


def check_unchanged(given: Inventory, made: Inventory, *, how: str, whole: bool) -> None:
    """Make sure that a strategy has kept all names, ties, shapes, types and frozen parameters.

    `whole`: this rank holds every name, rather than some stages. The message says how, by which
    strategy and flags, a model was made of the given one.

    Raises:
        UsageError: names what differs.
    """
    problems = []
    for name in sorted({*given.entries, *made.entries}):
        before, after = (" ".join(one.entries.get(name, ())) for one in (given, made))
        if before != after and (whole or after):
            problems.append(f"{name}: {before or 'nothing'} was given, {after or 'nothing'} made")
    ties = {tuple(name for name in tie if name in made.entries) for tie in given.ties}
    for tie in sorted(ties - {*made.ties}):
        if len(tie) > 1:
            problems.append(f"{' and '.join(tie)}: one {given.entries[tie[0]][0]}, no longer")
    for tie in sorted({*made.ties} - ties):
        problems.append(f"{' and '.join(tie)}: are one {made.entries[tie[0]][0]} now")
    if problems:
        raise UsageError(
            f"{how} would train another model than the one that it was given; use another "
            "--strategy, and report this with the model:\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name parameters and buffers, under all their names, also those that no checkpoint holds."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def ties_of(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """List the parameters that several modules share: owners, each with its name for it."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    return [places for places in owners.values() if len(places) > 1]


def tie(places: Sequence[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    """Make several modules share a parameter."""
    for module, name in places:
        module._parameters[name] = parameter


def differing(mine: Mapping[str, str], group: RankGroup) -> list[str]:
    """Name what this rank and rank 0 do not have in common; all ranks call this."""
    joint = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    if len({*group.gather(joint)}) == 1:
        return []
    first = group.broadcast(dict(mine))
    names = [n for n in sorted({*mine, *first}) if mine.get(n) != first.get(n)]
    return sorted({name for rank in group.gather(names) for name in rank})


def check_alike(given: Inventory, group: RankGroup, *, task: str) -> None:
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


def check_data(train: Source, test: Source, group: RankGroup, *, task: str) -> None:
    """Make sure that all ranks have the same data: each rank takes slices of all of it.

    Of a Dataset some samples are read. One that draws them anew each time is not compared.

    Raises:
        UsageError: on all ranks; the data differ.
    """
    sources = {"training": train, "test": test}
    mine = {f"the number of {name} samples": str(len(data)) for name, data in sources.items()}
    names = differing(mine, group)
    for name, data in sources.items():
        if not names and len(data):
            fingerprints = _fingerprints(name, data)
            names = differing(fingerprints, group)
            if names and not all(group.gather(_fingerprints(name, data) == fingerprints)):
                names = []
    if names:
        raise UsageError(
            f"task {task!r}: the ranks were given different data: {names[0]}; every rank must be "
            "given all of it, and random data come from a generator with a fixed seed"
        )


def _fingerprints(name: str, data: Source) -> dict[str, str]:
    """Describe the tensors of samples in memory, or those of some of a Dataset's samples."""
    what = f"the {name} data"
    if not isinstance(data, Batch):
        what = f"samples of the {name} data"
        data = data.take(torch.linspace(0, len(data) - 1, min(SAMPLED, len(data))).long())
    tensors = tensors_of((data.inputs, data.targets))
    return {f"{what} (tensor {n})": fingerprint(tensor) for n, tensor in enumerate(tensors)}


class Untrained:
    """Agrees between the ranks on the parameters that a step leaves alone.

    A step trains the parameters to which some rank's data have given a gradient. A layer that only
    some batches use, or none, has no gradient, and an optimizer leaves it alone. Ranks that
    exchange gradients must send one for every parameter, so zeros stand in for those that a rank
    has none of. Where no rank has one, the zeros have to go again: momentum and weight decay would
    move the parameter, which one process does not.

    Each rank knows for which of its own it has no gradient. As long as that stays as it was when
    they last agreed, nothing is exchanged: that it does travels with the step's loss.
    """

    def __init__(self, strategy: "Strategy", group: RankGroup) -> None:
        self._strategy, self._group = strategy, group
        self._agreed_for = frozenset[str]()
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: Sequence[str] = ()
        self.names = frozenset[str]()
        """Parameters, on any rank, for which no rank has a gradient."""

    def changed(self) -> bool:
        """Whether this rank's data have left out other parameters than when last agreed."""
        return self._strategy.without_gradient() != self._agreed_for

    def agree(self) -> None:
        """Find out what no rank has a gradient for; all ranks call this."""
        if not self._names:
            self._parameters = dict(self._strategy.named_parameters())
            gathered = self._group.gather(list(self._parameters))
            self._names = sorted({name for rank in gathered for name in rank})
        lacking = self._agreed_for = self._strategy.without_gradient()
        trained = torch.tensor(
            [name in self._parameters and name not in lacking for name in self._names],
            dtype=torch.int32,
            device=self._group.device,
        )
        if self._group.connected:
            dist.all_reduce(trained)
        counts: list[int] = trained.tolist()
        ranks = self._group.rank_info.world_size
        self._strategy.unevenly_trained = any(0 < count < ranks for count in counts)
        self.names = frozenset(n for n, count in zip(self._names, counts, strict=True) if not count)

    def forget_zeros(self) -> None:
        """Take away the zeros that stand for gradients which no rank has."""
        for name in self.names:
            if (parameter := self._parameters.get(name)) is not None:
                parameter.grad = None


def some_of(names: Iterable[str], most: int = 4) -> str:
    """Write names, the first of many."""
    names = sorted(names)
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
