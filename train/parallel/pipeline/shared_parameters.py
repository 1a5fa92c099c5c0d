"""Parameters that stages of a pipeline share, such as an embedding that is the head's matrix, too.

Each rank that holds one of the stages has a copy. Copies begin alike, and stay alike, as each takes
the same step: the sum of what all stages have given it for a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from train.errors import UsageError
from train.parallel.base import Parts, local
from train.parallel.pipeline.stages import within


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A parameter that several stages use: each rank that holds one of them has a copy."""

    names: tuple[str, ...]
    """All names of the parameter; the first is used for it everywhere."""
    ranks: tuple[int, ...]
    """Ranks of the pipeline that have it."""


def shared_parameters(
    model: nn.Module, plan: Sequence[Sequence[str]], owners: Mapping[int, int], parts: Parts
) -> list[Shared]:
    """List what stages share, such as an embedding that is the head's matrix, too.

    Args:
        model: the whole model.
        plan: the pieces of each stage.
        owners: which rank of the pipeline holds which stage.
        parts: what the strategy is made of.

    Raises:
        UsageError: one rank would have to shard a parameter in two stages at once.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = []
    for same in names.values():
        stages_of = {n for n, own in enumerate(plan) for name in same if within(name, own)}
        ranks = sorted({owners[number] for number in stages_of})
        if len(stages_of) > len(ranks) and parts.layout.world_size > parts.layout.pp:
            numbers = " and ".join(map(str, sorted(stages_of)))
            raise UsageError(
                f"--pp {parts.layout.pp} with --pp-schedule {parts.config.pp_schedule}: parameter "
                f"{same[0]!r} (also {', '.join(map(repr, same[1:]))}) is shared by stages {numbers}"
                ", which one rank holds and cannot shard apart; use --pp-schedule 1F1B, whose "
                "ranks hold one stage each, or leave out the other axes"
            )
        if len(stages_of) > 1:
            shared.append(Shared(names=tuple(same), ranks=tuple(ranks)))
    return shared


class SharedParameters:
    """This rank's copies of what stages share, and the ranks that have the others."""

    def __init__(
        self, shared: Sequence[Shared], stages: Mapping[int, nn.Module], parts: Parts
    ) -> None:
        """Connect the ranks that have copies; all ranks call this.

        Args:
            shared: what stages share, over the whole pipeline.
            stages: this rank's stages.
            parts: what the strategy is made of.
        """
        self._stages = stages
        here = parts.layout.coordinates(parts.group.rank_info.rank)["pp"]
        self._canonical = {name: one.names[0] for one in shared for name in one.names}
        # Another rank speaks for these where each parameter counts once.
        self._counted_elsewhere = {one.names[0] for one in shared if here > min(one.ranks)}
        several = dict.fromkeys(one.ranks for one in shared if len(one.ranks) > 1)
        groups = {ranks: _group(ranks, parts) for ranks in several}
        self._summed = [
            (one.names[0], groups[one.ranks])
            for one in shared
            if here in one.ranks and one.ranks in groups
        ]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Give the stages' parameters, each once, under one name on all ranks that have it."""
        given: set[int] = set()
        for stage in self._stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in given:
                    given.add(id(parameter))
                    yield self._canonical.get(name, name), parameter

    def counted_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Give each of the pipeline's parameters on one of its ranks."""
        for name, parameter in self.named_parameters():
            if name not in self._counted_elsewhere:
                yield name, parameter

    def canonical(self, names: frozenset[str]) -> frozenset[str]:
        """Call parameters by the names that stand for them."""
        return frozenset(self._canonical.get(name, name) for name in names)

    def sum_gradients(self) -> frozenset[str]:
        """Add up the copies' gradients; give the names of those for which zeros stand in here."""
        if not self._summed:
            return frozenset()
        parameters = dict(self.named_parameters())
        filled = set()
        for name, group in self._summed:
            parameter = parameters[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                filled.add(name)
            dist.all_reduce(local(parameter.grad), group=group)
        return frozenset(filled)


def _group(ranks: Sequence[int], parts: Parts) -> dist.ProcessGroup | None:
    """Connect some ranks of each pipeline: every rank has to name the groups of all others."""
    layout, mine = parts.layout, None
    pipelines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        place = at.pop("pp")
        if place in ranks:
            pipelines.setdefault(tuple(at.values()), []).append(rank)
    timeout = timedelta(seconds=parts.config.timeout_s)
    for members in pipelines.values():
        group = dist.new_group(members, timeout=timeout)
        if parts.group.rank_info.rank in members:
            mine = group
    return mine
