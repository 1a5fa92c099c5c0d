"""Check that ranks which must hold the same tensors still do.

A layer trained on one rank only, a counter of a rank's samples or a bit flip raises no error, and a
checkpoint takes each tensor from one of the ranks that hold it. So ranks compare checksums of all
replicated tensors before each checkpoint and every so many steps: parameters, saved buffers, the
position in the run and the loss scale. A checkpoint also compares the optimizer's state, unless it
was compared recently.

Each rank computes one checksum for all tensors that the same ranks hold (see `checksum`). The
comparison needs no extra exchange: the digits of the checksum and their squares travel with numbers
that ranks sum up before a checkpoint and in the next step. If n ranks have the same digit, n times
the sum of squares equals the square of the sum; otherwise it is larger. Only then do ranks exchange
the checksums of single tensors, to name those that differ.

Two comparisons are left out, as values may differ. Ranks of one tensor-parallel group do not
compare floating-point tensors with each other: each rank computes them separately, and a GPU need
not add in the same order twice. If ranks have different processors, no rank compares floating-point
tensors.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import ReplicaError, UsageError
from .checksum import WORD, Summands

if TYPE_CHECKING:
    from ..model.gradients import LossScaler
    from ..model.optimizer import NamedOptimizer
    from ..rundir.files import TrainingProgress
    from .base import Strategy

SHARE = 0.0003
"""Share of the step time that checksums between checkpoints may take. The shortest step counts,
which leaves time for the all-reduce and for the effect of checksums on caches."""
UNKNOWN = 32
"""Steps between two comparisons while their cost is unknown; the first includes one-time work."""
SELDOM = 4
"""The optimizer's state, which is larger, is compared after this many times as many steps."""
DIGIT_BITS = 16
"""Bits per digit of a checksum: sums of squared digits are exact up to 2**21 ranks."""
SHIFTS = range(0, 8 * WORD, DIGIT_BITS)

Key = tuple[str, str]
"""A tensor's name and its part; equal on ranks that must hold the same values."""


