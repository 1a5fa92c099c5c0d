"""The promise: a training equals plain torch's on the whole batch, or is refused by name."""

from __future__ import annotations

import hashlib
import json
import random
import re
import tempfile
from collections.abc import Container
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.train.promise.grammar import BATCH, SAMPLES, Model, drawn, source_of
from tests.train.promise.pool import Pool
from train.data.order import Batch, SampleOrder, mixed, seed_generators, seed_of
from train.model.trees import joined
from train.parallel.pipeline import split

SEED, STEPS, RESUMED_AT, LR, MOMENTUM, DECAY, CLIP = 5, 3, 2, 0.02, 0.9, 0.01, 0.5
FAR = 1e-9
"""Of how far training has moved the weights. Double precision has 2.2e-16, and a hundred sums."""
PASSES = (".count", ".num_batches_tracked")
"""Buffers that count passes, of which a step may have several; what depends on them is compared."""
TOO_FAR = 1e6
"""Losses above are no training: rounding would grow without bounds."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to train."""

    ranks: int
    flags: tuple[str, ...] = ()
    pipeline: bool = False
    time: bool = False
    """Whether it cuts sequences, and needs some."""
    alike: bool = False
    """Whether its random numbers are those of one process."""
    shards: int = 1
    """Slices of a batch that different ranks, or virtual shards, work on."""
    passes: int = 1
    """Passes of each slice."""


def _stages(schedule: str, *more: str, shards: int = 1, time: bool = False) -> Layout:
    return Layout(
        ranks=4 if more else 2,
        flags=("--pp", "2", "--pp-schedule", schedule, "--micro-batch", "3", *more),
        pipeline=True,
        time=time,
        shards=shards,
        passes=4 // shards,
    )


