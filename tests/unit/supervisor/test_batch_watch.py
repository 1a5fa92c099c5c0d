"""Looks at a step that runs: what stops it, what is told again, and what a look costs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.ending_batch import Job, RunningStep
from toolkit.supervisor.batch import Batch
from toolkit.supervisor.batch_watch import HUNG_S, LOOK_TICKS, Watch


class Step(RunningStep):
    """A step whose srun notes what it gets."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.killed = False

    def send_signal(self, number: int) -> None:
        self.got.append(number)

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


class Running:
    """A step of two nodes, and its watch."""

    def __init__(self, job: Job, batch: Batch) -> None:
        self.job, self.batch, self.step = job, batch, Step()
        batch.srun = cast(Any, self.step)
        self.folder = job.folder(0)
        (self.folder / "since").write_text("0\n")
        for number in range(len(batch.nodes.names)):
            (self.folder / f"began-{number}").write_text("3\n")
        self.watch = Watch(batch)
        self.now_s = 0.0

    def seconds(self, count: int) -> None:
        for _ in range(count):
            self.now_s += 1
            self.watch.tick(self.now_s)

    def looks(self, count: int) -> None:
        self.seconds(count * LOOK_TICKS)

    @property
    def stopping(self) -> str:
        path = self.folder / "stopping"
        return path.read_text().strip() if path.exists() else ""


@pytest.fixture
def running(job: Job) -> Iterator[Running]:
    with job.batch() as batch:
        yield Running(job, batch)


@pytest.mark.parametrize(("statuses", "status"), [(("0", "7"), 7), (("0", "0"), 0)])
def test_srun_is_ended_that_hangs_when_all_nodes_have_ended(
    running: Running, statuses: tuple[str, str], status: int
) -> None:
    """As srun does if a node's slurmstepd was killed; the nodes' own statuses count then."""
    for number, text in enumerate(statuses):
        (running.folder / f"ended-{number}").write_text(text + "\n")
    running.looks(1)
    assert not running.step.killed
    running.seconds(HUNG_S + 1)
    assert running.step.killed
    assert (running.folder / "hung").exists()
    assert running.batch.status_of_srun(137) == status


def test_the_other_nodes_are_ended_if_srun_does_not_because_slurmctld_is_away(
    running: Running,
) -> None:
    (running.folder / "failed-1").write_text("100.5\tn2\t137\n")
    running.looks(5)
    assert running.job.asked == []
    running.looks(2)
    assert running.job.asked == ["scancel 7.3"]
    running.looks(17)
    running.seconds(HUNG_S + 1)
    assert running.job.asked == ["scancel 7.3"] * 4
    assert running.step.killed


def test_a_node_that_has_lost_the_signal_of_the_step_is_told_again(running: Running) -> None:
    """It came before the node's task had begun, whose torchrun then waits for the others."""
    (running.folder / "ended-1").write_text("143\n")
    (running.folder / "stopped-1").write_text("143\n")
    looks = (60 + 14) // LOOK_TICKS
    running.looks(looks - 1)
    assert running.job.asked == []
    running.looks(1)
    assert running.job.asked == ["scancel --signal=TERM 7.3"]
    running.looks(2 * looks)
    running.seconds(HUNG_S + 1)
    assert running.step.killed, "a torchrun that does not end"


def test_a_stop_is_told_again_and_srun_gets_it_where_scancel_fails(running: Running) -> None:
    running.job.cluster.refused_commands = ("scancel",)
    running.batch.stop_step("walltime")
    running.looks(14)
    assert [running.stopping, len(running.step.got)] == ["walltime", 2]


