"""Pipeline stages: their pieces, their shared parameters, and a relay for batches.

Stages may share a parameter, such as an embedding that is also the head's matrix. Then each rank
with one of these stages has a copy.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...errors import UsageError
from ...model.trees import Tree, mapped
from ..base import Parts, local
from ..consistency import named_tensors
from . import split


class Stage(nn.Module):
    """Some successive pieces of a model, under their names in the model."""

    def __init__(self, model: nn.Module, names: Sequence[str], parts: Parts) -> None:
        super().__init__()
        # The underscore avoids name clashes with pieces.
        self._names, self._autocast = tuple(names), parts.autocast
        self._owns = parts.config.pp_schedule in split.TWO_PASSES
        for name in names:
            *path, last = name.split(".")
            home: nn.Module = self
            for step in path:
                if step not in home._modules:
                    home.add_module(step, nn.Module())
                home = home.get_submodule(step)
            home.add_module(last, model.get_submodule(name))

    def forward(self, hidden: Tree) -> Tree:
        """Run the pieces one after another."""
        # Not around the schedule, which would also run backward passes under autocast.
        with self._autocast():
            for name in self._names:
                hidden = self.get_submodule(name)(hidden)
        return mapped(self._sendable, hidden)

    def _sendable(self, output: object) -> object:
        """Return a tensor, not a view, that torch's schedules can send and detach in place.

        A linear layer returns a view for inputs of three dimensions. Other outputs than tensors are
        refused elsewhere.
        """
        if not isinstance(output, Tensor):
            return output
        whole = output.contiguous()
        return whole.clone() if self._owns and whole._is_view() else whole


def plan(model: nn.Module, parts: Parts) -> list[list[str]]:
    """Name the pieces of each stage.

    Raises:
        UsageError: there are too few pieces, or a parameter or buffer is in none of them.
    """
    schedule, pp, task = parts.config.pp_schedule, parts.layout.pp, parts.task
    sizes = split.piece_sizes(model, task)
    flags = f"--pp {pp} with --pp-schedule {schedule}"
    groups = split.cut(sizes, split.stage_count(schedule, pp), flags=flags)
    for name, tensor in named_tensors(model).items():
        if not any(_within(name, own) for own in groups):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise UsageError(
                f"{flags}: no stage would hold {kind} {name!r}, as no piece of task {task.name!r} "
                f"contains it ({', '.join(sizes)}); have pieces() name its module"
            )
    return groups


def _within(name: str, pieces: Sequence[str]) -> bool:
    return any(name.startswith(f"{piece}.") for piece in pieces)


class SharedParameters:
    """This rank's copies of parameters that stages share, and the ranks with other copies.

    Copies start equal and stay equal, as each takes the same step: its gradient is the sum over all
    stages.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Sequence[Sequence[str]],
        owners: Mapping[int, int],
        stages: Mapping[int, nn.Module],
        parts: Parts,
    ) -> None:
        """Connect the ranks that have copies; all ranks call this before they cut their stages.

        `owners` maps each stage of the plan to its pipeline rank; `stages` are this rank's stages.

        Raises:
            UsageError: one rank would have to shard a parameter in two stages at once.
        """
        self._stages = stages
        # Maps each name of a shared parameter to its first name, which is used everywhere.
        self._canonical: dict[str, str] = {}
        # In sums that count each parameter once, another rank counts these.
        self._counted_elsewhere: set[str] = set()
        self._summed: list[tuple[str, dist.ProcessGroup | None]] = []
        here = parts.layout.coordinates(parts.group.rank_info.rank)["pp"]
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for same in names.values():
            first, *others = same
            numbers = {n for n, own in enumerate(plan) for name in same if _within(name, own)}
            ranks = tuple(sorted({owners[number] for number in numbers}))
            if len(numbers) > len(ranks) and parts.layout.world_size > parts.layout.pp:
                raise UsageError(
                    f"--pp {parts.layout.pp} with --pp-schedule {parts.config.pp_schedule}: "
                    f"parameter {first!r} (also {', '.join(map(repr, others))}) is shared by "
                    f"stages {' and '.join(map(str, sorted(numbers)))}, which one rank holds and "
                    "cannot shard apart; use --pp-schedule 1F1B (one stage per rank), "
                    "or leave out the other axes"
                )
            if len(numbers) == 1:
                continue
            self._canonical |= dict.fromkeys(same, first)
            if here > ranks[0]:
                self._counted_elsewhere.add(first)
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = _group(ranks, parts)
            if len(ranks) > 1 and here in ranks:
                self._summed.append((first, groups[ranks]))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stages' parameters, each once, and under the same name on all ranks."""
        given: set[int] = set()
        for stage in self._stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in given:
                    given.add(id(parameter))
                    yield self._canonical.get(name, name), parameter

    def counted_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each of the pipeline's parameters on exactly one of its ranks."""
        return (
            (name, parameter)
            for name, parameter in self.named_parameters()
            if name not in self._counted_elsewhere
        )

    def canonical(self, names: frozenset[str]) -> frozenset[str]:
        """Replace each name of a shared parameter by its first name."""
        return frozenset(self._canonical.get(name, name) for name in names)

    def sum_gradients(self) -> frozenset[str]:
        """Sum the gradients of copies; return the names of parameters that had none here."""
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
    """Connect some ranks of each pipeline; every rank must create the groups of all pipelines."""
    layout, mine = parts.layout, None
    pipelines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        if at.pop("pp") in ranks:
            pipelines.setdefault(tuple(at.values()), []).append(rank)
    timeout = timedelta(seconds=parts.config.timeout_s)
    for members in pipelines.values():
        group = dist.new_group(members, timeout=timeout)
        if parts.group.rank_info.rank in members:
            mine = group
    return mine


