"""The promise of train/: every training equals that of one process, or is refused by name.

Models and command lines are drawn at random: see `drawn.py` for the oddities of the models. Each
draw trains under one layout, goes on under another, evaluates and exports, all through the command
line; its weights are compared with those of one process that did the same.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.costs import others_slow
from tests.train.support import drawn
from tests.train.support.drawn import Oddities
from tests.train.support.whole_runs import Ended, run

BATCH = 12
STEPS, RESUMED_AT = 3, 2
# Of how far training has moved the weights. Double precision has 2.2e-16, and a hundred sums.
FAR_DOUBLE = 1e-9
# A product in bf16 is off by 0.4 %, another in another order of summing; three steps of that.
FAR_HALF = 0.15


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to arrange ranks."""

    ranks: int
    flags: tuple[str, ...]
    pipeline: bool = False
    uneven: bool = False
    """Whether micro-batches of 3 do not make up a rank's share."""
    optimizers: tuple[str, ...] = ("adamw", "sgd")


def pipeline(ranks: int, schedule: str, *more: str) -> Layout:
    flags = ("--pp", "2", "--pp-schedule", schedule, *more)
    return Layout(ranks=ranks, flags=flags, pipeline=True)


LAYOUTS = [
    Layout(ranks=1, flags=()),
    Layout(ranks=1, flags=("--strategy", "manual", "--devices", "cpu,cpu")),
    Layout(ranks=1, flags=("--strategy", "dataparallel")),
    *(Layout(ranks=n, flags=("--strategy", "ddp"), uneven=n == 3) for n in (2, 3)),
    *(Layout(ranks=n, flags=("--strategy", "fsdp"), uneven=n == 3) for n in (2, 3)),
    Layout(ranks=2, flags=("--strategy", "fsdp", "--meta-init")),
    Layout(ranks=2, flags=("--strategy", "fsdp", "--cpu-offload")),
    Layout(ranks=4, flags=("--strategy", "hsdp")),
    Layout(ranks=2, flags=("--tp", "2")),
    Layout(ranks=2, flags=("--tp", "2", "--loss-parallel")),
    Layout(ranks=2, flags=("--cp", "2")),
    Layout(ranks=2, flags=("--cp", "2", "--cp-method", "ulysses")),
    pipeline(2, "GPipe"),
    pipeline(2, "1F1B"),
    pipeline(2, "Interleaved1F1B"),
    pipeline(2, "ZBVZeroBubble"),
    pipeline(2, "1F1B", "--meta-init"),
    pipeline(4, "1F1B", "--dp-shard", "2"),
    pipeline(4, "GPipe", "--dp-replicate", "2"),
    pipeline(4, "1F1B", "--tp", "2"),
    pipeline(4, "1F1B", "--cp", "2"),
    Layout(ranks=4, flags=("--dp-shard", "2", "--tp", "2")),
    Layout(ranks=4, flags=("--cp", "2", "--tp", "2")),
    Layout(ranks=4, flags=("--dp-shard", "2", "--cp", "2")),
    *(Layout(ranks=n, flags=("--reduce", "exact")) for n in (1, 2)),
    Layout(ranks=3, flags=("--strategy", "ps")),
    Layout(
        ranks=2,
        flags=("--strategy", "local-sgd", "--local-steps", "1"),
        # Only with plain SGD is the mean of weights the step of the mean.
        optimizers=("plain sgd",),
    ),
]
OPTIMIZERS = {
    "adamw": ("--optimizer", "adamw", "--lr", "0.01", "--weight-decay", "0.1"),
    "sgd": ("--optimizer", "sgd", "--lr", "0.05", "--momentum", "0.9", "--weight-decay", "0.1"),
    # Without decay: a rank that makes no step of its own with a layer does not shrink it either.
    "plain sgd": ("--optimizer", "sgd", "--lr", "0.05", "--weight-decay", "0"),
}
BUFFERS = [
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool",
    "complex64", "complex128", "-complex64", "-float32",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One training, started under one layout and ended under another."""

    odd: Oddities
    first: Layout
    then: Layout
    optimizer: str
    micro_batch: int | None
    precision: str
    clip: bool
    recompute: bool
    compiled: bool

    def flags(self, layout: Layout) -> list[str]:
        flags = [*layout.flags, *OPTIMIZERS[self.optimizer], "--global-batch", str(BATCH)]
        flags += ["--precision", self.precision, "--seed", "5"]
        micro_batch = self.micro_batch
        if micro_batch is None and layout.pipeline:
            micro_batch = 3
        flags += ["--micro-batch", str(micro_batch)] if micro_batch else []
        flags += ["--clip-norm", "0.5"] if self.clip else []
        flags += ["--activation-checkpointing"] if self.recompute else []
        return flags + (["--compile"] if self.compiled else [])


@st.composite
def oddities(draw: st.DrawFn) -> Oddities:
    """Some at a time: with all of them at once, most models would be refused."""
    sometimes = st.sampled_from([False, False, False, True])
    tie = draw(st.sampled_from(["", "", "module", "module", "function"]))
    return Oddities(
        tie=tie,
        again=draw(sometimes),
        shared_linear=draw(sometimes),
        branch=draw(st.sampled_from(["", "", "experts", "around"])),
        never=draw(sometimes),
        frozen=draw(st.sampled_from(["", "", "embed", "norms", "block"])),
        buffers=tuple(draw(st.lists(st.sampled_from(BUFFERS), max_size=3, unique=True))),
        scalar=draw(st.integers(0, 9)) == 0,
        beside=draw(st.integers(0, 9)) == 0,
        inputs=draw(st.sampled_from(["", "", "dict", "pair"])),
        outputs=draw(st.sampled_from(["", "", "dict", "tuple"])) if tie != "function" else "",
        bare_piece=draw(sometimes),
    )


@st.composite
def draws(draw: st.DrawFn, *, compiling: bool) -> Draw:
    precision = draw(st.sampled_from(["fp32", "fp32", "fp32", "bf16", "fp16"]))
    odd = draw(oddities())
    if precision != "fp32":
        # Autocast leaves doubles as they are. Rounded numbers would choose another branch.
        odd = replace(odd, double=False, branch="")
    # A branch sees what a pass is given: that has to be cut alike for all, here in threes.
    layouts = [layout for layout in LAYOUTS if not (odd.branch and layout.uneven)]
    first = draw(st.sampled_from(layouts))
    both = [layout for layout in layouts if layout.optimizers == first.optimizers]
    return Draw(
        odd=odd,
        first=first,
        then=draw(st.sampled_from(both)),
        # The first steps of AdamW are the signs of gradients, which rounding turns over.
        optimizer=draw(
            st.sampled_from([o for o in first.optimizers if precision == "fp32" or "sgd" in o])
        ),
        micro_batch=3 if odd.branch else draw(st.sampled_from([None, 1, 2, 3])),
        precision=precision,
        # Ranks that step by themselves clip by their own norms.
        clip="local-sgd" not in first.flags and draw(st.booleans()),
        recompute=draw(st.integers(0, 3)) == 0,
        compiled=compiling and draw(st.integers(0, 9)) == 0,
    )


def losses(run_dir: Path) -> int:
    """How many steps have been made in a run directory."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum("loss" in json.loads(line) for line in lines)


def skipped(run_dir: Path) -> int:
    """How many steps the loss scaling of fp16 has left out."""
    return (run_dir / "events.jsonl").read_text().count('"step_skipped"')


def keeps(draw: Draw) -> str:
    """Train as drawn; say how the promise was kept."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = ["--task", f"{drawn.__file__}:Drawn"]
        environ = {drawn.VARIABLE: draw.odd.text()}

        def trained(layout: Layout, directory: str, steps: int, *more: str) -> Ended:
            run_dir = ["--run-dir", str(folder / directory), "--steps", str(steps)]
            flags = [*task, *run_dir, *draw.flags(layout), *more]
            return run(layout.ranks, *flags, environ=environ)

        def refused(ended: Ended, directory: str, steps: int) -> bool:
            if ended.status == 0:
                return False
            assert ended.status == 2, f"{draw}\n{ended.output}"
            assert "Traceback" not in ended.output, f"{draw}\n{ended.output}"
            assert "--" in ended.output or "task" in ended.output, f"{draw}\n{ended.output}"
            assert losses(folder / directory) == steps, f"{draw}\n{ended.output}"
            return True

        export, alone = folder / "drawn.safetensors", folder / "alone.safetensors"
        if refused(trained(draw.first, "drawn", RESUMED_AT), "drawn", 0):
            return "refused"
        ended = trained(draw.then, "drawn", STEPS, "--export", str(export))
        if refused(ended, "drawn", RESUMED_AT):
            return "refused at the resume"
        one = replace(draw, compiled=False, recompute=False)
        flags = [*one.flags(LAYOUTS[0]), "--steps", str(STEPS), "--export", str(alone)]
        reference = run(1, *task, "--run-dir", str(folder / "alone"), *flags, environ=environ)
        assert reference.status == 0, f"{draw}\n{reference.output}"
        if skipped(folder / "drawn") != skipped(folder / "alone"):
            # A loss that is scaled up until it overflows does so with some sizes of micro-batches.
            return "other steps skipped"
        difference = far(load_file(export), load_file(alone), draw)
        bound = FAR_DOUBLE if draw.precision == "fp32" else FAR_HALF
        assert difference <= bound, f"{difference}\n{draw}\n{ended.output}"
        return "equal"


def layout_of(*flags: str) -> Layout:
    """The first of the layouts with these flags."""
    return next(layout for layout in LAYOUTS if layout.flags == flags)


PLAIN = Draw(
    odd=Oddities(),
    first=LAYOUTS[0],
    then=LAYOUTS[0],
    optimizer="sgd",
    micro_batch=3,
    precision="fp32",
    clip=False,
    recompute=False,
    compiled=False,
)


# One of each axis, and the product that is used most.
QUICK = [
    number
    for number, layout in enumerate(LAYOUTS)
    if " ".join(layout.flags)
    in ("--tp 2", "--cp 2", "--pp 2 --pp-schedule 1F1B", "--dp-shard 2 --tp 2")
]


@pytest.mark.parametrize(
    "number",
    others_slow(range(len(LAYOUTS)), *QUICK),
    ids=lambda n: " ".join(LAYOUTS[n].flags),
)
def test_an_ordinary_model_trains_under_each_layout_and_goes_on_under_the_next(number: int) -> None:
    first = LAYOUTS[number]
    # A run that adds up exactly goes on as one that does.
    kind = [(layout.optimizers, "exact" in layout.flags) for layout in LAYOUTS]
    others = [*range(number + 1, len(LAYOUTS)), *range(number + 1)]
    draw = Draw(
        odd=Oddities(),
        first=first,
        then=LAYOUTS[next(other for other in others if kind[other] == kind[number])],
        optimizer=first.optimizers[0],
        micro_batch=3,
        precision="fp32",
        clip="local-sgd" not in first.flags,
        recompute=False,
        compiled=False,
    )
    assert keeps(draw) == "equal"


FAILED_ONCE = {
    "one module that is two pieces, compiled and computed again": replace(
        PLAIN, odd=Oddities(again=True), recompute=True, compiled=True
    ),
    "a weight used outside of its piece, behind a branch on data": replace(
        PLAIN,
        odd=Oddities(tie="function", branch="experts", bare_piece=True),
        first=layout_of("--strategy", "fsdp"),
    ),
}


# The first one compiles, which takes a minute.
@pytest.mark.parametrize("name", others_slow(FAILED_ONCE, [*FAILED_ONCE][1]))
def test_what_a_draw_has_failed_of_once_does_not_come_again(name: str) -> None:
    assert keeps(FAILED_ONCE[name]) == ("refused" if "outside" in name else "equal")


def far(mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], draw: Draw) -> float:
    """How far weights are from the reference's, beside how far these have come from the start."""
    assert mine.keys() == reference.keys(), draw
    torch.manual_seed(5)
    before = drawn.Model(draw.odd)
    if draw.odd.double:
        before = before.double()
    # As pairs of numbers, in which complex ones are exported.
    start = {
        name: torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for name, tensor in before.state_dict().items()
    }
    moved = difference = 0.0
    for name, tensor in reference.items():
        assert mine[name].shape == tensor.shape and mine[name].dtype == tensor.dtype, (name, draw)
        if not tensor.is_floating_point():
            assert torch.equal(mine[name], tensor), (name, draw)
            continue
        moved += float((tensor.double() - start[name].double()).square().sum())
        difference += float((mine[name].double() - tensor.double()).square().sum())
    assert moved > 0, draw
    return float((difference / moved) ** 0.5)


def check_draws(count: int, part: int, *, compiling: bool) -> None:
    @seed(part)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        # A failure is reported as drawn: shrinking it would take as long again, and again.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(draws(compiling=compiling))
    def check(draw: Draw) -> None:
        event(keeps(draw))

    check()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_what_is_trained_equals_one_process_or_is_refused(part: int) -> None:
    check_draws(10, part, compiling=False)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(100, 130))
def test_what_is_trained_equals_one_process_or_is_refused_many_times(part: int) -> None:
    check_draws(10, part, compiling=True)