class Watch:
    """Compares replicas; all ranks make the same calls."""

    def __init__(
        self, strategy: "Strategy", optimizer: "NamedOptimizer", scaler: "LossScaler"
    ) -> None:
        self._strategy, self._optimizer, self._scaler = strategy, optimizer, scaler
        self._group = strategy.parts.group
        # With a parameter server, only the server knows the scale of the next step's loss.
        served = strategy.parts.config.strategy_on(self._group.rank_info) == "ps"
        self._compares_scale = scaler.enabled and not served
        # Tensors that model() has made.
        self._names = frozenset(strategy.model_state())
        self._plans: dict[bool, _Plan | None] = {}
        # The shortest step so far: longer ones contain other waits.
        self._step_s = math.inf
        # Average of recent comparisons: their cost varies with the state of the caches. And the
        # part of the last one that came after the exchange.
        self._cost_s = self._checking_s = 0.0
        # Steps between two comparisons that this rank would choose, given their cost.
        self._interval = 0
        self._started, self._last = 0.0, 0
        self._next: float = 1 if self._group.rank_info.world_size > 1 else math.inf
        # The first step at which a checkpoint compares the optimizer's state.
        self._next_moments = 0.0

    def due(self, step: int) -> bool:
        """Whether the step after this one compares what ranks hold now."""
        return step >= self._next

    def numbers(
        self,
        progress: "TrainingProgress",
        model: Mapping[str, Tensor] | None = None,
        moments: Mapping[str, Tensor] | None = None,
    ) -> list[float]:
        """Return numbers that ranks must add up and then `check()`.

        Args:
            progress: where the run is.
            model: the strategy's `model_state()`, if it is at hand.
            moments: the optimizer's state, compared only if it is due.
        """
        if self._group.rank_info.world_size == 1 or not self._group.connected:
            return []
        started = time.perf_counter()
        model = self._strategy.model_state() if model is None else model
        everything = moments is not None and progress.step >= self._next_moments
        moments = moments or {} if everything else {}
        tensors, names = [*model.values(), *moments.values()], [*model, *moments]
        position: list[float] = [progress.step, progress.samples_seen]
        if self._compares_scale:
            position += self._scaler.state().values()
        plan = self._plans.get(everything)
        if made := plan is None:
            plan = self._plans[everything] = _Plan(self._strategy, model, moments)
        # A later step may train parameters without optimizer state so far, even on one rank only.
        known = plan.names == names
        numbers = plan.numbers(tensors if known else None, position)
        if not (everything or made) and progress.step > self._last:
            step_s = (started - self._started) / (progress.step - self._last)
            self._step_s = min(self._step_s, step_s)
            cost_s = time.perf_counter() - started + self._checking_s
            self._cost_s = (self._cost_s + cost_s) / 2 if self._cost_s else cost_s
            self._interval = max(math.ceil(self._cost_s / (SHARE * self._step_s)), 1)
        self._started, self._last = started, progress.step
        self._held = progress, everything, position
        return [*numbers, self._interval, not known]

    def check(self, totals: Sequence[float]) -> None:
        """Make sure that replicas are equal, given the sums of `numbers()` over all ranks.

        Raises:
            UsageError: on all ranks; a buffer's whole numbers differ from rank to rank.
            ReplicaError: on all ranks; another tensor differs.
        """
        if not totals:
            return
        started = time.perf_counter()
        progress, everything, position = self._held
        plan = self._plans[everything]
        assert plan is not None, "numbers() has made it"
        *totals, interval, unknown = totals
        if unknown:
            # The tensors have changed since their checksum: the next step compares.
            self.check_names(self._last)
            self._plans[everything], self._next = None, self._last
            if everything:
                self.compare(progress)
            return
        if plan.unlike(totals):
            self._refuse(plan, position)
        # The mean of the ranks' choices is the same on all ranks.
        mean = interval / self._group.rank_info.world_size
        self._next = self._last + (math.ceil(mean) or UNKNOWN)
        if everything:
            self._next_moments = self._last + SELDOM * (self._next - self._last)
        self._checking_s = time.perf_counter() - started

    def other_names(self, model: Mapping[str, Tensor]) -> list[str]:
        """Name the tensors that this rank's model has gained or lost since `model()` made it."""
        return sorted(self._names ^ model.keys())

    def check_names(self, step: int) -> None:
        """Make sure that the model still has exactly the tensors that `model()` made.

        Raises:
            UsageError: on all ranks; a tensor is new or missing.
        """
        mine = self.other_names(self._strategy.model_state())
        if names := sorted({name for rank in self._group.gather(mine) for name in rank}):
            raise UsageError(
                f"task {self._strategy.task.name!r}: after step {step} its model has other tensors "
                f"than model() has made, such as {names[0]!r}: no optimizer trains a parameter "
                "that comes later, and no start finds it in a checkpoint; make all parameters and "
                "buffers in model(), or register a buffer with persistent=False"
            )

    def compare(self, progress: "TrainingProgress") -> None:
        """Compare replicas, including the optimizer's state, in a separate exchange."""
        self._next_moments = 0.0
        self.check(self._group.sum(self.numbers(progress, moments=self._optimizer.tensors())))

    def _refuse(self, plan: "_Plan", position: Sequence[float]) -> None:
        step = self._last
        mine: dict[Key, int | Sequence[float]] = {**plan.each()}
        mine["the position in the run, or the scale of losses", ""] = position
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
                f"to rank after step {step}, and how to combine them is undefined: make it a "
                "buffer of floats (ranks average those after each step), or one that is not saved "
                "(persistent=False), or count in one process"
            )
        names = sorted(unlike)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        ranks = sorted({rank for name in names for rank in unlike[name]})
        raise ReplicaError(
            f"after step {step} ranks that must hold the same no longer do: "
            f"{', '.join(names[:3])}{more} on rank {', '.join(map(str, ranks))}; nothing of it is "
            "saved; start again to continue from the newest checkpoint. If this does not recur at "
            "this step, a device or its memory has failed; if it recurs, the model changes on each "
            "rank separately"
        )