def test_a_node_that_has_restarted_within_slurmdtimeout_is_noticed(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    running.job.cluster.slurmd_began = "2026-11-28T12:00:00"  # 1795867200
    for number, sign in enumerate((1795867300, 1795867100)):
        (running.folder / f"alive-{number}").write_text(f"{sign}\n")
    running.looks(5)
    assert running.stopping == ""
    running.looks(1)
    assert running.stopping == "node_restarted"
    assert (running.folder / "restarted").read_text() == "n2\n"
    assert (running.folder / "ended-1").read_text() == "1\n", "srun waits for it"
    running.batch.marks.look()
    assert running.batch.conclude(1) == 1
    assert running.job.reason == "node_failure: n2 has restarted; queued again"


class Gone:
    """The nodes of an elastic job, of which one does not answer."""

    def __init__(self) -> None:
        self.without: list[tuple[str, float]] = []

    def is_unreachable(self, node: str) -> bool:
        return node == "n2"

    def look(self, *_: object) -> None:
        """Count no nodes."""

    def go_on_without(self, node: str, silent_s: float) -> None:
        self.without.append((node, silent_s))


@pytest.mark.parametrize("stopping", [False, True])
def test_ranks_do_not_wait_for_a_node_that_is_gone_unless_they_stop(
    running: Running, stopping: bool
) -> None:
    """Ranks that stop may be writing their checkpoint."""
    gone = Gone()
    running.batch.members = cast(Any, gone)
    running.watch = Watch(running.batch)
    for number in (0, 1):
        (running.folder / f"alive-{number}").write_text("1795867100\n")
    if stopping:
        running.batch.stop_step("cancelled")
    running.looks(6)
    assert gone.without == ([] if stopping else [("n2", 30.0)])
    assert (running.folder / "ended-1").exists()
    running.looks(6)
    assert len(gone.without) == (not stopping), "once"


@pytest.mark.parametrize("answer", ["", "Unknown", "2026-11-28"])
def test_a_node_of_which_slurm_knows_nothing_has_not_restarted(
    running: Running, answer: str
) -> None:
    running.job.cluster.slurmd_began = answer
    (running.folder / "alive-0").write_text("1795867100\n")
    running.looks(13)
    assert running.stopping == ""


def test_out_of_memory_stops_a_torchrun_that_would_start_the_ranks_again(running: Running) -> None:
    (running.folder / "oom-1").write_text("n2 (rank 1 had used 9 MiB)\n")
    running.looks(1)
    assert running.stopping == "out_of_memory"
    assert running.batch.conclude(1) == 1
    assert running.job.reason == (
        "fatal: out of memory: the kernel killed a process on n2 (rank 1 had used 9 MiB); "
        "not queued again"
    )


def fail_twice(running: Running) -> None:
    for start in (0, 1):
        folder = running.folder / f"node-0/7_x/attempt_{start}/0"
        folder.mkdir(parents=True)
        (folder / "error.json").write_text('{"message": {"message": "ValueError: bad"}}')
    (running.folder / "node-0/7_x/attempt_2").mkdir()


def test_a_failure_that_comes_twice_stops_torchrun_before_a_third_start(running: Running) -> None:
    with running.job.log.open("a") as log:
        log.write("E1128 failed (exitcode: 1) local_rank: 0 (pid: 5) of binary: python\n")
    running.looks(1)
    assert running.stopping == ""
    fail_twice(running)
    running.looks(1)
    assert running.stopping == "repeated"
    assert running.batch.conclude(1) == 1
    assert running.job.reason.startswith("fatal: the same failure twice: ValueError: bad; another")


def test_a_repetition_is_noticed_though_torchrun_logs_nothing(running: Running) -> None:
    fail_twice(running)
    running.looks(12)
    assert running.stopping == "repeated"


def test_a_step_without_its_run_directory_is_stopped_for_good(running: Running) -> None:
    running.batch.marks.look()
    assert running.batch.marks.step() == "3"
    for path in running.folder.iterdir():
        path.unlink()
    running.seconds(1)
    assert running.job.asked == ["scancel --signal=TERM 7.3"]
    running.seconds(61)
    assert len(running.job.asked) == 6
    assert running.step.killed


def test_a_run_directory_that_is_out_of_reach_for_a_moment_is_not_removed(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handle that the file server has forgotten says so; a removed file does not exist."""

    def stale(path: str) -> os.stat_result:
        raise OSError(116, "Stale file handle", path)

    monkeypatch.setattr("toolkit.supervisor.batch_evidence.os.stat", stale)
    assert not running.batch.is_removed()


def test_a_look_at_1000_nodes_lists_one_folder_and_reads_few_files(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each opening is one at the file server, for all jobs of a cluster."""
    folder = job.folder(0)
    (folder / "nodes").write_text("".join(f"n{number}\n" for number in range(1000)))
    with job.batch() as batch:
        running = Running(job, batch)
        for number in range(1000):
            (folder / f"alive-{number}").write_text("1795867100\n")
            for rank in range(8):
                (folder / f"node-{number}/7_x/attempt_0/{rank}").mkdir(parents=True)
        seen: dict[str, int] = {}
        for name in ("open", "scandir", "listdir", "stat", "lstat"):
            used = getattr(os, name)

            def counted(*args: Any, _name: str = name, _used: Any = used, **more: Any) -> Any:
                seen[_name] = seen.get(_name, 0) + 1
                return _used(*args, **more)

            monkeypatch.setattr(os, name, counted)
        running.looks(10)
        monkeypatch.undo()
    assert seen["scandir"] == 10
    assert seen["open"] <= 10 * 65, "signs of life in turn, and the log"
    assert seen["stat"] <= 10 * (LOOK_TICKS + 1)
    assert seen.get("listdir", 0) + seen.get("lstat", 0) == 0
