"""One answer of Slurm for all processes: few queries, and no stale answers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import toolkit
from tests.support.asked_slurm import JOBS, Slurm, User, counted, fake_squeue, job_row, shown
from toolkit.runs.records.registry import RunRecord
from toolkit.slurm import SlurmLauncher
from toolkit.slurm.login.host import LoginNode
from toolkit.slurm.run import SlurmRun
from toolkit.slurm.snapshot import SnapshotCache, snapshot_file

BUSY = "slurm_load_jobs error: Socket timed out on send/recv operation"


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(slurm: Slurm, tmp_path: Path, clock: Clock) -> Callable[[], SnapshotCache]:
    """Open the shared answers as another process does."""
    return lambda: SnapshotCache(slurm, file=tmp_path / "queues/c.json", clock=clock)


def test_the_name_of_the_cluster_is_asked_once_an_hour(
    slurm: Slurm, clock: Clock, tmp_path: Path
) -> None:
    """Each submission needs it for the run's URI."""

    def cluster() -> str:
        launcher = SlurmLauncher(toolkit.SlurmProfile(name="s"), command=slurm)
        file = tmp_path / "c.json"
        launcher._login.snapshots = SnapshotCache(slurm, file=file, clock=clock)
        return launcher._cluster()

    assert [cluster(), cluster()] == ["c", "c"]
    assert slurm.calls("scontrol") == 1
    clock.now += 3601
    slurm.cluster = "d"
    assert cluster() == "d"
    assert slurm.calls("scontrol") == 2


def test_places_in_the_queue_are_asked_once_a_minute(
    queue: Callable[[], SnapshotCache], slurm: Slurm, clock: Clock
) -> None:
    slurm.rows = job_row(7, "PENDING", reason="Priority") + job_row(8, "RUNNING")
    place_row = "row|==|{}|==|{}|==|gpu|==|{}|==|\n".format
    slurm.others = place_row(6, 20, "Resources") + place_row(7, 10, "Priority")

    def place(number: int = 0) -> str:
        snapshot = queue().look()
        return str(snapshot.place(snapshot.rows(f"{7 + number}", "")[0]))

    def questions() -> int:
        return sum("PENDING" in argv for argv in slurm.asked)

    assert (place(1), questions()) == ("None", 0)  # nothing waits for its turn
    assert place() == "queue position 2 of 2 in partition gpu"
    slurm.others = place_row(7, 10, "Resources")
    clock.now += 59
    assert (place(), questions()) == ("queue position 2 of 2 in partition gpu", 1)
    clock.now += 1
    assert (place(), questions()) == ("queue position 1 of 1 in partition gpu", 2)
    clock.now -= 30  # a clock that was set back
    assert (place(), questions()) == ("queue position 1 of 1 in partition gpu", 3)


