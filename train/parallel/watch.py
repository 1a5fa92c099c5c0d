"""Do ranks that must hold the same still hold the same?

A layer that is trained on one rank only, a counter of a rank's own samples, a bit that a device has
flipped: none of it raises an error, and a checkpoint takes each tensor from some rank. So ranks
compare checksums of all that several of them hold, before each checkpoint and every so many steps:
parameters, saved buffers, and what the step depends on; at a checkpoint, the optimizer's state too,
unless it was compared a moment ago.

Each rank sums up all tensors that the same ranks hold, where they lie (see `checksum`). Nothing is
exchanged for it: the digits of the sum and their squares travel with what ranks add up anyway,
before a checkpoint and in the next step. Of n ranks that hold the same, n times the sum of squares
is the square of the sum; of others it is more. Only then do ranks exchange the sums of tensors, to
name these.

Left out, as it may differ: tensors along the ranks of a tensor-parallel group that are no whole
numbers, since each rank computes them anew and a GPU need not add in the same order twice; and the
same along all ranks, where these have different processors.
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
"""Of the time of steps, what summing up between checkpoints may take: the least of them, so that
adding up, and what summing up does to the caches, have room."""
UNKNOWN = 32
"""Steps between two comparisons before their cost is known; the first does what is done once."""
SELDOM = 4
"""So many times as many steps pass before the optimizer's state, which is larger, is compared."""
DIGIT_BITS = 16
"""Of a number that is compared: sums of its digits' squares are exact up to 2**21 ranks."""
SHIFTS = range(0, 8 * WORD, DIGIT_BITS)

Key = tuple[str, str]
"""A tensor's name, and which part of it; equal for ranks that must hold the same."""


class Watch:
    """Compares replicas; all ranks make the same calls."""

    def __init__(
        self, strategy: "Strategy", optimizer: "NamedOptimizer", scaler: "LossScaler"
    ) -> None:
        self._strategy, self._optimizer, self._scaler = strategy, optimizer, scaler
        self._group = strategy.parts.group
        # Of a parameter server, only it knows what the next step's loss is scaled by.
        served = strategy.parts.config.strategy_on(self._group.rank_info) == "ps"
        self._compares_scale = scaler.enabled and not served
        # Of what model() has made.
        self._names = frozenset(strategy.model_state())
        self._plans: dict[bool, _Plan | None] = {}
        # What a step has taken at the least: others hold waits for something else.
        self._step_s = math.inf
        # What comparing has taken of late, on average: caches are cold more or less.
        self._cost_s = 0.0
        # How many steps this rank would have between two comparisons, by what they have cost.
        self._interval = 0
        self._started, self._last = 0.0, 0
        self._next: float = 1 if self._group.rank_info.world_size > 1 else math.inf
        # From which step on a checkpoint compares the optimizer's state.
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
            moments: the optimizer's state, if it is to be compared, too, where it is time.
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
        # A later step may train parameters that had no state so far, perhaps on this rank alone.
        known = plan.names == names
        numbers = plan.numbers(tensors if known else None, position)
        if not (everything or made) and progress.step > self._last:
            step_s = (started - self._started) / (progress.step - self._last)
            self._step_s = min(self._step_s, step_s)
            cost_s = time.perf_counter() - started
            self._cost_s = (self._cost_s + cost_s) / 2 if self._cost_s else cost_s
            self._interval = max(math.ceil(self._cost_s / (SHARE * self._step_s)), 1)
        self._started, self._last = started, progress.step
        self._held = progress, everything, position
        return [*numbers, self._interval, not known]

    def check(self, totals: Sequence[float]) -> None:
        """Make sure that replicas are equal, by the sums over all ranks of `numbers()`.

        Raises:
            UsageError: on all ranks; a buffer counts what differs from rank to rank.
            ReplicaError: on all ranks; another tensor differs.
        """
        if not totals:
            return
        progress, everything, position = self._held
        plan = self._plans[everything]
        assert plan is not None, "numbers() has made it"
        *totals, interval, unknown = totals
        if unknown:
            # What was summed up in a step has moved since: the next one compares.
            self.check_names(self._last)
            self._plans[everything], self._next = None, self._last
            if everything:
                self.compare(progress)
            return
        if plan.unlike(totals):
            self._refuse(plan, position)
        # The mean of what ranks would choose: the same on all of them.
        mean = interval / self._group.rank_info.world_size
        self._next = self._last + (math.ceil(mean) or UNKNOWN)
        if everything:
            self._next_moments = self._last + SELDOM * (self._next - self._last)

    def other_names(self, model: Mapping[str, Tensor]) -> list[str]:
        """Name what has come to this rank's model, or gone, since `model()` has made it."""
        return sorted(self._names ^ model.keys())

    def check_names(self, step: int) -> None:
        """Make sure that the model still has the tensors with which it was made.

        Raises:
            UsageError: on all ranks; it does not.
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
        """Make sure that replicas are equal in everything, by an exchange of its own."""
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
        # What only one rank holds, nobody compares.
        sets = sorted({tuple(ranks) for ranks in holders.values() if len(ranks) > 1})
        self._keys = [sorted(key for key in keys if tuple(holders[key]) == ranks) for ranks in sets]
        self._numbers = [[keys[key] for key in same] for same in self._keys]
        self._summands = [Summands() for _ in sets]
        # The last number is of what all ranks have in common.
        self._holders = [*map(len, sets), group.rank_info.world_size]

    def numbers(self, tensors: Sequence[Tensor] | None, position: Sequence[float]) -> list[float]:
        """Return the digits of each set's sum, and their squares; None: of nothing."""
        sums = [
            summands.sum([tensors[number] for number in numbers]) if tensors and numbers else 0
            for summands, numbers in zip(self._summands, self._numbers, strict=True)
        ]
        sums.append(hash(tuple(position)) % 2 ** (8 * WORD))  # of numbers, the same on all ranks
        digits = [one >> shift & (1 << DIGIT_BITS) - 1 for one in sums for shift in SHIFTS]
        return [*digits, *(digit * digit for digit in digits)]

    def each(self) -> dict[Key, int]:
        """Return the last sums of the single tensors."""
        return {
            key: sum_
            for summands, keys in zip(self._summands, self._keys, strict=True)
            if keys
            for key, sum_ in zip(keys, summands.each(), strict=True)
        }

    def unlike(self, totals: Sequence[float]) -> bool:
        """Whether ranks have added up different digits."""
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
    """Name the kind of processor that computes: others may round otherwise."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()