def _minority(values: Mapping[int, object]) -> list[int]:
    """Name the ranks without the most frequent value; on a tie, all ranks."""
    texts = [repr(value) for value in values.values()]
    counts = {text: texts.count(text) for text in texts}
    most = [text for text, count in counts.items() if count == max(counts.values())]
    return [rank for rank, value in values.items() if len(most) > 1 or repr(value) != most[0]]


class _Plan:
    """Which ranks hold which tensors; valid as long as the tensors' names do not change."""

    def __init__(
        self, strategy: "Strategy", model: Mapping[str, Tensor], moments: Mapping[str, Tensor]
    ) -> None:
        group = strategy.parts.group
        self.names = [*model, *moments]
        layout, rank = strategy.parts.layout, group.rank_info.rank
        at_tp = layout.coordinates(rank)["tp"] if layout.world_size > 1 else 0
        rounds = len({*group.gather(_processor(strategy.norm_device))}) > 1
        parameters = {name for name, _ in strategy.named_parameters()}
        self.whole_numbers: set[str] = set()
        """Buffers that hold whole numbers."""
        keys: dict[Key, int] = {}
        states = {f"optimizer state {name}": tensor for name, tensor in moments.items()}
        for number, (name, tensor) in enumerate({**model, **states}.items()):
            inexact = tensor.is_floating_point() or tensor.is_complex()
            if inexact and rounds:
                continue
            part = _part(tensor)
            keys[name, f"{part} tp {at_tp}" if inexact else part] = number
            if not inexact and name not in parameters:
                self.whole_numbers.add(name)
        holders: dict[Key, list[int]] = {}
        for other, its_keys in enumerate(group.gather([*keys])):
            for key in its_keys:
                holders.setdefault(key, []).append(other)
        # Tensors on a single rank need no comparison.
        sets = sorted({tuple(ranks) for ranks in holders.values() if len(ranks) > 1})
        self._keys = [sorted(key for key in keys if tuple(holders[key]) == ranks) for ranks in sets]
        self._numbers = [[keys[key] for key in same] for same in self._keys]
        self._summands = [Summands() for _ in sets]
        # The last number covers the position, which all ranks share.
        self._holders = [*map(len, sets), group.rank_info.world_size]

    def numbers(self, tensors: Sequence[Tensor] | None, position: Sequence[float]) -> list[float]:
        """Return the digits of each set's checksum, and their squares; without tensors, of 0."""
        sums = [
            summands.sum([tensors[number] for number in numbers]) if tensors and numbers else 0
            for summands, numbers in zip(self._summands, self._numbers, strict=True)
        ]
        sums.append(hash(tuple(position)) % 2 ** (8 * WORD))  # hashes of numbers match across ranks
        digits = [one >> shift & (1 << DIGIT_BITS) - 1 for one in sums for shift in SHIFTS]
        return [*digits, *(digit * digit for digit in digits)]

    def each(self) -> dict[Key, int]:
        """Return the last checksum of each tensor."""
        return {
            key: sum_
            for summands, keys in zip(self._summands, self._keys, strict=True)
            if keys
            for key, sum_ in zip(keys, summands.each(), strict=True)
        }

    def unlike(self, totals: Sequence[float]) -> bool:
        """Whether the ranks' digits differ."""
        half = len(totals) // 2
        holders = (count for count in self._holders for _ in SHIFTS)
        return any(
            count * int(squares) != int(total) ** 2
            for count, total, squares in zip(holders, totals[:half], totals[half:], strict=True)
        )


def _part(tensor: Tensor) -> str:
    """Describe which part of a tensor this rank holds; '' for all of it."""
    if not isinstance(tensor, DTensor):
        return ""
    boxes = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return "; ".join(f"{[*box.offsets]} {[*box.sizes]}" for box in boxes)


def _processor(device: torch.device) -> str:
    """Name the processor model: models may round differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()
