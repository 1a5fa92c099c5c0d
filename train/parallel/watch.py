"""Do ranks that must hold the same still hold the same?

A layer that is trained on one rank only, a counter of a rank's own samples, a bit that a device has
flipped: none of it raises an error, and a checkpoint takes each tensor from some rank. So ranks
compare checksums of all that several of them hold, before each checkpoint and every so many steps:
parameters, saved buffers, and what the step depends on; at a checkpoint, the optimizer's state too.

Each rank sums up its tensors where they lie (see `checksum`). The sums of all tensors that the same
ranks hold become one number, and one all-reduce finds the least and the greatest of each. Only
where these differ do ranks exchange the sums themselves, to name the tensors.

Left out, as it may differ: tensors along the ranks of a tensor-parallel group that are no whole
numbers, since each rank computes them anew and a GPU need not add in the same order twice; and the
same along all ranks, where these have different processors.
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import ReplicaError, UsageError
from .checksum import checksums

if TYPE_CHECKING:
    from ..model.gradients import LossScaler
    from ..model.optimizer import NamedOptimizer
    from ..rundir.files import TrainingProgress
    from .base import Strategy

SHARE = 0.0005
"""Of the time of steps, what comparing may take: with both at their least, and 0.001 at most."""
UNKNOWN = 32
"""Steps between two comparisons before their cost is known; the first does what is done once."""
LEAST = -(2**63)

Key = tuple[str, str]
"""A tensor's name, and which part of it; equal for ranks that must hold the same."""


class Watch:
    """Compares replicas; all ranks make the same calls."""

    def __init__(
        self, strategy: "Strategy", optimizer: "NamedOptimizer", scaler: "LossScaler"
    ) -> None:
        self._strategy, self._optimizer, self._scaler = strategy, optimizer, scaler
        self._group = strategy.parts.group
        self._plans: dict[bool, _Plan] = {}
        # The least that was seen: others hold waits for something else.
        self._step_s = self._cost_s = math.inf
        self._next: float = 1 if self._group.rank_info.world_size > 1 else math.inf

    def due(self, step: int) -> bool:
        """Whether to compare after this step, if no checkpoint does."""
        return step >= self._next

    def compare(
        self, progress: "TrainingProgress", *, step_s: float = math.inf, everything: bool = False
    ) -> None:
        """Make sure that replicas are equal.

        Args:
            progress: where the run is.
            step_s: how long the last step has taken.
            everything: also the optimizer's state.

        Raises:
            UsageError: on all ranks; a buffer counts what differs from rank to rank.
            ReplicaError: on all ranks; another tensor differs.
        """
        if self._group.rank_info.world_size == 1 or not self._group.connected:
            return
        started, first = time.monotonic(), self._step_s == math.inf
        self._step_s = min(self._step_s, step_s)
        tensors = self._strategy.model_state()
        if everything:
            state = self._optimizer.tensors()
            tensors |= {f"optimizer state {name}": tensor for name, tensor in state.items()}
        plan = self._plans.get(everything)
        if plan is None or plan.names != [*tensors]:
            plan = self._plans[everything] = _Plan(self._strategy, tensors)
        moment = [progress.step, progress.samples_seen, *self._scale()]
        sums = checksums((tensors[name] for name in plan.watched), self._strategy.norm_device)
        unlike, interval = plan.exchange(sums, moment, self._interval)
        if unlike:
            self._refuse(plan, sums, moment, progress.step)
        if not everything:
            self._next = progress.step + (interval or UNKNOWN)
            if not first:
                self._cost_s = min(self._cost_s, time.monotonic() - started)
                self._interval = max(math.ceil(self._cost_s / (SHARE * self._step_s)), 1)

    _interval = 0
    """How many steps this rank would have between two comparisons, by what they have cost."""

    def _scale(self) -> Sequence[float]:
        """Return what the next step's loss is scaled by; of a parameter server, only it knows."""
        ranks = self._group.rank_info
        served = self._strategy.parts.config.strategy_on(ranks) == "ps"
        return [] if served else [*self._scaler.state().values()]

    def _refuse(self, plan: "_Plan", sums: Tensor, moment: Sequence[float], step: int) -> None:
        mine: dict[Key, int | Sequence[float]] = dict(zip(plan.keys, sums.tolist(), strict=True))
        mine["the position in the run, or the scale of losses", ""] = moment
        by_key: dict[Key, dict[int, object]] = {}
        for rank, held in enumerate(self._group.gather(mine)):
            for key, value in held.items():
                by_key.setdefault(key, {})[rank] = value
        unlike: dict[str, set[int]] = {}
        for (name, _), values in by_key.items():
            if len({*map(repr, values.values())}) > 1:
                unlike.setdefault(name, set()).update(_minority(values))
        whole = self._group.gather([name for name in unlike if name in plan.whole_numbers])
        task = self._strategy.task.name
        if counters := sorted({name for rank in whole for name in rank}):
            raise UsageError(
                f"task {task!r}: buffer {counters[0]!r} holds whole numbers that differ from rank "
                f"to rank after step {step}, each of its own samples; nothing says how they belong "
                "together: make it a buffer of floats, of which ranks take the mean after each "
                "step, or one that is not saved (persistent=False), or count in one process"
            )
        names = sorted(unlike)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        ranks = sorted({rank for name in names for rank in unlike[name]})
        raise ReplicaError(
            f"after step {step} ranks that must hold the same no longer do: "
            f"{', '.join(names[:3])}{more} on rank {', '.join(map(str, ranks))}; nothing of it is "
            "saved; start again to go on from the newest checkpoint: a device or its memory has "
            "failed, if it does not come again at this step; if it does, the model changes on each "
            "rank by itself"
        )