LAYOUTS = (
    Layout(ranks=1, alike=True),
    Layout(ranks=1, flags=("--micro-batch", "4"), passes=3),
    Layout(ranks=1, flags=("--activation-checkpointing",), alike=True),
    Layout(ranks=1, flags=("--strategy", "manual", "--devices", "cpu,cpu"), alike=True),
    Layout(ranks=1, flags=("--reduce", "exact", "--virtual-shards", "2"), shards=2),
    Layout(ranks=2, flags=("--reduce", "exact", "--virtual-shards", "4"), shards=4),
    *(Layout(ranks=ranks, flags=("--strategy", "ddp"), shards=ranks) for ranks in (2, 3, 4)),
    Layout(ranks=2, flags=("--strategy", "ddp", "--micro-batch", "3"), shards=2, passes=2),
    *(Layout(ranks=ranks, flags=("--strategy", "fsdp"), shards=ranks) for ranks in (2, 3, 4)),
    Layout(ranks=2, flags=("--strategy", "fsdp", "--micro-batch", "3", "--gradient-sync", "each"),
        shards=2, passes=2),
    Layout(ranks=2, flags=("--strategy", "fsdp", "--activation-checkpointing"), shards=2),
    Layout(ranks=2, flags=("--strategy", "fsdp", "--meta-init"), shards=2),
    Layout(ranks=2, flags=("--strategy", "fsdp", "--cpu-offload"), shards=2),
    Layout(ranks=4, flags=("--strategy", "hsdp"), shards=4),
    Layout(ranks=2, flags=("--tp", "2")),
    Layout(ranks=4, flags=("--tp", "2", "--dp-shard", "2"), shards=2),
    *map(_stages, ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", *split.TWO_PASSES)),
    _stages("1F1B", "--dp-shard", "2", shards=2),
    _stages("GPipe", "--dp-replicate", "2", shards=2),
    _stages("1F1B", "--tp", "2"),
    _stages("1F1B", "--cp", "2", time=True),
    Layout(ranks=2, flags=("--cp", "2"), time=True),
    Layout(ranks=2, flags=("--cp", "2", "--cp-method", "ulysses"), time=True),
    Layout(ranks=4, flags=("--cp", "2", "--tp", "2"), time=True),
    Layout(ranks=4, flags=("--dp-shard", "2", "--cp", "2"), shards=2, time=True),
    Layout(ranks=4, flags=("--strategy", "ps", "--ps-mode", "sync"), shards=3),
    Layout(ranks=2, flags=("--strategy", "local-sgd", "--local-steps", "1"), shards=2),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One training of a drawn model."""

    model: Model
    layout: Layout
    then: Layout | None = None
    """Where it goes on after `RESUMED_AT` steps; None: it is not interrupted."""
    clip: bool = False
    sync_batch_norm: bool = False

    def flags(self, layout: Layout, steps: int) -> list[str]:
        flags = ["--optimizer", "sgd", "--lr", str(LR), "--momentum", str(self.momentum)]
        flags += ["--weight-decay", str(self.decay), "--seed", str(SEED)]
        flags += ["--global-batch", str(BATCH), "--steps", str(steps), *layout.flags]
        flags += ["--clip-norm", str(CLIP)] if self.clip else []
        return flags + (["--sync-batch-norm"] if self.sync_batch_norm else [])

    @property
    def plain(self) -> bool:
        """Whether the optimizer is SGD without momentum and decay."""
        # Of ranks that step by themselves only then the mean is the step of the mean.
        return "local-sgd" in self.layout.flags or "sparse embedding" in self.model.features

    @property
    def momentum(self) -> float:
        return 0.0 if self.plain else MOMENTUM

    @property
    def decay(self) -> float:
        return 0.0 if self.plain else DECAY


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How the promise was kept; `broken`: how it was not."""

    kept: str = ""
    broken: str = ""
    output: str = field(default="", repr=False)


def draw(seed: int, *, without: Container[str] = ()) -> Draw:
    """Draw a training `without` some features; a pure function of both."""
    source = random.Random(seed)
    while True:
        model, layout = drawn(source, without=without), source.choice(LAYOUTS)
        one = Draw(
            model=model,
            layout=layout,
            then=source.choice(LAYOUTS) if source.random() < 0.3 else None,
            # Ranks that step by themselves clip by their own norms.
            clip=source.random() < 0.2
            and "local-sgd" not in layout.flags
            and "sparse embedding" not in model.features,
            sync_batch_norm=any("batch norm" in name for name in model.features)
            and source.random() < 0.7,
        )
        if possible(one):
            return one


def possible(one: Draw) -> bool:
    """Whether a training is worth trying: some can only be refused."""
    if one.then is not None and not _goes_on(one.model, one.layout, one.then):
        return False
    return all(_takes(layout, one.model) for layout in (one.layout, one.then) if layout)


def _goes_on(model: Model, first: Layout, then: Layout) -> bool:
    """Whether the one may continue the other, and passes of both are alike."""
    alike = [
        (one.shards, one.passes, "exact" in one.flags, "local-sgd" in one.flags)
        for one in (first, then)
    ]
    return alike[0] == alike[1] and not model.forgets


def _takes(layout: Layout, model: Model) -> bool:
    if layout.time and not (model.time and "attention" in model.features):
        return False
    if "--tp" in layout.flags and "mlp" not in model.features:
        return False
    if layout.pipeline and (model.root == "whole" or len(model.blocks) < 2):
        return False
    if "manual" in layout.flags and model.root == "whole":
        return False
    if "--activation-checkpointing" in layout.flags and model.root == "whole":
        return False
    return layout.alike or not model.is_random


def _passes(batch: Batch, *, shards: int, passes: int) -> list[Batch]:
    if passes == 1:
        return [batch]
    parts = zip(*(share.split_into(passes) for share in batch.split_into(shards)), strict=True)
    return [
        Batch(inputs=joined([p.inputs for p in some]), targets=joined([p.targets for p in some]))
        for some in parts
    ]


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What plain torch has learnt."""

    losses: list[float]
    start: dict[str, Tensor]
    end: dict[str, Tensor]


def by_plain_torch(one: Draw, text: str, *, passes: int = 1) -> Learnt:
    """Train on whole batches in a loop of a few lines, without any of `train` but the order.

    With several passes, each has its part of all slices that ranks work on.
    """
    default = torch.get_default_dtype()
    try:
        return _learnt(one, text, passes)
    finally:
        # Which the file has set.
        torch.set_default_dtype(default)


def _learnt(one: Draw, text: str, passes: int) -> Learnt:
    names: dict[str, Any] = {"__name__": "drawn"}
    exec(compile(text, "drawn.py", "exec"), names)
    task = names["Drawn"]()
    seed_generators(seed_of("model", SEED), torch.device("cpu"))
    torch.manual_seed(SEED)
    model, data = task.model(), task.train()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=one.momentum, weight_decay=one.decay
    )
    order, losses = SampleOrder(size=SAMPLES, seed=SEED), []
    for step in range(STEPS):
        batch = data.take(order.positions(step * BATCH, (step + 1) * BATCH))
        seed_generators(mixed(seed_of("step", SEED, 0), step), torch.device("cpu"))
        optimizer.zero_grad()
        mean = 0.0
        for part in _passes(batch, shards=one.layout.shards, passes=passes):
            loss = task.loss(model(part.inputs), part.targets)
            if task.reduction == "mean":
                loss = loss * task.count(part.targets)
            loss = loss / task.count(batch.targets)
            loss.backward()
            mean += loss.item()
        if one.clip:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                gradient *= min(CLIP / norm, 1.0)
        optimizer.step()
        losses.append(mean)
    end = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Learnt(losses=losses, start=start, end=end)


def judge(one: Draw, pool: Pool) -> Judgement:
    """Train as drawn, and say how the promise was kept."""
    text = source_of(one.model)
    try:
        learnt = by_plain_torch(one, text)
    except Exception as error:
        return Judgement(kept=f"no model: {type(error).__name__}", output=str(error))
    if not all(abs(loss) < TOO_FAR for loss in learnt.losses):
        return Judgement(kept="no model: it diverges")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A name of its own: a process keeps what it has imported.
        path = folder / f"drawn_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
        path.write_text(text)
        run_dir, export = folder / "run", folder / "end.safetensors"
        argv = ["--task", f"{path}:Drawn", "--run-dir", str(run_dir), "--export", str(export)]
        starts = [(one.layout, STEPS)]
        if one.then is not None:
            starts = [(one.layout, RESUMED_AT), (one.then, STEPS)]
        before = 0
        for layout, steps in starts:
            ended = pool.run(layout.ranks, [*argv, *one.flags(layout, steps)])
            losses = _losses(run_dir / "metrics.jsonl")
            if ended.status == 2:
                return _refused(one, ended.output, steps=len(losses) - before)
            if ended.status != 0:
                what = "hangs" if ended.status is None else f"crashes {ended.statuses}"
                return Judgement(broken=what, output=ended.output)
            before = len(losses)
            if one.then is not None and one.then.ranks != layout.ranks and steps < STEPS:
                pool.end(layout.ranks)
        end = load_file(export)
    far = distance(learnt, losses, end)
    if far <= FAR:
        return Judgement(kept="equal")
    if one.layout.passes > 1:
        # What moves in each pass moves so in one process that makes as many of them, too.
        learnt = by_plain_torch(one, text, passes=one.layout.passes)
        if distance(learnt, losses, end) <= FAR:
            return Judgement(kept="equal to as many passes")
    return Judgement(broken=f"differs by {far:.1e}", output=ended.output)


def distance(learnt: Learnt, losses: list[float], end: dict[str, Tensor]) -> float:
    """How far a training has ended from plain torch's, beside how far that has come."""
    if len(losses) != len(learnt.losses) or end.keys() != learnt.end.keys():
        return float("inf")
    apart = max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(losses, learnt.losses, strict=True))
    moved = difference = 0.0
    for name, tensor in learnt.end.items():
        if name.endswith(PASSES):
            continue
        before, after = (_real(one).double() for one in (learnt.start[name], tensor))
        mine = end[name].double()
        if mine.shape != after.shape:
            return float("inf")
        moved += float((after - before).square().sum())
        difference += float((mine - after).square().sum())
    return max(apart, float((difference / max(moved, 1e-12)) ** 0.5))


def _real(tensor: Tensor) -> Tensor:
    """As pairs of numbers, in which complex ones are exported."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _losses(path: Path) -> list[float]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def _refused(one: Draw, output: str, *, steps: int) -> Judgement:
    reason = next((line for line in output.splitlines() if line.startswith("train: ")), "")
    if "Traceback" in output and not reason:
        return Judgement(broken="refused with a traceback", output=output)
    if not re.search(r"task '|--[a-z]", reason):
        return Judgement(broken="refused without a name", output=output)
    if steps and not one.model.changes_later:
        return Judgement(broken=f"refused after step {steps}", output=output)
    if "is in use: " in reason:
        return Judgement(broken="refused for an earlier run", output=output)
    kept = "refused as it fails" if " fails with task " in reason else "refused"
    return Judgement(kept=kept, output=reason)


def smallest(one: Draw, pool: Pool, *, tries: int = 60) -> tuple[Draw, Judgement]:
    """Leave out parts of a model that fails as long as it fails."""
    found = judge(one, pool)
    simpler = True
    while simpler and tries > 0:
        simpler = False
        changes = [replace(one, clip=False), replace(one, sync_batch_norm=False)]
        changes += [replace(one, then=None)]
        changes += [replace(one, model=model) for model in one.model.simpler()]
        for other in changes:
            if other == one or not possible(other):
                continue
            tries -= 1
            judged = judge(other, pool)
            if judged.broken:
                one, found, simpler = other, judged, True
                break
            if tries <= 0:
                break
    return one, found


def shown(one: Draw, judged: Judgement) -> str:
    """Write a failure as one can repeat it."""
    last = "\n".join(line for line in judged.output.splitlines()[-8:])
    return (
        f"{judged.broken}\n{_commands(one)}"
        f"  features: {', '.join(sorted(one.model.features))}; loss: {one.model.loss}; root: "
        f"{one.model.root}\n{last}\n\n{source_of(one.model)}"
    )


def _commands(one: Draw) -> str:
    starts = [(one.layout, RESUMED_AT if one.then else STEPS)]
    starts += [(one.then, STEPS)] if one.then else []
    return "".join(
        f"  ranks: {at.ranks}, flags: {' '.join(one.flags(at, n))}\n" for at, n in starts
    )