def test_a_status_is_whole_without_a_place(slurm: Slurm, tmp_path: Path, clock: Clock) -> None:
    def squeue(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        if "PENDING" in argv:
            return subprocess.CompletedProcess(argv, 1, "", "slurm_load_jobs error: no\n")
        return slurm(argv)

    slurm.rows = job_row(7, "PENDING", reason="Priority")
    cache = SnapshotCache(squeue, file=tmp_path / "c.json", clock=clock)
    snapshot = cache.look()
    assert snapshot.place(snapshot.rows("7", "")[0]) is None


def test_an_answer_is_shared_for_seconds_and_never_stale(
    queue: Callable[[], SnapshotCache], slurm: Slurm, clock: Clock, tmp_path: Path
) -> None:
    def asked(*, max_age_s: float, changed: float = 0.0) -> bool:
        before = slurm.calls("squeue")
        queue().look(max_age_s=max_age_s, changed=changed)
        return slurm.calls("squeue") > before

    assert asked(max_age_s=3)
    clock.now += 2
    assert not asked(max_age_s=3)
    assert asked(max_age_s=1)  # a caller that needs a newer one
    assert asked(max_age_s=3, changed=clock.now + 0.1)  # whose run has changed since
    queue().forget()  # something was submitted again, or cancelled
    assert asked(max_age_s=3)
    clock.now += 4
    assert asked(max_age_s=3)
    (tmp_path / "queues/c.json").write_text('{"version": 1, "asked": 99')  # torn
    assert asked(max_age_s=3)
    clock.now -= 3600  # a clock that was set back must not make it last
    assert asked(max_age_s=3)


def test_a_run_that_has_changed_is_never_told_from_an_older_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = fake_squeue(tmp_path)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    user = User(tmp_path / "runs", Slurm())
    launcher = SlurmLauncher(user.profile)
    run = launcher.open(user.record("a", 1))
    assert run.run_dir is not None
    (commands / "rows").write_text(user.line("a", 1, "PENDING"))
    assert run.status().state is toolkit.RunState.PENDING
    (commands / "rows").write_text(user.line("a", 1, "RUNNING"))
    (run.run_dir / "logs/attempt-0").mkdir()  # it has begun
    assert launcher.open(run.record).status().state is toolkit.RunState.RUNNING
    run.cancel()
    (commands / "rows").write_text(user.line("a", 1, "CANCELLED"))
    assert shown(toolkit.statuses([launcher.open(run.record)])) == ["CANCELLED"]


def test_a_busy_controller_is_left_alone_ever_longer(
    queue: Callable[[], SnapshotCache], slurm: Slurm, clock: Clock
) -> None:
    slurm.rows = job_row(1, "RUNNING")
    queue().look()
    slurm.error, began = BUSY, clock.now
    times = []
    while clock.now < began + 200:
        clock.now += 1
        before = slurm.calls("squeue")
        try:
            seen = queue().look(max_age_s=0.5)
        except toolkit.LauncherError as error:
            assert "the controller is busy (slurm_load_jobs error: Socket timed out" in str(error)
        else:
            assert clock.now <= began + 120, "nobody is told what is minutes old"
            assert seen.note.startswith("as of ")
            assert seen.rows("1", "")
        if slurm.calls("squeue") > before:
            times.append(clock.now - began)
    assert times == [1, 3, 7, 15, 31, 63, 123, 183]
    with pytest.raises(toolkit.LauncherError):
        queue().look(patient=False)
    slurm.error = ""
    assert not queue().look(patient=False).note  # actions send a query immediately
    assert not queue().look(max_age_s=0.5).note


def test_while_the_controller_is_busy_runs_are_told_with_the_time(
    tmp_path: Path, slurm: Slurm, clock: Clock
) -> None:
    user = User(tmp_path / "runs", slurm)
    login = LoginNode(user.profile, slurm)
    login.snapshots = SnapshotCache(slurm, file=tmp_path / "c.json", clock=clock)
    run = SlurmRun(user.record("a", 1), login)
    assert run.run_dir is not None
    for path in (run.run_dir, run.run_dir / "logs", run.run_dir / "jobs.jsonl"):
        os.utime(path, (0, 0))
    slurm.rows = user.line("a", 1, "RUNNING")
    assert run.status().reason == ""
    slurm.error = BUSY
    clock.now += 5
    for status in (run.status(), run.status()):
        assert status.state is toolkit.RunState.RUNNING
        assert status.reason.startswith("as of ")
        assert "the controller is busy" in status.reason


def test_shells_that_ask_at_once_make_one_question(tmp_path: Path) -> None:
    commands = fake_squeue(tmp_path, seconds=1.0)
    environ = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    code = (
        "import sys; from toolkit.slurm.snapshot import SnapshotCache, snapshot_file\n"
        "from toolkit.slurm.commands import run_command\n"
        "queue = SnapshotCache(run_command, file=snapshot_file())\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(len(queue.look(max_age_s=60).rows('1', '')), flush=True)"
    )
    shells = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environ,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(6)
    ]
    for shell in shells:
        assert shell.stdout is not None and shell.stdout.readline() == "ready\n"
    for shell in shells:
        assert shell.stdin is not None
        shell.stdin.write("go\n")
        shell.stdin.flush()
    said = [shell.communicate()[0] for shell in shells]
    assert said == ["1\n"] * 6
    assert counted(tmp_path) == 1
    assert json.loads(snapshot_file(environ).read_bytes())["asked"] > 0


def test_a_state_folder_that_cannot_be_written_only_costs_questions(slurm: Slurm) -> None:
    queue = SnapshotCache(slurm, file=Path("/proc/nowhere/c.json"))
    queue.look(max_age_s=60)
    queue.look(max_age_s=60)
    assert slurm.calls("squeue") == 2


def test_what_people_set_for_their_own_listings_hides_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = fake_squeue(tmp_path)
    (commands / "squeue").write_text('#!/bin/sh\n[ -z "$SQUEUE_PARTITION" ] && cat $0.rows\n')
    (commands / "squeue.rows").write_bytes(
        (JOBS + job_row(1, "RUNNING", command="caf\xe9")).encode("latin-1")
    )
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_PARTITION", "gpu")
    run = toolkit.SlurmProfile(name="s")
    record = RunRecord(uri="slurm://c/1", name="n", job="j", profile={}, created=0.0)
    assert SlurmLauncher(run).open(record).status().state is toolkit.RunState.RUNNING