def _minority(values: Mapping[int, object]) -> list[int]:
    """Name the ranks that have another value than most; where two are as frequent, all."""
    texts = [repr(value) for value in values.values()]
    counts = {text: texts.count(text) for text in texts}
    most = [text for text, count in counts.items() if count == max(counts.values())]
    return [rank for rank, value in values.items() if len(most) > 1 or repr(value) != most[0]]


class _Plan:
    """Which ranks hold which tensors; worked out once, as long as the names stay."""

    def __init__(self, strategy: "Strategy", tensors: Mapping[str, Tensor]) -> None:
        group = strategy.parts.group
        self._group, self._device = group, strategy.norm_device
        self.names = [*tensors]
        layout, rank = strategy.parts.layout, group.rank_info.rank
        at_tp = layout.coordinates(rank)["tp"] if layout.world_size > 1 else 0
        rounds = len({*group.gather(_processor(self._device))}) > 1
        parameters = {name for name, _ in strategy.named_parameters()}
        self.watched: list[str] = []
        """Names of the tensors to sum up."""
        self.keys: list[Key] = []
        """Their keys, in the same order."""
        self.whole_numbers: set[str] = set()
        """Buffers that hold whole numbers."""
        for name, tensor in tensors.items():
            inexact = tensor.is_floating_point() or tensor.is_complex()
            if inexact and rounds:
                continue
            part = _part(tensor)
            self.watched.append(name)
            self.keys.append((name, f"{part} tp {at_tp}" if inexact else part))
            if not inexact and name not in parameters:
                self.whole_numbers.add(name)
        holders: dict[Key, list[int]] = {}
        for other, keys in enumerate(group.gather(self.keys)):
            for key in keys:
                holders.setdefault(key, []).append(other)
        sets = sorted({tuple(ranks) for ranks in holders.values() if len(ranks) > 1})
        numbers = {ranks: number for number, ranks in enumerate(sets)}
        # What only one rank holds goes to a place after the last one.
        places = [numbers.get(tuple(holders[key]), len(sets)) for key in self.keys]
        self._places = torch.tensor(places, dtype=torch.int64, device=self._device)
        weights = [_odd(key) for key in self.keys]
        self._weights = torch.tensor(weights, dtype=torch.int64, device=self._device)
        here = [rank in ranks for ranks in sets]
        self._mine = torch.tensor([*here, True], device=self._device)

    def exchange(self, sums: Tensor, moment: Sequence[float], interval: int) -> tuple[bool, int]:
        """Say whether any sums differ, and return the largest of the ranks' intervals."""
        count = len(self._mine)
        joint = torch.zeros(count, dtype=torch.int64, device=self._device)
        joint.index_add_(0, self._places, sums * self._weights)
        # The last place: what all ranks have in common.
        joint[-1] = _odd(("", repr(moment)))
        # The greatest of the complements is the complement of the least.
        both = torch.stack([joint, ~joint]).masked_fill(~self._mine, LEAST)
        sent = torch.cat([both.reshape(-1), both.new_tensor([interval])])
        dist.all_reduce(sent, op=dist.ReduceOp.MAX)
        *ends, longest = sent.tolist()
        pairs = zip(ends[:count], ends[count:], strict=True)
        return any(most != ~least for most, least in pairs), int(longest)


def _part(tensor: Tensor) -> str:
    """Describe which part of a tensor this rank holds; '' for all of it."""
    if not isinstance(tensor, DTensor):
        return ""
    boxes = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return "; ".join(f"{[*box.offsets]} {[*box.sizes]}" for box in boxes)


def _odd(key: Key) -> int:
    """Return a signed 64-bit number for a key, by which its sum is multiplied: an odd one."""
    digest = hashlib.sha256(repr(key).encode()).digest()[:8]
    return int.from_bytes(digest, "big", signed=True) | 1


def _processor(device: torch.device) -> str:
    """Name the kind of processor that computes: others may round otherwise."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()