class Untransferable(Exception):
    """A stage's output is not one tensor; arguments: the stage's number, the output's type."""


class Relay:
    """Runs this rank's stages in turn, and sends their output to the rank of the next stage.

    Computes no gradients and uses no schedule. Each tensor's shape is sent first, so batches need
    no padding, and their number does not matter.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        owners: Mapping[int, int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Take this rank's stages, on `device`, and the rank in `group` that holds each stage."""
        self._stages, self._owners = stages, owners
        self._group, self._device = group, device

    def run(self, inputs: Tree) -> dict[int, tuple[Tree, Tree]]:
        """Send a batch through all stages; return the inputs and outputs of this rank's stages.

        Raises:
            Untransferable: on this rank or an earlier one, a stage's output is not one tensor.
        """
        passed: dict[int, tuple[Tree, Tree]] = {}
        hidden = inputs
        for number, stage in self._stages.items():
            if number > 0 and number - 1 not in self._stages:
                hidden = self._receive(self._owners[number - 1])
            with torch.no_grad():
                given = hidden if isinstance(hidden, Untransferable) else stage(hidden)
            if number + 1 in self._owners and not isinstance(given, Tensor | Untransferable):
                # Later ranks wait for this output: send them the error.
                given = Untransferable(number, type(given).__name__)
            passed[number] = (hidden, given)
            hidden = given
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    # Without a backward pass, gathered parameters must be freed here.
                    module.reshard()
            if number + 1 in self._owners and number + 1 not in self._stages:
                self._send(hidden, self._owners[number + 1])
        if isinstance(hidden, Untransferable):
            raise hidden
        return passed

    def _send(self, hidden: Any, rank: int) -> None:
        peer = dist.get_global_rank(self._group, rank)
        tensor = isinstance(hidden, Tensor)
        announced = [(hidden.shape, hidden.dtype) if tensor else hidden.args]
        dist.send_object_list(announced, dst=peer, group=self._group, device=self._device)
        if tensor:
            dist.send(hidden.contiguous(), dst=peer, group=self._group)

    def _receive(self, rank: int) -> Tensor | Untransferable:
        peer = dist.get_global_rank(self._group, rank)
        announced: list[Any] = [None]
        dist.recv_object_list(announced, src=peer, group=self._group, device=self._device)
        shape, dtype = announced[0]
        if not isinstance(dtype, torch.dtype):
            return Untransferable(*announced[0])
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(tensor, src=peer, group=self._group)
        return tensor
