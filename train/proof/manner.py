"""How both sides of a proof compute, and whether batches of the model can be cut.

One process determines this with a few samples.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from ..data.order import Batch
from ..parallel.base import Parts, summed_loss
from ..tasks.base import Task
from . import trial
from .comparison import STEPS
from .draws import SINGLE, ConstantDraws, LeastPrecision, RandomState, double_precision
from .mixing import BATCH_NORM, LAYER, LOSS, MEAN, SAMPLES, Snapshot, mixtures


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How both sides compute; rank 0 determines it."""

    double: bool = True
    """Whether models are made in float64."""
    epsilon: float = 0.0
    """Machine epsilon of the coarsest type in the model's computation."""
    draws: bool = False
    """Whether the model draws random numbers."""
    apart: bool = False
    """Whether one process computes each share separately, since shares may differ."""
    accepted: tuple[str, ...] = ()
    """Accepted differences, if the batch is cut."""
    problem: str = ""
    """The mixtures of samples that are not accepted."""
    missing: str = ""
    """Why nothing can be compared."""

    @property
    def tolerance(self) -> float:
        """Limit of rounding in one pass, relative to the largest value."""
        return 1e-9 if self.epsilon < 1e-9 else min(1e4 * self.epsilon, 0.1)


def manner_of(parts: Parts, cut: trial.Cut, samples: Batch, patience_s: float) -> Manner:
    """Determine how one process computes with the model, and whether the model mixes samples."""
    errors = []
    for double in (True, False):
        try:
            return _manner_in(parts, cut, samples, patience_s, double=double)
        except Exception as error:  # of the user's own model, whatever it may be
            errors.append(f"{type(error).__name__}: {error}".split("\n")[0])
    return Manner(missing=f"one process cannot make a step with this model ({errors[-1]})")


def _manner_in(
    parts: Parts,
    cut: trial.Cut,
    samples: Batch,
    patience_s: float,
    *,
    double: bool,
) -> Manner:
    device, config, accepted = parts.group.device, parts.config, parts.config.accepted
    with double_precision(double):
        task = trial.with_samples(parts.task, samples)
        one = trial.parts_of_one_process(replace(parts, task=task))
        batch = task.train().part(0, SAMPLES).to(device)  # type: ignore[union-attr]
        began = time.monotonic()
        model = one.model()
        making = time.monotonic() - began
        if double and any(p.dtype in SINGLE for p in model.parameters() if p.requires_grad):
            # Made with this type, they would be of another type than the others, only here.
            raise TypeError("model() makes trained parameters in single precision")
        if not model.training:
            model.train()
        before, began = Snapshot(model), time.monotonic()
        constant, precision = ConstantDraws(), LeastPrecision()
        state = RandomState()
        with precision, constant:
            loss = summed_loss(task, model(batch.inputs), batch.targets)
        drawn = state.drawn_from()
        if not loss.requires_grad:
            return Manner(missing="no parameter gets a gradient")
        loss.backward()  # type: ignore[no-untyped-call]
        per_sample = (time.monotonic() - began) / SAMPLES
        expected = per_sample * STEPS * (cut.batch + cut.batch // cut.shards) + 2 * making
        del loss
        if expected > patience_s:
            return Manner(
                missing=f"it would take about {expected:.0f} s; --verify starts it anyway"
            )
        if generator := constant.left_random or drawn:
            return Manner(
                missing=f"the model or the loss draws random numbers by {generator}, and one "
                "process cannot draw what the ranks draw"
            )
        before.put_back()
        drew = _draws(task, model, batch)
        before.put_back()
        manner = Manner(double=double, epsilon=precision.epsilon, draws=drew)
        if cut.parts == 1:
            return manner
        with held(drew):
            found = mixtures(
                task,
                model,
                batch,
                synchronised=config.sync_batch_norm and cut.real_micro_batches == 1,
                tolerance=manner.tolerance,
            )
    problems = [
        f"{mixture.text}; {ADVICE[mixture.kind]}"
        for mixture in found
        if mixture.kind not in accepted
    ]
    how = f"the batch is split into {cut.parts} passes ({_passes(cut)}), and "
    # With synchronised norms, a micro-batch of all ranks is one batch.
    by_share = accepted - {BATCH_NORM} if config.sync_batch_norm else accepted
    if config.sync_batch_norm and by_share and not problems:
        return Manner(
            missing=f"--accept {', '.join(sorted(by_share))} is for what each rank computes by "
            "itself, and --sync-batch-norm for what all compute together"
        )
    return replace(
        manner,
        apart=bool(by_share),
        accepted=tuple(sorted(accepted)),
        problem=how + "; and ".join(problems) if problems else "",
    )


def _passes(cut: trial.Cut) -> str:
    shards = f"{cut.shards} shards" if cut.shards > 1 else "1 shard"
    micro = cut.real_micro_batches
    return f"{shards} x {micro} micro-batches" if micro > 1 else shards


ADVICE = {
    BATCH_NORM: "use --sync-batch-norm without micro-batches, or a norm over each sample "
    "(GroupNorm, LayerNorm), or accept the difference with --accept batch-norm",
    LAYER: "one process, with the whole batch in one pass, trains the code as written; compute it "
    "for each sample alone, or accept the difference with --accept layer-mixes-samples",
    LOSS: "one process, with the whole batch in one pass, trains the code as written; make the "
    "loss a sum over samples, or accept with --accept loss-mixes-samples that each pass has its "
    "own loss (as for contrastive losses and penalties)",
    MEAN: 'return the sum (reduction="sum"), or declare the mean in the task, '
    '`reduction = "mean"`, where count() returns the number of averaged items',
}
"""The fix for a mixture, by kind."""


def _draws(task: Task, model: torch.nn.Module, batch: Batch) -> bool:
    """Whether a pass in training draws random numbers."""
    state = RandomState()
    summed_loss(task, model(batch.inputs), batch.targets)
    return bool(state.drawn_from())


def held(draws: bool) -> AbstractContextManager[object]:
    """Hold a model's random numbers constant, if it draws some."""
    return ConstantDraws() if draws else nullcontext()
