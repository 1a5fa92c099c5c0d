"""The proof that a strategy trains what one process trains: three small steps of both.

All ranks call `prove()` at once. Everything is compared after each step: the loss, each parameter,
each saved buffer and the optimizer's state, on each rank that holds it.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..data.order import Batch
from ..errors import NonFiniteLoss
from ..model.trees import tensors_of
from ..parallel.base import Parts, summed_loss
from ..parallel.consistency import fingerprint
from ..runtime.process_group import RankGroup
from . import trial
from .causes import likeliest, observe
from .comparison import STEPS, Bounds, Difference, State, first_difference
from .draws import ConstantDraws, LeastPrecision, RandomState, double_precision
from .mixing import BATCH_NORM, LAYER, LOSS, MEAN, SAMPLES, Snapshot, mixtures

Value = TypeVar("Value")

PATIENCE_S = 60.0
"""Time that a proof may be expected to take if nobody has asked for it."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a proof."""

    problem: str = ""
    """What differs, the likeliest cause and the fix; empty: nothing does."""
    missing: str = ""
    """Why there is no proof; empty: there is one."""
    difference: Difference | None = None
    """The difference, where two trainings were compared."""
    accepted: tuple[str, ...] = ()
    """Accepted differences that the model has."""
    steps: int = 0
    samples: int = 0
    """Of each step that was compared."""
    seconds: float = 0.0
    """What the proof has cost."""

    @property
    def holds(self) -> bool:
        """Whether both were compared and train the same."""
        return not self.problem and not self.missing


@dataclass(frozen=True, kw_only=True)
class _Manner:
    """How both sides compute; rank 0 finds it out."""

    double: bool = True
    epsilon: float = 0.0
    draws: bool = False
    apart: bool = False
    accepted: tuple[str, ...] = ()
    problem: str = ""
    missing: str = ""

    @property
    def tolerance(self) -> float:
        """What rounding explains in one pass, beside the largest value."""
        return 1e-9 if self.epsilon < 1e-9 else min(1e4 * self.epsilon, 0.1)


def prove(
    parts: Parts, *, accepted: frozenset[str] = frozenset(), patience_s: float = PATIENCE_S
) -> Verdict:
    """Compare three small steps of the configured strategy with those of one process.

    All ranks call this. Nothing of the process changes: generators, types, the task and files stay.

    Args:
        parts: task, configuration, layout and ranks of the run. `parts.task` is copied.
        accepted: values of `--accept`.
        patience_s: do without if it is expected to take longer.

    Raises:
        UsageError: the strategy refuses the model.
    """
    started = time.monotonic()
    with _untouched(parts):
        verdict = _prove(parts, accepted, patience_s)
    return replace(verdict, seconds=time.monotonic() - started)


@contextmanager
def _untouched(parts: Parts) -> Iterator[None]:
    """Leave no trace in this process."""
    state = RandomState()
    # What is there already need not be looked at below: a program with torch has a million objects.
    frozen = not gc.get_freeze_count()
    if frozen:
        gc.freeze()
    try:
        yield
    finally:
        state.put_back()
        # A strategy and its parameters refer to each other.
        gc.collect()
        if frozen:
            gc.unfreeze()
        if parts.group.device.type == "cuda":
            torch.cuda.empty_cache()


def _prove(parts: Parts, accepted: frozenset[str], patience_s: float) -> Verdict:
    config, group = parts.config, parts.group
    strategy = config.strategy_on(group.rank_info)
    cut = trial.Cut.of(config, parts.layout, strategy)
    count = max(STEPS * cut.batch, SAMPLES)
    samples, again = (trial.few_samples(parts.task, config, count) for _ in range(2))
    if verdict := _of_data(samples, again, parts):
        return verdict
    first = group.rank_info.rank == 0
    manner = group.broadcast(
        _manner(parts, cut, samples, accepted, patience_s) if first else _Manner()
    )
    if manner.problem or manner.missing:
        return Verdict(problem=manner.problem, missing=manner.missing, accepted=manner.accepted)
    with double_precision(manner.double), _held(manner.draws):
        task = trial.with_samples(parts.task, samples)
        exact = manner.epsilon < 1e-9
        own = trial.config_of_trial(config, cut, strategy, exact_numbers=exact)
        sides = replace(parts, task=task, config=own)
        # A task may hold on to the last model that it has made.
        other = replace(sides, task=trial.with_samples(parts.task, samples))
        difference, missing = _compare(sides, other, cut, manner)
        problem = ""
        if difference is not None:
            text = _cause(sides, cut, difference, manner) if first else ""
            problem = f"{difference}; likeliest cause: {group.broadcast(text)}"
    return Verdict(
        problem=problem,
        missing=missing,
        difference=difference,
        accepted=manner.accepted,
        steps=STEPS,
        samples=cut.batch,
    )


