"""What a model consists of, and whether a strategy has left it so.

Cutting a model replaces its parameters by other objects. A lost tie between two layers, a weight
that is no longer frozen or a lost buffer raises no error. Therefore each strategy compares the
model that it has made with the model that it was given, before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.errors import UsageError
from train.parallel.rank_consistency import differing, fingerprint
from train.parallel.trained_parameters import some_of

if TYPE_CHECKING:
    from train.runtime.process_group import RankGroup


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One parameter or buffer; of one that is sharded, the whole."""

    kind: str
    """`parameter`, `frozen parameter`, `buffer`, or `buffer that is not saved`."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """Its type."""

    def __str__(self) -> str:
        """Describe it for a message."""
        return f"{self.kind} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Everything that a model consists of."""

    entries: Mapping[str, Entry]
    """By name; a tied tensor has an entry for each of its names."""
    ties: tuple[tuple[str, ...], ...]
    """Names of one and the same tensor, two or more, sorted."""
    overlaps: tuple[tuple[str, ...], ...] = ()
    """Names of different parameters that lie in the same memory."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """What each tensor holds; of one that is sharded, nothing."""

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> Inventory:
        """List what a model, or the stages that a rank holds of it, consist of."""
        entries: dict[str, Entry] = {}
        names: dict[int, list[str]] = {}
        places: dict[int, dict[int, str]] = {}
        fingerprints: dict[str, str] = {}
        for module in modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                kind = "parameter" if parameter.requires_grad else "frozen parameter"
                entries[name] = _entry(kind, parameter)
                names.setdefault(id(parameter), []).append(name)
                if not isinstance(parameter, DTensor):
                    fingerprints[name] = fingerprint(parameter)
                    if parameter.numel() and not parameter.is_meta:
                        places.setdefault(parameter.data_ptr(), {})[id(parameter)] = name
            for prefix, owner in module.named_modules(remove_duplicate=False):
                for own, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
                    name = f"{prefix}.{own}" if prefix else own
                    saved = own not in owner._non_persistent_buffers_set
                    entries[name] = _entry(
                        "buffer" if saved else "buffer that is not saved", buffer
                    )
                    names.setdefault(id(buffer), []).append(name)
                    if not isinstance(buffer, DTensor):
                        fingerprints[name] = fingerprint(buffer)
        ties = tuple(tuple(sorted({*same})) for same in names.values())
        return cls(
            entries=entries,
            ties=tuple(tie for tie in ties if len(tie) > 1),
            overlaps=tuple(tuple(own.values()) for own in places.values() if len(own) > 1),
            fingerprints=fingerprints,
        )

    def problems(self, made: Inventory, *, whole: bool) -> list[str]:
        """Say in what another inventory differs from this one, by name.

        Args:
            made: what a strategy has made of this model.
            whole: whether it is all of it, rather than a rank's stages.
        """
        problems = []
        for name in sorted({*self.entries, *made.entries}):
            given, got = self.entries.get(name), made.entries.get(name)
            if given != got and (whole or got is not None):
                problems.append(f"{name}: {given or 'nothing'} was given, {got or 'nothing'} made")
        held = [tuple(name for name in tie if name in made.entries) for tie in self.ties]
        for tie in sorted({*held} - {*made.ties}):
            if len(tie) > 1:
                problems.append(f"{' and '.join(tie)}: one {self.entries[tie[0]].kind}, no longer")
        for tie in sorted({*made.ties} - {*held}):
            problems.append(f"{' and '.join(tie)}: are one {made.entries[tie[0]].kind} now")
        return problems


def check_unchanged(given: Inventory, made: Inventory, *, how: str, whole: bool = True) -> None:
    """Make sure that a strategy has kept all names, ties, shapes, types and frozen parameters.

    Args:
        given: the model as the task has made it.
        made: what this rank holds after a strategy has cut it.
        how: the strategy and its flags, for the message.
        whole: whether this rank holds every name, rather than some stages.

    Raises:
        UsageError: names what differs.
    """
    if problems := given.problems(made, whole=whole):
        raise UsageError(
            f"{how} would train another model than the one that it was given; use another "
            "--strategy, and report this with the model:\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )


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


def _entry(kind: str, tensor: Tensor) -> Entry:
    return Entry(kind=kind, shape=tuple(tensor.shape), dtype=tensor.dtype)
