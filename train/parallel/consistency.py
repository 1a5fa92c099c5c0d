"""Check that a strategy trains the given model, and that all ranks train the same one.

Cutting a model replaces its parameters with other objects. A lost tie between two layers, an
unfrozen weight or a lost buffer raises no error. Therefore each strategy compares its model with
the given model before the first step. Ranks also compare their initial weights, data, counters in
buffers, and the set of parameters that a step trains.
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
"""Elements per tensor that are compared: different random tensors differ in every element."""


def fingerprint(tensor: Tensor) -> str:
    """Return a hash of a tensor's shape, type and some of its elements.

    A tensor on the device `meta` has no elements to hash.
    """
    digest = hashlib.sha256(f"{list(tensor.shape)} {tensor.dtype}".encode())
    # The elements of quantised and sparse tensors cannot be read so, and are left out.
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
    """Kind of each tensor, such as `frozen parameter`, its unsharded shape, and its type.

    The key is the tensor's name; a tied tensor has an entry for each of its names.
    """
    ties: tuple[tuple[str, ...], ...]
    """Sorted names of each tensor that has several."""
    overlaps: tuple[tuple[str, ...], ...]
    """Names of different parameters that share memory."""
    fingerprints: Mapping[str, str]
    """Fingerprint of each tensor by name; sharded tensors have none."""

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> "Inventory":
        """List the tensors of a model, or of a rank's stages of it."""
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

    `whole`: this rank holds every name, rather than some stages. `how` gives the strategy and its
    flags for the message.

    Raises:
        UsageError: names the differences.
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
            f"{how} would train a model other than the given one; use another "
            "--strategy, and report this with the model:\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under all their names, saved in a checkpoint or not."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def ties_of(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """List the owners of each parameter that several modules share, with their names for it."""
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
    """Name the entries that differ between any rank and rank 0; all ranks call this."""
    joint = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    if len({*group.gather(joint)}) == 1:
        return []
    first = group.broadcast(dict(mine))
    names = [n for n in sorted({*mine, *first}) if mine.get(n) != first.get(n)]
    return sorted({name for rank in group.gather(names) for name in rank})


def check_alike(given: Inventory, group: RankGroup, *, task: str) -> None:
    """Make sure that all ranks start with the same model, and that no tie in it is hidden.

    Raises:
        UsageError: on all ranks; names the parameters.
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
    """Make sure that all ranks have the same data: each rank takes slices of the whole data set.

    Only some samples of a Dataset are read. A Dataset that draws new samples on each read is not
    compared.

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
    """Return fingerprints of the samples in memory, or of some of a Dataset's samples."""
    what = f"the {name} data"
    if not isinstance(data, Batch):
        what = f"samples of the {name} data"
        data = data.take(torch.linspace(0, len(data) - 1, min(SAMPLED, len(data))).long())
    tensors = tensors_of((data.inputs, data.targets))
    return {f"{what} (tensor {n})": fingerprint(tensor) for n, tensor in enumerate(tensors)}


class Untrained:
    """Lets ranks agree on the parameters that a step does not train.

    A step trains the parameters that have a gradient on some rank. An optimizer skips a layer
    without a gradient, which only some batches use, or none. Ranks that exchange gradients must
    send one for every parameter, so a rank sends zeros for a missing gradient. If no rank has a
    gradient, the zeros must be removed again: with them, momentum and weight decay would move the
    parameter, unlike in one process.

    Each rank knows its own parameters without gradients. As long as this set is unchanged since the
    last agreement, no extra exchange is needed: a flag for changes travels with the step's loss.
    """

    def __init__(self, strategy: "Strategy", group: RankGroup) -> None:
        self._strategy, self._group = strategy, group
        self._agreed_for = frozenset[str]()
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: Sequence[str] = ()
        self.names = frozenset[str]()
        """Parameters that have no gradient on any rank."""

    def changed(self) -> bool:
        """Whether this rank's parameters without gradients have changed since the agreement."""
        return self._strategy.without_gradient() != self._agreed_for

    def agree(self) -> None:
        """Find the parameters without a gradient on any rank; all ranks call this."""
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
        """Remove the zero gradients of parameters that have no gradient on any rank."""
        for name in self.names:
            if (parameter := self._parameters.get(name)) is not None:
                parameter.grad = None


def some_of(names: Iterable[str], most: int = 4) -> str:
    """Join names for a message; of many, the first `most` and a count of the rest."""
    names = sorted(names)
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
