"""What the other tests promise of the CPU, on GPUs and through NCCL.

`make test-gpu`, or `pytest -m gpu tests/train` in any environment that has the packages; some
minutes with one GPU, which is enough for most of it. What needs more GPUs than there are is left
out, see conftest.py; ranks can share one, see support/shared_gpu.py.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.train.model.test_precision import ARRANGED, HSDP, largest, rounded
from tests.train.parallel.test_ladder import EIGHT, FOUR, MOST, ONE, TWO, close
from tests.train.support import shared_gpu
from tests.train.support.ladder import Case, climb
from tests.train.support.reading import same, whole
from train.checkpoints.planner import Staging
from train.checkpoints.safetensors_file import TensorPart

if TYPE_CHECKING:
    from tests.train.conftest import Start

pytestmark = pytest.mark.gpu
# On GPUs, how a sum is cut depends on its shape, and sums over half a batch have another one.
MOST_SINGLE = 1e-5
DTYPES = {"float64": torch.float64, "float32": torch.float32}


WORLDS = [
    pytest.param(cases, marks=pytest.mark.gpu(cases[0].world_size), id=f"{cases[0].world_size}")
    for cases in (ONE, TWO, FOUR, EIGHT)
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cases", WORLDS)
def test_every_arrangement_equals_one_gpu(cases: list[Case], dtype: str) -> None:
    if dtype == "float64":
        chosen, most = cases, MOST
    else:
        # With adamw, the sign of a gradient that is mere rounding decides about whole steps.
        chosen, most = [one for one in cases if one.config.optimizer == "sgd"], MOST_SINGLE
    found = climb(chosen, dtype=DTYPES[dtype])
    assert found.keys() == {one.name for one in chosen}
    assert {name: far for name, far in found.items() if not close(far, most)} == {}


def gpus(most: int) -> int:
    """How many ranks to start: a power of two."""
    count = min(most, shared_gpu.ranks_at_most())
    return 1 << (count.bit_length() - 1)


def test_a_killed_run_ends_in_the_same_bits(start: Start, tmp_path: Path) -> None:
    """With `--reduce exact`: kernels that add in any order would leave last bits to chance."""
    exact = ("--strategy=ddp", "--reduce=exact", "--global-batch=16")
    flags = ("--task=chars", *exact, "--steps=200", "--checkpoint-every=40")
    ranks = gpus(4)
    unbroken = start.ranks(ranks, *flags, run_dir=tmp_path / "unbroken").finish()
    again = ("--standalone", "--max-restarts=1")
    run = start.ranks(ranks, *flags, run_dir=tmp_path / "run", torchrun=again)
    run.wait_for_step(90)
    os.kill(run.workers()[0], signal.SIGKILL)
    run.finish()
    (resumed,) = [event for event in run.events() if event["event"] == "resume"]
    assert resumed["step"] in range(80, 200, 40)
    last = "checkpoints/attempt-0/step-00000200"
    assert same(whole(run.run_dir / last), whole(unbroken.run_dir / last))
    assert run.losses() == unbroken.losses()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_dies_does_not_leave_the_others_waiting(
    start: Start, tmp_path: Path, strategy: str
) -> None:
    """They wait inside NCCL, where no signal reaches them, until torchrun kills them: 30 s."""
    flags = ("--task=chars", f"--strategy={strategy}", "--steps=400", "--checkpoint-every=40")
    again = ("--standalone", "--max-restarts=1")
    run = start.ranks(2, *flags, run_dir=tmp_path / "run", torchrun=again)
    run.wait_for_step(90)
    os.kill(run.workers()[1], signal.SIGKILL)
    run.finish()
    assert run.outcome()["restart"] == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--precision=bf16",),
        ("--precision=fp16", "--clip-norm=1"),
        ("--precision=bf16", "--compile"),
        ("--precision=bf16", "--activation-checkpointing"),
        ("--compile", "--activation-checkpointing"),
        ("--tf32=on",),
        ("--strategy=dataparallel",),
        ("--strategy=manual", "--devices=cpu,cuda:0"),
        ("--strategy=dataparallel", "--devices=cpu"),
    ],
    ids=" ".join,
)
def test_a_gpu_learns(start: Start, tmp_path: Path, flags: tuple[str, ...]) -> None:
    run = start.single("--epochs=5", *flags, run_dir=tmp_path / "run").finish()
    assert " on cuda, attempt 0" in run.output()
    assert run.outcome()["metrics"]["test_accuracy"] >= 0.9


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local-sgd"])
def test_ranks_with_a_gpu_each_learn(start: Start, tmp_path: Path, strategy: str) -> None:
    run = start.ranks(gpus(8), "--epochs=5", f"--strategy={strategy}", run_dir=tmp_path / "run")
    run.finish()
    assert " on cuda, attempt 0" in run.output()
    assert run.outcome()["metrics"]["test_accuracy"] >= 0.9


APART = """
from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel

from train.tasks.chars import Chars
from train.tasks.digits import Digits


class Dropping(Chars):
    # Dropout of tensors that are shared by ranks, whose numbers torch draws for all of them.
    def tensor_plan(self, model, **given):
        plan = super().tensor_plan(model, **given)
        names = [name for name in plan if name.endswith(("attention_drop", "feed.3"))]
        # Plain tensors come out, as the sums after them need.
        local = SequenceParallel(use_local_output=True)
        return {**plan, **dict.fromkeys(names, local)}


class Normed(Digits):
    def model(self):
        return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
"""


@pytest.mark.parametrize(
    ("task", "ranks", "flags"),
    [
        pytest.param(task, ranks, flags.split(), marks=pytest.mark.gpu(ranks), id=flags)
        for task, ranks, flags in (
            ("Dropping", 2, "--tp=2 --dropout=0.1"),
            # Of four ranks, two draw at a time.
            ("Dropping", 4, "--pp=2 --tp=2 --dropout=0.1 --micro-batch=4"),
            ("Dropping", 4, "--dp-shard=2 --tp=2 --cpu-offload --clip-norm=1"),
            ("Normed", 2, "--strategy=fsdp --meta-init --sync-batch-norm"),
            ("Normed", 2, "--strategy=pp --micro-batch=8 --sync-batch-norm"),
            ("Normed", 2, "--strategy=ddp --compile --activation-checkpointing"),
        )
    ],
)
def test_what_only_several_gpus_can_do_goes_to_its_end(
    start: Start, tmp_path: Path, task: str, ranks: int, flags: list[str]
) -> None:
    (tmp_path / "apart.py").write_text(APART)
    flags = [f"--task={tmp_path / 'apart.py'}:{task}", "--steps=3", "--global-batch=16", *flags]
    run = start.ranks(ranks, *flags, run_dir=tmp_path / "run").finish()
    assert run.losses().keys() == {1, 2, 3}


@pytest.mark.gpu(4)
def test_every_strategy_rounds_as_one_gpu_does() -> None:
    found = climb(rounded("bf16", 4, {**ARRANGED, "hsdp": HSDP}), dtype=torch.float32)
    wrong = found.pop("gathered in halves, bf16")
    most = 2 * torch.finfo(torch.bfloat16).eps
    assert largest(wrong) > most
    assert {name: far for name, far in found.items() if largest(far) > most} == {}


def test_a_copy_for_a_checkpoint_is_of_its_moment() -> None:
    size, device = 4096, torch.device("cuda", 0)
    numbers = torch.ones(size, size, device=device)
    parts = [TensorPart(name="numbers", dtype=numbers.dtype, offsets=(0, 0), sizes=(size, size))]
    work, staging = torch.eye(size, device=device), Staging()
    for step in (1, 2):
        # The copy is queued long before the GPU starts it.
        for _ in range(20):
            work = work @ work
        numbers.mul_(work.diagonal().prod())
        (copy,) = staging.copy(parts, {"numbers": numbers})
        numbers.add_(1.0)
        assert copy.is_pinned()
        assert copy.eq(step).all()


TASK = """
import torch
from torch.utils.data import TensorDataset

from train.tasks.digits import Digits


class Numbered(Digits):
    def train(self):
        batch = super().train()
        return TensorDataset(batch.inputs, batch.targets)
"""


def test_processes_that_read_ahead_change_nothing(start: Start, tmp_path: Path) -> None:
    """They are forked from one that has a GPU, and its memory for transfers."""
    task = tmp_path / "numbered.py"
    task.write_text(TASK)
    losses = []
    for workers in (0, 2):
        flags = (f"--task={task}:Numbered", "--steps=30", f"--workers={workers}")
        run = start.single(*flags, run_dir=tmp_path / f"run-{workers}").finish()
        losses.append(run.losses())
    assert losses[0] == losses[1]


def test_a_profile_tells_what_the_gpu_did(start: Start, tmp_path: Path) -> None:
    flags = ("--task=chars", "--steps=12", "--profile=5:8")
    run = start.ranks(gpus(8), *flags, "--strategy=ddp", run_dir=tmp_path / "run").finish()
    trace = json.loads((run.run_dir / "profile/attempt-0/rank-0.json").read_text())
    assert {"kernel", "gpu_memcpy"} <= {event.get("cat") for event in trace["traceEvents"]}
    lines = run.output().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("profile of 4 steps"))
    shares = [float(line.split()[1].rstrip("%")) for line in lines[first + 1 : first + 5]]
    # Of a model as small as this, a GPU mostly waits for Python.
    assert shares[0] > 0
    assert sum(shares) == pytest.approx(100, abs=0.5)