def _of_data(samples: Batch, again: Batch, parts: Parts) -> Verdict | None:
    """Compare what the ranks have read, twice."""
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
            "numbers; likeliest cause: the task's data are cut or shuffled by rank, and the "
            "strategy cuts them once more; give every rank all samples in the same order"
        )
    return None


def _manner(
    parts: Parts, cut: trial.Cut, samples: Batch, accepted: frozenset[str], patience_s: float
) -> _Manner:
    """Find out how one process computes with the model, and whether it mixes samples."""
    errors = []
    for double in (True, False):
        try:
            return _manner_in(parts, cut, samples, accepted, patience_s, double=double)
        except Exception as error:  # of the user's own model, whatever it may be
            errors.append(f"{type(error).__name__}: {error}".split("\n")[0])
    return _Manner(missing=f"one process cannot make a step with this model ({errors[-1]})")


def _manner_in(
    parts: Parts,
    cut: trial.Cut,
    samples: Batch,
    accepted: frozenset[str],
    patience_s: float,
    *,
    double: bool,
) -> _Manner:
    device, config = parts.group.device, parts.config
    with double_precision(double):
        task = trial.with_samples(parts.task, samples)
        one = trial.parts_of_one_process(replace(parts, task=task))
        batch = task.train().part(0, SAMPLES).to(device)  # type: ignore[union-attr]
        model = one.model()
        if not model.training:
            model.train()
        before, began = Snapshot(model), time.monotonic()
        constant, precision = ConstantDraws(), LeastPrecision()
        state = RandomState()
        with precision, constant:
            loss = summed_loss(task, model(batch.inputs), batch.targets)
        drawn = state.drawn_from()
        if not loss.requires_grad:
            return _Manner(missing="no parameter gets a gradient")
        loss.backward()  # type: ignore[no-untyped-call]
        per_sample = (time.monotonic() - began) / SAMPLES
        expected = per_sample * STEPS * (cut.batch + cut.batch // cut.shards)
        del loss
        if expected > patience_s:
            return _Manner(
                missing=f"it would take about {expected:.0f} s; --verify starts it anyway"
            )
        if generator := constant.left_random or drawn:
            return _Manner(
                missing=f"the model or the loss draws random numbers by {generator}, and one "
                "process cannot draw what the ranks draw"
            )
        before.put_back()
        drew = _draws(task, model, batch)
        before.put_back()
        manner = _Manner(double=double, epsilon=precision.epsilon, draws=drew)
        if cut.parts == 1:
            return manner
        with _held(drew):
            found = mixtures(
                task,
                model,
                batch,
                synchronised=config.sync_batch_norm and cut.real_micro_batches == 1,
                tolerance=manner.tolerance,
            )
    kinds = tuple(mixture.kind for mixture in found if mixture.kind in accepted)
    problems = [
        f"{mixture.text}; {_ADVICE[mixture.kind]}" for mixture in found if mixture.kind not in kinds
    ]
    how = f"the batch is cut in {cut.parts} passes ({_passes(cut)}), and "
    return replace(
        manner,
        apart=bool(kinds),
        accepted=kinds,
        problem=how + "; and ".join(problems) if problems else "",
    )


def _passes(cut: trial.Cut) -> str:
    shards = f"{cut.shards} shards" if cut.shards > 1 else "1 shard"
    micro = cut.real_micro_batches
    return f"{shards} x {micro} micro-batches" if micro > 1 else shards


_ADVICE = {
    BATCH_NORM: "use --sync-batch-norm without micro-batches, or a norm over each sample "
    "(GroupNorm, LayerNorm), or accept the difference with --accept batch-norm",
    LAYER: "one process trains what is written, with the whole batch in one pass; compute it for "
    "each sample alone, or accept the difference with --accept layer-mixes-samples",
    LOSS: "one process trains what is written, with the whole batch in one pass; make the loss a "
    "sum over samples, or accept with --accept loss-mixes-samples that each pass has a loss of "
    "its own (as contrastive losses and penalties do)",
    MEAN: 'return the sum (reduction="sum"), or declare the mean in the task, '
    '`reduction = "mean"`, with count() the number of items that it is a mean over',
}
"""What to do about a mixture, by kind."""


def _draws(task: object, model: torch.nn.Module, batch: Batch) -> bool:
    """Whether a pass in training draws random numbers."""
    state = RandomState()
    summed_loss(task, model(batch.inputs), batch.targets)  # type: ignore[arg-type]
    return bool(state.drawn_from())


def _held(draws: bool) -> AbstractContextManager[object]:
    return ConstantDraws() if draws else nullcontext()


def _compare(
    parts: Parts, other: Parts, cut: trial.Cut, manner: _Manner
) -> tuple[Difference | None, str]:
    """Step both sides in turn; return the first difference, or why nothing was compared."""
    group, first = parts.group, parts.group.rank_info.rank == 0
    bounds = Bounds.of(manner.epsilon)
    mine = trial.by_strategy(parts)
    one, error = _attempt(first, lambda: trial.by_one_process(other, cut, apart=manner.apart))
    names = [name for name, _ in one.strategy.named_parameters()] if one else []
    names = group.broadcast(names)
    start = _shared(group, one.model() if one else {})
    try:
        found = first_difference(
            State(loss=0.0, model=mine.model(), optimizer={}),
            State(loss=0.0, model=start, optimizer={}),
            start,
            step=0,
            bounds=bounds,
            parameters=names,
            rank=group.rank_info.rank,
        )
        if found := _earliest(found, group):
            return replace(found, kind="initial value of"), ""
        for step in range(1, STEPS + 1):
            expected, error = _attempt(first and not error, lambda: one.step() if one else None)
            if error := group.broadcast(error):
                return None, f"one process cannot make a step with this model ({error})"
            try:
                here = mine.step()
            except NonFiniteLoss:
                return Difference(
                    name="the loss", kind="loss", step=step, size=float("inf"), moved=0.0
                ), ""
            found = first_difference(
                here,
                _shared_state(group, expected),
                start,
                step=step,
                bounds=bounds,
                parameters=names,
                rank=group.rank_info.rank,
            )
            if found := _earliest(found, group):
                return found, ""
    finally:
        mine.close()
        if one:
            one.close()
    return None, ""


def _attempt(here: bool, action: Callable[[], Value]) -> tuple[Value | None, str]:
    """Do something on rank 0; an error becomes a text, as the other ranks wait for the answer."""
    if not here:
        return None, ""
    try:
        return action(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".split("\n")[0]


def _shared(group: RankGroup, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give all ranks what rank 0 has."""
    return group.broadcast_tensors(dict(tensors), source=0)


def _shared_state(group: RankGroup, state: State | None) -> State:
    loss = group.broadcast(state.loss if state else 0.0)
    model = _shared(group, state.model if state else {})
    optimizer = _shared(group, state.optimizer if state else {})
    return State(loss=loss, model=model, optimizer=optimizer)


def _earliest(found: Difference | None, group: RankGroup) -> Difference | None:
    """Return the same difference on all ranks: that of the loss, else the lowest rank's."""
    every = [one for one in group.gather(found) if one is not None]
    return min(every, key=lambda one: (one.kind != "loss", one.rank), default=None)


def _cause(parts: Parts, cut: trial.Cut, difference: Difference, manner: _Manner) -> str:
    one = trial.parts_of_one_process(parts)
    data = parts.task.train()
    assert isinstance(data, Batch)
    batch = data.part(0, max(cut.batch, SAMPLES)).to(parts.group.device)
    try:
        if cut.parts == 1 and difference.kind == "loss":
            # Nothing splits the samples; but parts of a sequence have a loss each, too.
            mixed = mixtures(
                parts.task,
                one.model().train(),
                batch.part(0, SAMPLES),
                synchronised=True,
                tolerance=manner.tolerance,
            )
            if mixed:
                return f"{mixed[0].text}; {_ADVICE[mixed[0].kind]}"
        seen = observe(parts.task, one.model(), batch)
    except Exception as error:  # of the user's own model
        return f"not known, as one process cannot run it ({type(error).__name__}: {error})"
    return likeliest(difference, seen, recomputed=parts.config.activation_checkpointing)
