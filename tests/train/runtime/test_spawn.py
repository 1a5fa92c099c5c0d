"""`--spawn N`: the ranks without torchrun, with the same ends, and none left behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from train.cli.compatibility import problems
from train.cli.config import Config
from train.runtime.rank import RankInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.train.conftest import Running, Start

PATIENCE_S = 300.0
FLAGS = ("--task=chars", "--global-batch=12", "--checkpoint-every=0")
ENDLESS = (*FLAGS, "--steps=100000")


def children(pid: int) -> list[int]:
    """The ranks that a process has started, in the order of their numbers."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return sorted(found)


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Spawned:
    """Starts runs whose ranks are children of theirs, and knows all of these."""

    def __init__(self, start: Start, home: Path) -> None:
        self.start, self.run_dir, self.temporary = start, home / "run", home / "temporary"
        self.temporary.mkdir()
        self.ranks: list[int] = []

    def run(self, count: int, *flags: str) -> Running:
        """Start a run, without waiting for its ranks."""
        spawn = f"--spawn={count}"
        return self.start.single(*flags, spawn, run_dir=self.run_dir, TMPDIR=str(self.temporary))

    def to_step(self, step: int, count: int, *flags: str) -> Running:
        """Start a run, and wait until its ranks have made some steps."""
        run = self.run(count, *flags)
        run.wait_for_step(step)
        self.ranks = children(run.process.pid)
        assert len(self.ranks) == count
        return run

    def nothing_is_left(self) -> bool:
        # torch leaves a folder of its compiler there.
        return not any(map(alive, self.ranks)) and not list(self.temporary.glob("train-*"))


@pytest.fixture
def spawned(start: Start, tmp_path: Path) -> Iterator[Spawned]:
    made = Spawned(start, tmp_path)
    yield made
    for pid in filter(alive, made.ranks):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_stop_is_passed_on_and_the_run_goes_on_later(spawned: Spawned) -> None:
    run = spawned.to_step(3, 3, *ENDLESS)
    # To the parent alone, as a scheduler may.
    run.process.send_signal(signal.SIGUSR1)
    run.finish(75)
    outcome = run.outcome()
    assert (outcome["status"], outcome["reason"]) == ("preempted", "stopped by SIGUSR1")
    (asked,) = [event for event in run.events() if event["event"] == "stop_requested"]
    # The ranks agree after the step in which the first of them has heard of it.
    assert asked["step"] == outcome["step"]
    assert 1 <= asked["ranks_signalled"] <= 3
    assert spawned.nothing_is_left()
    end = outcome["step"] + 2
    again = spawned.run(2, *FLAGS, f"--steps={end}").finish()
    assert again.outcome()["status"] == "done"
    assert max(again.losses()) == end
    starts = [event["world_size"] for event in again.events() if event["event"] == "start"]
    assert starts == [3, 2]
    assert spawned.nothing_is_left()


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_makes_the_run_retryable(spawned: Spawned) -> None:
    run = spawned.to_step(3, 3, *ENDLESS)
    os.kill(spawned.ranks[1], signal.SIGKILL)
    assert run.wait() == 1
    assert run.outcome()["status"] == "retryable"
    said = "train: rank 1 was ended by signal SIGKILL, perhaps by the kernel (out of memory)"
    assert [line for line in run.output().splitlines() if "was ended by" in line] == [said]
    assert spawned.nothing_is_left()


@pytest.mark.slow
def test_ranks_whose_parent_was_killed_stop_by_themselves(spawned: Spawned) -> None:
    run = spawned.to_step(3, 2, *ENDLESS)
    run.process.kill()
    run.wait()
    deadline = time.monotonic() + PATIENCE_S
    while any(map(alive, spawned.ranks)):
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.01)
    assert run.outcome()["status"] == "preempted"


@pytest.mark.slow
def test_a_stop_before_the_ranks_can_listen_waits_for_them(spawned: Spawned) -> None:
    spawned.run_dir.mkdir()
    run = spawned.run(2, *ENDLESS)
    run.wait_until(lambda: len(children(run.process.pid)) == 2)
    spawned.ranks = children(run.process.pid)
    run.process.send_signal(signal.SIGINT)
    run.finish(75)
    assert run.outcome()["status"] == "preempted"
    assert "Traceback" not in run.output()
    assert spawned.nothing_is_left()


@pytest.mark.slow
def test_what_the_user_must_mend_is_said_once_and_is_the_exit_status(
    spawned: Spawned, tmp_path: Path
) -> None:
    spawned.run_dir.mkdir()
    (tmp_path / "mine.py").write_text("from train.tasks import Task\nclass Mine(Task):\n    pass\n")
    run = spawned.run(2, "--task=mine.py:Mine").finish(2)
    assert run.output().count("class Mine lacks ") == 1
    assert run.outcome()["status"] == "fatal"
    assert spawned.nothing_is_left()


def test_ranks_are_numbered_as_a_launcher_would() -> None:
    rank_info = RankInfo(attempt=3).of_spawned(1, 2, "file:///tmp/x")
    assert rank_info == RankInfo(
        rank=1,
        world_size=2,
        local_rank=1,
        local_world_size=2,
        attempt=3,
        launched=True,
        meeting="file:///tmp/x",
    )
    assert problems(Config(spawn=2, run_dir=Path("x")), rank_info) == []
