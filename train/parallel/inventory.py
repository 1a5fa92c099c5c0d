"""What a model consists of, and whether a strategy has left it so.

Cutting a model replaces its parameters by other objects. A lost tie between two layers, a weight
that is no longer frozen or a lost buffer raises no error. Therefore each strategy compares the
model that it has made with the model that it was given, before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.errors import UsageError
from train.parallel.rank_consistency import fingerprint


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
                entries[name] = Entry(kind=kind, shape=tuple(tensor.shape), dtype=tensor.dtype)
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

    def problems(self, made: Inventory, *, whole: bool) -> list[str]:
        """Say in what a strategy's model, or a rank's stages of it, differs from this one."""
        problems = []
        for name in sorted({*self.entries, *made.entries}):
            given, got = self.entries.get(name), made.entries.get(name)
            if given != got and (whole or got is not None):
                problems.append(f"{name}: {given or 'nothing'} was given, {got or 'nothing'} made")
        ties = {tuple(name for name in tie if name in made.entries) for tie in self.ties}
        for tie in sorted(ties - {*made.ties}):
            if len(tie) > 1:
                problems.append(f"{' and '.join(tie)}: one {self.entries[tie[0]].kind}, no longer")
        for tie in sorted({*made.ties} - ties):
            problems.append(f"{' and '.join(tie)}: are one {made.entries[tie[0]].kind} now")
        return problems


def check_unchanged(given: Inventory, made: Inventory, *, how: str, whole: bool) -> None:
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
