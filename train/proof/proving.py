"""The proof that a strategy trains the same model as one process: three small steps of both.

All ranks call `prove()` together. After each step, every rank compares its tensors with those of
one process: the loss, each parameter, each saved buffer and the optimizer's state.
"""

import gc
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data.order import Batch
from ..errors import NonFiniteLoss
from ..model.trees import tensors_of
from ..parallel.base import Parts
from ..parallel.consistency import fingerprint
from . import trial
from .causes import UNKNOWN, likeliest, observe, otherwise, some
from .comparison import STEPS, Bounds, Difference, State, first_difference
from .draws import RandomState, double_precision
from .manner import ADVICE, Manner, held, manner_of
from .mixing import LAYER, SAMPLES, mixtures

PATIENCE_S = 60.0
"""Longest expected time of a proof that was not requested."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a proof."""

    problem: str = ""
    """The difference, its most likely cause and the fix; empty without a difference."""
    missing: str = ""
    """The reason for a missing proof; empty after a proof."""
    difference: Difference | None = None
    """The difference between the two trainings, if they were compared."""
    accepted: tuple[str, ...] = ()
    """Accepted differences."""
    steps: int = 0
    samples: int = 0
    """Samples per compared step."""
    passes: int = 1
    """Passes of one process per compared step: as many as the micro-batches of a rank."""
    seconds: float = 0.0
    """Duration of the proof."""

    @property
    def holds(self) -> bool:
        """Whether both sides were compared and train the same model."""
        return not self.problem and not self.missing


def prove(parts: Parts, *, patience_s: float = PATIENCE_S) -> Verdict:
    """Compare three small steps of the configured strategy with those of one process.

    All ranks call this. The state of the process stays unchanged: random generators, the default
    type, the task and files.

    Args:
        parts: task, configuration, layout and ranks of the run. `parts.task` is copied.
        patience_s: skip the proof if its expected time is longer.

    Raises:
        UsageError: the strategy refuses the model.
    """
    started = time.monotonic()
    with _untouched(parts):
        verdict = _prove(parts, patience_s)
    return replace(verdict, seconds=time.monotonic() - started)


@contextmanager
def _untouched(parts: Parts) -> Iterator[None]:
    """Restore the state of this process afterwards, and free memory."""
    state = RandomState()
    # This logger warns of a slow way to gather a tensor, which only a proof uses.
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    level = log.level
    log.setLevel(logging.ERROR)
    # The collection below can skip existing objects: a program with torch has a million of them.
    frozen = not gc.get_freeze_count()
    if frozen:
        gc.freeze()
    try:
        yield
    finally:
        state.put_back()
        log.setLevel(level)
        # A strategy and its parameters refer to each other.
        gc.collect()
        if frozen:
            gc.unfreeze()
        if parts.group.device.type == "cuda":
            torch.cuda.empty_cache()


def _prove(parts: Parts, patience_s: float) -> Verdict:
    config, group = parts.config, parts.group
    strategy = config.strategy_on(group.rank_info)
    cut = trial.Cut.of(config, parts.layout, strategy)
    count = max(STEPS * cut.batch, SAMPLES)
    samples, again = trial.few_samples(parts.task, config, count)
    if verdict := _of_data(samples, again, parts):
        return verdict
    first = group.rank_info.rank == 0
    manner = group.broadcast(manner_of(parts, cut, samples, patience_s) if first else Manner())
    if manner.problem or manner.missing:
        return Verdict(problem=manner.problem, missing=manner.missing, accepted=manner.accepted)
    with double_precision(manner.double), held(manner.draws):
        task = trial.with_samples(parts.task, samples)
        exact = manner.epsilon < 1e-9
        own = trial.config_of_trial(config, cut, strategy, exact_numbers=exact)
        sides = replace(parts, task=task, config=own)
        # A task may keep a reference to its last model, so each side gets a copy of the task.
        other = replace(sides, task=trial.with_samples(parts.task, samples))
        found = _Sides(sides, other, cut, manner).compare()
        problem = ""
        if found.difference is not None:
            text = _cause(other, cut, found, manner) if first else ""
            problem = f"{found.difference}; most likely cause: {group.broadcast(text)}"
    return Verdict(
        problem=problem,
        missing=found.missing,
        difference=found.difference,
        accepted=manner.accepted,
        steps=STEPS,
        samples=cut.batch,
        passes=cut.micro_batches,
    )


