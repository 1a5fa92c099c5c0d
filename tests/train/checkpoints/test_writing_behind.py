"""Training goes on while a checkpoint is written; all ranks agree on how that ends."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.train.support.ranks import on_ranks
from tests.train.support.reading import whole
from train.checkpoints.checkpointer import Checkpointer
from train.checkpoints.recovery import look
from train.checkpoints.store import Position, State
from train.errors import FencedError, TrainError
from train.rundir.files import RunDirectory, TrainingProgress
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo

if TYPE_CHECKING:
    from tests.train.conftest import Start

RANKS = 3
STATE = State(step=0, epoch=0, samples_seen=0, world_size=RANKS, identity={}, config={})


class Rank:
    """One rank's checkpointer, and tensors that are too large for the limit below."""

    def __init__(self, rank: int, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        rank_info = RankInfo(rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS)
        group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
        self.rank, self.run_dir = rank, run_dir
        self.checkpointer = Checkpointer(run_dir, group)
        self.tensors = {f"model.{name}": torch.zeros(5000) for name in "abcdef"}

    def save(
        self,
        step: int,
        may_commit: Callable[[], None] = lambda: None,
        tensors: dict[str, Tensor] | None = None,
    ) -> None:
        position = Position(attempt=0, step=step)
        state = replace(STATE, step=step)
        self.checkpointer.save(position, state, tensors or self.tensors, may_commit=may_commit)

    def ending(self) -> str:
        """How the last one has ended."""
        try:
            self.checkpointer.wait()
        except TrainError as error:
            return f"{type(error).__name__}: {error}"
        return "committed"

    def path(self, step: int) -> Path:
        return Position(attempt=0, step=step).path(self.run_dir)


@contextmanager
def full_disk(full: bool) -> Iterator[None]:
    """Let writes fail as they do on a full disk: halfway, with an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def everything(rank: int, root: Path) -> dict[str, object]:
    """All cases one after the other: starting ranks takes longer than they do."""
    found: dict[str, object] = {}
    one = Rank(rank, root / "shared")

    # The write cannot end before training continues, and it holds the state of its own step.
    gone_on = threading.Event()
    for number, tensor in enumerate(one.tensors.values()):
        tensor.fill_(number)

    def wait() -> None:
        gone_on.wait()

    one.save(1, may_commit=wait)
    for _ in range(20):
        for tensor in one.tensors.values():
            tensor += 1000.0
            dist.all_reduce(tensor)
    found["not yet"] = one.path(1).exists()
    dist.barrier()
    gone_on.set()
    # The second waits for the first, and takes its buffers.
    one.save(2)
    found["first is there"] = one.path(1).exists()
    found["second"] = one.ending()

    # One rank cannot write; the others could.
    with full_disk(rank == 2):
        one.save(3)
        found["full on 2"] = one.ending()
    # One rank cannot even copy.
    strange = {"model.a": torch.zeros(9, device="meta" if rank == 1 else "cpu")}
    mine = {f"model.{rank}": strange["model.a"]}
    one.save(4, tensors=mine)
    found["no copy on 1"] = one.ending()

    # The next call reports it, if there was no wait; then all is well again.
    def fenced() -> None:
        raise FencedError("a newer attempt is here")

    one.save(5, may_commit=fenced)
    try:
        one.save(6)
    except FencedError as error:
        found["fenced"] = str(error)
    one.save(7)
    found["at last"] = one.ending()

    # No directory in common: rank 0 writes for all.
    apart = Rank(rank, root / f"apart-{rank}")
    own = {f"model.{rank}": torch.full((5000,), float(rank)), "model.all": torch.ones(3)}
    apart.save(1, tensors=own)
    found["apart"] = apart.ending()
    with full_disk(rank == 0):
        apart.save(2, tensors=own)
        found["full on 0"] = apart.ending()
    apart.save(3, tensors=own)
    found["apart again"] = apart.ending()
    return found


def test_a_checkpoint_is_of_its_moment_and_its_failures_are_everybodys(tmp_path: Path) -> None:
    found = on_ranks(RANKS, everything, tmp_path)
    shared, apart = tmp_path / "shared", tmp_path / "apart-0"

    def failure(run_dir: Path, step: int, reason: str) -> str:
        path = Position(attempt=0, step=step).path(run_dir)
        return (
            f"CheckpointError: cannot write checkpoint {path}: {reason}; "
            "earlier checkpoints are untouched"
        )

    no_copy = str(found[0].pop("no copy on 1"))
    assert no_copy.startswith(failure(shared, 4, "rank 1: cannot copy the tensors: ")[:-40])
    assert [each.pop("no copy on 1") for each in found[1:]] == [no_copy] * 2
    # Of its own directory each rank speaks; the one that counts is rank 0's.
    assert (
        found
        == [
            {
                "not yet": False,
                "first is there": True,
                "second": "committed",
                "full on 2": failure(shared, 3, "rank 2: [Errno 27] File too large"),
                "fenced": "a newer attempt is here",
                "at last": "committed",
                "apart": "committed",
                "full on 0": failure(apart, 2, "rank 0: [Errno 27] File too large"),
                "apart again": "committed",
            }
        ]
        * RANKS
    )
    steps = sorted(path.name for path in (shared / "checkpoints/attempt-0").iterdir())
    assert steps == [f"step-{step:08d}" for step in (1, 2, 7)]
    before = whole(Position(attempt=0, step=1).path(shared))
    for number, name in enumerate("abcdef"):
        assert before[f"model.{name}"].eq(number).all()
    assert look(apart, attempt=0).best == Position(attempt=0, step=3)
    assert whole(Position(attempt=0, step=3).path(apart))["model.2"].eq(2.0).all()
    assert sorted(p.name for p in tmp_path.rglob("*.tmp")) == []


FLAGS = ("--task=chars", "--global-batch=12")


# Threads may take turns like this whenever they like; at the first checkpoint they must: that of
# rank 0 begins its exchange before the next step does, and that of rank 1 after that step.
TURNS = """
import os
import threading
import torch.distributed as dist
from torch.distributed import distributed_c10d
from train import __main__
from train.checkpoints.checkpointer import Checkpointer
from train.runtime.process_group import limit_waiting

begun, gone_on = threading.Event(), threading.Event()
broadcast, save, wait = distributed_c10d.broadcast, Checkpointer.save, Checkpointer.wait

def in_turn(*given, **options):
    if threading.current_thread().name != "checkpoint" or begun.is_set():
        return broadcast(*given, **options)
    if os.environ["RANK"] == "1":
        gone_on.wait()
    work = broadcast(*given, **options, async_op=True)
    begun.set()
    work.wait()

def saved(self, *what, **options):
    save(self, *what, **options)
    if os.environ["RANK"] == "0":
        begun.wait()
    if dist.new_group is one_group:
        # Who meets whom is settled now: time ends a wait that nothing else ends.
        limit_waiting(dist.group.WORLD, timeout_s=2)

def waited(self, **options):
    if self._thread is not None:
        gone_on.set()
    wait(self, **options)

def one_group(**options):
    return dist.group.WORLD

distributed_c10d.broadcast, Checkpointer.save, Checkpointer.wait = in_turn, saved, waited
"""


@pytest.mark.slow
def test_wrong_form_on_the_group_of_training_does_not_survive(start: Start, tmp_path: Path) -> None:
    """Collectives are matched by their order: two threads on one group meet each other's."""
    (tmp_path / "right.py").write_text(f"{TURNS}\n__main__.enter()\n")
    (tmp_path / "wrong.py").write_text(f"{TURNS}\ndist.new_group = one_group\n__main__.enter()\n")
    flags = (*FLAGS, "--steps=40", "--checkpoint-every=1")
    right = start.ranks(2, *flags, run_dir=tmp_path / "right", module=("right.py",)).finish()
    assert [e["step"] for e in right.events() if e["event"] == "checkpoint"] == list(range(1, 41))
    wrong = start.ranks(2, *flags, run_dir=tmp_path / "wrong", module=("wrong.py",))
    assert wrong.wait() != 0
    assert "at step 2 of 40" in wrong.output()
    assert [e for e in wrong.events() if e["event"] == "checkpoint"] == []


@pytest.mark.slow
def test_a_run_goes_on_without_a_checkpoint_if_that_is_asked_for(
    start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    start.single(*FLAGS, "--steps=2", run_dir=run_dir).finish()
    flags = (*FLAGS, "--steps=6", "--checkpoint-every=2", "--on-checkpoint-error=continue")
    script = 'ulimit -S -f 300; exec "$@"'
    argv = ["bash", "-c", script, "bash", "python", "-m", "train", *flags]
    argv[4] = str(Path(torch.__file__).parents[4] / "bin/python")
    # It goes on to the end, but is not done: no later checkpoint makes up for the last one.
    run = start.command(argv, run_dir, 0, {}).finish(1)
    assert run.outcome()["status"] == "fatal"
    assert sorted(run.losses()) == [1, 2, 3, 4, 5, 6]
    failed = [e for e in run.events() if e["event"] == "checkpoint_failed"]
    assert [e["step"] for e in failed] == [4]
    assert all("File too large" in e["reason"] for e in failed)
    assert look(run_dir, attempt=0).best == Position(attempt=0, step=2)


def test_a_failure_that_a_rank_has_recorded_outlives_a_checkpoint(tmp_path: Path) -> None:
    """It may be committed after that, by a thread of rank 0 that knows nothing of it."""
    directory = RunDirectory(tmp_path, RankInfo())
    progress = TrainingProgress(steps=9, step=3)
    running = progress.outcome(RankInfo(), "running", "training")
    assert directory.advance(running)
    fatal = progress.outcome(RankInfo(), "fatal", "sample 17 is odd", rank=1)
    assert directory.write_outcome(fatal)
    assert directory.advance(replace(running, step=6))
    assert directory.read_outcome() == fatal
    # Any later try, of the scheduler's or of torchrun's, has taken over.
    later = progress.outcome(RankInfo(restart=1), "running", "starting")
    assert directory.write_outcome(later)
    assert not directory.advance(replace(running, step=9))
    assert directory.read_outcome() == later