def _of_data(samples: Batch, again: Batch, parts: Parts) -> Verdict | None:
    """Compare two reads of the samples on each rank, and the samples between ranks."""
    mine, twice = (
        [fingerprint(tensor) for tensor in tensors_of((batch.inputs, batch.targets))]
        for batch in (samples, again)
    )
    if any(parts.group.gather(mine != twice)):
        return Verdict(
            missing="a sample of the training data is another one each time it is read; "
            "draw its random numbers from torch, random or numpy.random, which are seeded"
        )
    read = parts.group.gather(mine)
    if any(one != read[0] for one in read):
        rank = next(number for number, one in enumerate(read) if one != read[0])
        return Verdict(
            problem=f"ranks 0 and {rank} have read different training samples under the same "
            "numbers; most likely cause: the task's data are cut or shuffled by rank, and the "
            "strategy cuts them once more; give every rank all samples in the same order"
        )
    return None


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The result of a comparison."""

    difference: Difference | None = None
    missing: str = ""
    """The reason why one process cannot step."""
    state: State | None = None
    """The state of this rank at the difference."""


class _Sides:
    """Runs both sides step by step."""

    def __init__(self, parts: Parts, other: Parts, cut: trial.Cut, manner: Manner) -> None:
        """Set up the strategy's side from `parts`, and on rank 0 one process from `other`."""
        self._group = parts.group
        self._bounds = Bounds.of(manner.epsilon)
        self._mine = trial.by_strategy(parts)
        self._one: trial.Trial | None = None
        self._error = ""
        if self._group.rank_info.rank == 0:
            try:
                self._one = trial.by_one_process(other, cut, apart=manner.apart)
            except Exception as error:  # of the user's own model, whatever it may be
                self._error = _first_line(error)
        names = [n for n, _ in self._one.strategy.named_parameters()] if self._one else []
        self._parameters = self._group.broadcast(names)
        self._start = self._shared(self._one.model() if self._one else {})

    def compare(self) -> _Found:
        """Step both sides in turn, up to the first difference."""
        try:
            before = State(loss=0.0, model=self._mine.model(), optimizer={})
            if found := self._difference(before, replace(before, model=self._start), step=0):
                return _Found(difference=replace(found, kind="the initial value of"))
            for step in range(1, STEPS + 1):
                expected = self._step_of_one_process()
                if error := self._group.broadcast(self._error):
                    return _Found(missing=f"one process cannot step with this model ({error})")
                try:
                    here = self._mine.step()
                except NonFiniteLoss:
                    here = replace(before, loss=math.nan)
                if found := self._difference(here, self._shared_state(expected), step=step):
                    return _Found(difference=found, state=here)
            return _Found()
        finally:
            for side in filter(None, (self._mine, self._one)):
                side.close()

    def _step_of_one_process(self) -> State | None:
        """Make a step on rank 0; store an error as text for the waiting ranks."""
        if self._one is None:
            return None
        try:
            return self._one.step()
        except Exception as error:  # of the user's own model, whatever it may be
            self._error = _first_line(error)
            return None

    def _difference(self, mine: State, one: State, *, step: int) -> Difference | None:
        """Return the same difference on all ranks: in the loss, else from the lowest rank."""
        own = first_difference(
            mine,
            one,
            self._start,
            step=step,
            bounds=self._bounds,
            parameters=self._parameters,
            rank=self._group.rank_info.rank,
        )
        every = [one for one in self._group.gather(own) if one is not None]
        return min(every, key=lambda one: (one.kind != "loss", one.rank), default=None)

    def _shared(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Broadcast the tensors of rank 0."""
        return self._group.broadcast_tensors(dict(tensors), source=0)

    def _shared_state(self, state: State | None) -> State:
        loss = self._group.broadcast(state.loss if state else 0.0)
        model = self._shared(state.model if state else {})
        optimizer = self._shared(state.optimizer if state else {})
        return State(loss=loss, model=model, optimizer=optimizer)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _cause(other: Parts, cut: trial.Cut, found: _Found, manner: Manner) -> str:
    """Return the most likely cause of a difference, and the fix; only rank 0 calls this."""
    difference, data = found.difference, other.task.train()
    assert difference is not None
    assert isinstance(data, Batch)
    batch = data.part(0, max(cut.batch, SAMPLES)).to(other.group.device)
    one = trial.parts_of_one_process(other)
    try:
        seen = observe(one.model(), batch, copy(one.task))
        cause = likeliest(difference, seen)
        if cause != UNKNOWN:
            return cause
        cause = otherwise(seen)
        if not difference.step or manner.apart:
            return cause
        if cut.parts == 1:
            # No samples are split, but each part of a sequence may have a separate loss.
            model = one.model().train()
            few, tolerance = batch.part(0, SAMPLES), manner.tolerance
            mixed = mixtures(other.task, model, few, synchronised=True, tolerance=tolerance)
            return f"{mixed[0].text}; {ADVICE[mixed[0].kind]}" if mixed else cause
        shares = trial.by_one_process(other, cut, apart=True)
        start = shares.model()
        for _ in range(difference.step):
            state = shares.step()
        bounds = Bounds.of(manner.epsilon)
        assert found.state is not None
        if (
            first_difference(
                found.state, state, start, step=difference.step, bounds=bounds, parameters=()
            )
            is None
        ):
            if seen.moved and cut.micro_batches > 1:
                return (
                    f"forward() moves buffer {some(seen.moved)} in each pass and reads it in the "
                    "next, where each rank has moved it by its own samples; read it only after a "
                    "step, when ranks have taken the mean, or use one pass per step"
                )
            if seen.hooked_modules:
                return cause
            return (
                "a layer or the loss reads other samples of its pass, such as a branch on a sum "
                f"over the batch: one process that computes each share by itself gets the same; "
                f"{ADVICE[LAYER]}"
            )
    except Exception as error:  # of the user's own model
        return f"not known, as one process cannot run it ({_first_line(error)})"
    return cause
