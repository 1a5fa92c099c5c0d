"""Asking Slurm: once for all runs, not too often, and never misread. By recorded answers."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import TOOLKIT
from toolkit import summaries
from toolkit.launchers import registry
from toolkit.launchers.local import LocalRun
from toolkit.launchers.registry import RunRecord
from toolkit.launchers.slurm import SlurmLauncher
from toolkit.launchers.slurm.cache import Queue, place_of_answers
from toolkit.launchers.slurm.jobs import SlurmJob, write_jobs, write_points
from toolkit.launchers.slurm.queue import Row, ask_jobs, ask_mine, judge
from toolkit.launchers.slurm.reasons import expected, in_words
from toolkit.launchers.slurm.run import SlurmRun
from toolkit.sweeps import Point

Answer = subprocess.CompletedProcess[str]
BUSY = "slurm_load_jobs error: Socket timed out on send/recv operation"
NO_ACCOUNTING = "Slurm accounting storage is disabled"


class Slurm:
    """Answers as a cluster does, and remembers what it was asked."""

    def __init__(self, rows: str = "", *, cluster: str = "c") -> None:
        self.rows = rows
        self.others = ""
        self.error = ""
        self.cluster = cluster
        self.accounting: str | None = None
        self.accounting_error = ""
        self.asked: list[Sequence[str]] = []

    def __call__(self, argv: Sequence[str]) -> Answer:
        self.asked.append(list(argv))
        match argv[0]:
            case "squeue":
                text = self.rows if "--me" in argv else self.others
                return Answer(argv, 1 if self.error else 0, text, self.error)
            case "scontrol":
                return Answer(argv, 0, f"ClusterName             = {self.cluster}\n", "")
            case "sacct":
                error = self.accounting_error or ("" if self.accounting else NO_ACCOUNTING)
                return Answer(argv, 1 if error else 0, self.accounting or "", error)
        return Answer(argv, 0, "", "")

    def calls(self, program: str) -> int:
        return sum(argv[0] == program for argv in self.asked)


class User:
    """Somebody with run directories, and a launcher to open them with."""

    def __init__(self, folder: Path, slurm: Slurm) -> None:
        self.folder = folder
        self.profile = toolkit.SlurmProfile(name="s")
        self.slurm = slurm
        self.launcher = SlurmLauncher(self.profile, command=slurm)

    def record(self, name: str, job_id: int, *, points: int = 0, created: float = 0.0) -> RunRecord:
        run_dir = self.folder / name
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        write_jobs(run_dir, [SlurmJob(job_id=str(job_id))])
        if points:
            made = [
                Point(index=i, name=f"p{i}", settings={}, args=(), env={}) for i in range(points)
            ]
            write_points(run_dir, made)
        return RunRecord(
            uri=f"slurm://c/{job_id}",
            name=name,
            job="job",
            profile=self.profile.model_dump(mode="json"),
            created=created,
            run_dir=run_dir,
        )

    def run(self, name: str, job_id: int, **more: Any) -> SlurmRun:
        return self.launcher.open(self.record(name, job_id, **more))

    def line(self, name: str, job_id: object, word: str, more: str = "", **fields: str) -> str:
        command = f"{self.folder}/{name}/job.sbatch {self.folder}/{name}{more}"
        start, reason = fields.get("start", "N/A"), fields.get("reason", "None")
        return f"==job|{job_id}|{word}|{start}|{reason}|{command}\n"


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


@pytest.fixture
def user(tmp_path: Path, slurm: Slurm) -> User:
    return User(tmp_path / "runs", slurm)


def left_behind(run: toolkit.Run, status: str, *, reason: str = "") -> None:
    assert run.run_dir is not None
    (run.run_dir / "logs/attempt-0").mkdir(parents=True)
    said = {"status": status, "attempt": 0, "reason": reason}
    (run.run_dir / "outcome.json").write_text(json.dumps(said))


def shown(found: Sequence[toolkit.RunStatus]) -> list[str]:
    return [status.state.upper() for status in found]


# ---- One question


def test_one_question_tells_where_all_runs_and_points_stand(user: User, slurm: Slurm) -> None:
    runs = [user.run("a", 1), user.run("b", 2), user.run("s", 3, points=2), user.run("d", 4)]
    left_behind(runs[3], "done")  # Slurm has forgotten it
    slurm.rows = (
        user.line("b", 2, "RUNNING")
        + user.line("s", "3_1", "RUNNING")
        + user.line("a", 1, "PENDING", reason="Priority")
        + user.line("s", "3_0", "COMPLETED")
    )
    found = toolkit.statuses(runs)
    assert shown(found) == ["PENDING", "RUNNING", "RUNNING", "SUCCEEDED"]
    assert [argv[0] for argv in slurm.asked] == ["squeue"]
    assert found[2].reason == "1 RUNNING, 1 SUCCEEDED"
    assert found[0].reason == "Priority: others come first"


def test_the_runs_of_all_profiles_of_a_cluster_are_asked_about_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_squeue(tmp_path)
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    for number, partition in enumerate(("one", "two")):
        made = toolkit.SlurmProfile(name=partition, partition=partition)
        uri = f"slurm://c/{number + 1}"
        registry.remember(uri=uri, name=partition, job=partition, profile=made)
    assert shown(toolkit.statuses(toolkit.list_runs())) == ["RUNNING", "RUNNING"]
    assert counted(tmp_path) == 1
    assert [run.name for run in toolkit.list_runs(job="two")] == ["two"]
    assert [run.name for run in toolkit.list_runs(last=1)] == ["two"]


def test_places_that_are_away_hide_no_others(user: User, slurm: Slurm, tmp_path: Path) -> None:
    class Away(toolkit.Run):
        place = "a cluster without power"

        def status(self) -> toolkit.RunStatus:
            raise toolkit.LauncherError("the API server refuses")

        def cancel(self) -> None: ...

        def _lines(self, *_: object) -> Any: ...

    local = RunRecord(
        uri="local://x", name="x", job="x", profile={}, created=0.0, run_dir=tmp_path / "gone"
    )
    runs = [LocalRun(local), user.run("a", 1), Away(local), LocalRun(local)]
    slurm.error = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    found = toolkit.statuses(runs)
    assert shown(found) == ["UNKNOWN"] * 4
    assert [status.reason for status in found] == [
        f"{tmp_path / 'gone'} is gone",
        slurm.error,
        "the API server refuses",
        f"{tmp_path / 'gone'} is gone",
    ]


def test_ten_thousand_ids_fit_into_the_arguments(slurm: Slurm) -> None:
    ids = [str(60_000_000 + number) for number in range(20_000)]
    ask_jobs(slurm, ids)
    words = [argv[argv.index("-j") + 1] for argv in slurm.asked]
    assert ",".join(words).split(",") == ids
    assert max(map(len, words)) < 128 * 1024


# ---- What squeue prints

SLURM_22_05 = """\
==job|55305190|RUNNING|2026-11-21T23:53:13|None|/r/x.sbatch a b c|d e
9|RUNNING|N/A|None|x
==job|55305191_1|PENDING|N/A|None|/my runs/x.sbatch /my runs continue
==job|55305192|CANCELLED|2026-11-21T23:53:11|BeginTime|/r/x.sbatch
==job|55305193|COMPLETING|2026-11-21T23:53:11|None|(null)
"""
SLURM_24_11 = """\
==job|55306609|PENDING|2026-11-22T00:19:00|Priority|/tmp/y.sbatch
==job|55306607|RUNNING|2026-11-22T00:16:48|None|/tmp/y.sbatch
"""
"""Recorded on real clusters; from 24.11 on the command is shown without its arguments."""


def test_arguments_with_bars_and_newlines_make_up_no_job(slurm: Slurm) -> None:
    slurm.rows = SLURM_22_05
    rows = ask_mine(slurm)
    assert [row.job_id for row in rows] == ["55305190", "55305191_1", "55305192", "55305193"]
    assert rows[0].command == "/r/x.sbatch a b c|d e\n9|RUNNING|N/A|None|x"
    assert [row.script for row in rows[:2]] == ["/r/x.sbatch", "/my runs/x.sbatch"]
    assert [row.goes_on for row in rows] == [False, True, True, True]
    assert rows[1].start == rows[1].reason == ""


def test_the_answer_of_24_11_is_read_alike(slurm: Slurm) -> None:
    slurm.rows = SLURM_24_11
    waiting, running = ask_mine(slurm)
    assert (waiting.word, waiting.start, waiting.reason) == (
        "PENDING",
        "2026-11-22T00:19:00",
        "Priority",
    )
    assert running.state is toolkit.RunState.RUNNING
    assert running.goes_on


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("2026-11-05T14:05:00", "expected to start 14:05"),
        ("2026-11-06T09:00:00", "expected to start Nov 6 09:00"),
        ("2026-11-05T12:00:00", ""),  # over
        ("", ""),
        ("Today 14:05", ""),  # SLURM_TIME_FORMAT=relative
    ],
)
def test_the_expected_start_is_told_as_people_do(start: str, said: str) -> None:
    assert expected(start, now=datetime(2026, 11, 5, 13, 0)) == said


def test_what_a_job_waits_for_is_told_in_words() -> None:
    row = Row(job_id="1", word="PENDING", reason="Resources", command="", start="2999-01-02T03:04")
    status = judge(row, None)
    assert (
        status.reason == "Resources: waits for nodes to become free; expected to start Jan 2 03:04"
    )
    assert status.expected_start == "2999-01-02T03:04"
    assert in_words("ReqNodeNotAvail, UnavailableNodes:node7").endswith("down, drained or reserved")
    assert in_words("QOSMaxCpuPerUserLimit").endswith("a limit of the QOS is reached")
    assert in_words("Nodes required for job are DOWN") == "Nodes required for job are DOWN"


def test_a_run_continued_by_hand_is_seen(user: User, slurm: Slurm) -> None:
    run = user.run("a", 1)
    left_behind(run, "fatal", reason="boom")
    assert run.status().state is toolkit.RunState.FAILED
    slurm.rows = user.line("a", 9, "RUNNING", " continue")
    assert run.status().state is toolkit.RunState.RUNNING
    run.cancel()
    assert slurm.asked[-1] == ["scancel", "--batch", "--signal=USR2", "9"]
    # A second start without that word refuses by itself, and says nothing of the run.
    slurm.rows = user.line("a", 9, "FAILED")
    assert "boom" in run.status().reason


def test_a_script_that_was_killed_before_it_knew_why_says_less_than_slurm(
    user: User, slurm: Slurm
) -> None:
    run = user.run("a", 1)
    assert run.run_dir is not None
    attempt = run.run_dir / "logs/attempt-1"
    attempt.mkdir()
    (attempt / "reason").write_text("terminated: by Slurm; killed soon after\n")
    (attempt / "exit_status").write_text("143\n")
    slurm.rows = user.line("a", 1, "FAILED") + user.line("a", 9, "CANCELLED", " continue")
    assert run.status().state is toolkit.RunState.CANCELLED


def test_an_id_that_is_used_again_is_not_this_run(user: User, slurm: Slurm) -> None:
    run = user.run("a", 1)
    left_behind(run, "done")
    slurm.rows = user.line("other", 1, "RUNNING")
    assert run.status().state is toolkit.RunState.SUCCEEDED


# ---- Who answers


def test_another_cluster_is_told_and_not_misread(user: User, slurm: Slurm) -> None:
    slurm.cluster = "elsewhere"
    going, ended, gone = user.run("a", 1), user.run("b", 2), user.run("d", 3)
    left_behind(going, "running")
    left_behind(ended, "done")
    shutil.rmtree(user.folder / "d")
    found = toolkit.statuses([going, ended, gone])
    assert shown(found) == ["UNKNOWN", "SUCCEEDED", "UNKNOWN"]
    assert found[0].reason.startswith("it is of cluster 'c', and the Slurm that answers here is")
    assert not found[0].lost
    with pytest.raises(toolkit.LauncherError, match="cannot be cancelled: it is of cluster 'c'"):
        going.cancel()
    assert slurm.calls("scontrol") == 1


def test_the_jobs_of_another_user_are_asked_for_by_id(
    user: User, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [user.run("a", 1), user.run("b", 2)]
    left_behind(runs[0], "running")
    slurm.others = user.line("a", 1, "RUNNING") + user.line("b", 2, "PENDING")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert shown(toolkit.statuses(runs)) == ["RUNNING", "PENDING"]
    assert slurm.asked[-1][6:8] == ["-j", "1,2"]


# ---- Accounting


def test_one_question_to_the_accounting_tells_what_is_lost(user: User, slurm: Slurm) -> None:
    names = ("late", "killed", "masked", "unknown", "swept")
    runs = [user.run(name, i, points=2 * (name == "swept")) for i, name in enumerate(names, 1)]
    (user.folder / "killed/logs/attempt-0").mkdir()
    line = "{}|{}|{}|/usr/bin/sbatch --parsable {}/{}/job.sbatch"
    slurm.accounting = "\n".join(
        [
            line.format(1, "RUNNING", "0:0", user.folder, "late"),
            line.format(2, "CANCELLED by 0", "0:15", user.folder, "killed"),
            line.format(3, "FAILED", "0:0", user.folder, "masked") + " a|b",
            "9|FAILED|0:0|the second line of an argument",
            line.format(4, "FAILED", "1:0", user.folder, "another-of-this-id"),
            line.format("5_0", "COMPLETED", "0:0", user.folder, "swept"),
            line.format("5_[1]", "CANCELLED by 0", "0:0", user.folder, "swept"),
        ]
    )
    found = toolkit.statuses(runs)
    assert shown(found) == ["UNKNOWN", "CANCELLED", "FAILED", "UNKNOWN", "CANCELLED"]
    assert found[0].reason.startswith("the accounting says RUNNING, and the controller does not")
    assert [status.lost for status in found] == [False, False, False, True, False]
    assert found[1].reason == "the accounting says CANCELLED, signal 15"
    assert found[2].reason == "the accounting says FAILED"
    assert found[4].reason == "1 SUCCEEDED, 1 CANCELLED"
    assert slurm.calls("sacct") == 1
    assert slurm.asked[-1][:6] == ["sacct", "-n", "-P", "-X", "-j", "1,2,3,4,5"]


def test_without_accounting_what_is_lost_stays_lost_and_sacct_is_left_alone(
    user: User, slurm: Slurm
) -> None:
    run = user.run("a", 1)
    for _ in range(3):
        assert run.status().lost
    assert slurm.calls("sacct") == 1
    with pytest.raises(toolkit.RunNotFound):
        run.wait(60)


def test_accounting_that_is_away_may_know_more_later(user: User, slurm: Slurm) -> None:
    slurm.accounting_error = "sacct: error: Problem talking to the database: Connection refused"
    status = user.run("a", 1).status()
    assert (status.state, status.lost) == (toolkit.RunState.UNKNOWN, False)
    assert status.reason.endswith(f"; the accounting does not answer: {slurm.accounting_error}")


# ---- Shared answers


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(slurm: Slurm, tmp_path: Path, clock: Clock) -> Callable[[], Queue]:
    """Open the shared answers as another process does."""
    return lambda: Queue(slurm, file=tmp_path / "queues/c.json", clock=clock)


def test_an_answer_is_shared_for_seconds_and_never_stale(
    queue: Callable[[], Queue], slurm: Slurm, clock: Clock, tmp_path: Path
) -> None:
    def asked(*, max_age_s: float, changed: float = 0.0) -> bool:
        before = slurm.calls("squeue")
        queue().look(max_age_s=max_age_s, changed=changed)
        return slurm.calls("squeue") > before

    assert asked(max_age_s=3)
    clock.now += 2
    assert not asked(max_age_s=3)
    assert asked(max_age_s=1)  # who wants it fresher
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
    queue: Callable[[], Queue], slurm: Slurm, clock: Clock
) -> None:
    slurm.rows = "==job|1|RUNNING|N/A|None|x\n"
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
    assert not queue().look(patient=False).note  # who acts asks at once
    assert not queue().look(max_age_s=0.5).note


def test_while_the_controller_is_busy_runs_are_told_with_the_time(
    tmp_path: Path, slurm: Slurm, clock: Clock
) -> None:
    user = User(tmp_path / "runs", slurm)
    shared = Queue(slurm, file=tmp_path / "c.json", clock=clock)
    run = SlurmRun(user.record("a", 1), slurm, shared)
    assert run.run_dir is not None
    for path in (run.run_dir, run.run_dir / "logs", run.run_dir / "jobs.jsonl"):
        os.utime(path, (0, 0))
    slurm.rows = user.line("a", 1, "RUNNING")
    assert run.status().reason == ""
    slurm.error = BUSY
    clock.now += 5
    assert run.status().state is toolkit.RunState.UNKNOWN  # it has just said so
    status = run.status()
    assert status.state is toolkit.RunState.RUNNING
    assert status.reason.startswith("as of ")
    assert "the controller is busy" in status.reason


def fake_squeue(folder: Path, *, seconds: float = 0.0) -> Path:
    """Write commands of Slurm that count how often they are called."""
    commands = folder / "bin"
    commands.mkdir()
    (commands / "rows").write_text("==job|1|RUNNING|N/A|None|x\n==job|2|RUNNING|N/A|None|x\n")
    text = f"#!/bin/sh\necho >>{folder}/calls\nsleep {seconds}\ncat {commands}/rows\n"
    for name, script in (("squeue", text), ("scancel", "#!/bin/sh\n"), ("scontrol", "#!/bin/sh\n")):
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    return commands


def counted(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_shells_that_ask_at_once_make_one_question(tmp_path: Path) -> None:
    commands = fake_squeue(tmp_path, seconds=1.0)
    environ = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    code = (
        "import sys; from toolkit.launchers.slurm.cache import Queue, place_of_answers\n"
        "from toolkit.launchers.slurm.queue import run_command\n"
        "queue = Queue(run_command, file=place_of_answers())\n"
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
    assert json.loads(place_of_answers(environ).read_bytes())["asked"] > 0


def test_a_state_folder_that_cannot_be_written_only_costs_questions(slurm: Slurm) -> None:
    queue = Queue(slurm, file=Path("/proc/nowhere/c.json"))
    queue.look(max_age_s=60)
    queue.look(max_age_s=60)
    assert slurm.calls("squeue") == 2


def test_what_people_set_for_their_own_listings_hides_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = fake_squeue(tmp_path)
    (commands / "squeue").write_text('#!/bin/sh\n[ -z "$SQUEUE_PARTITION" ] && cat $0.rows\n')
    (commands / "squeue.rows").write_bytes(b"==job|1|RUNNING|N/A|None|caf\xe9\n")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_PARTITION", "gpu")
    run = toolkit.SlurmProfile(name="s")
    record = RunRecord(uri="slurm://c/1", name="n", job="j", profile={}, created=0.0)
    assert SlurmLauncher(run).open(record).status().state is toolkit.RunState.RUNNING


# ---- Waiting, and the command line


def test_several_runs_are_waited_for_with_one_question_a_round(user: User, slurm: Slurm) -> None:
    runs = [user.run("a", 1), user.run("b", 2)]
    slurm.rows = user.line("a", 1, "RUNNING") + user.line("b", 2, "RUNNING")
    with pytest.raises(TimeoutError, match="not ended after 0 s: slurm://c/1, slurm://c/2"):
        toolkit.wait(runs, 0)
    before, ended = slurm.calls("squeue"), []

    def note(run: toolkit.Run, status: toolkit.RunStatus) -> None:
        ended.append((run.name, status.state.upper()))
        slurm.rows = user.line("b", 2, "COMPLETED")

    slurm.rows = user.line("a", 1, "TIMEOUT") + user.line("b", 2, "RUNNING")
    assert shown(toolkit.wait(runs, on_end=note)) == ["PREEMPTED", "SUCCEEDED"]
    assert ended == [("a", "PREEMPTED"), ("b", "SUCCEEDED")]
    assert slurm.calls("squeue") == before + 2


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Run the toolkit beside a squeue that knows one running and one pending job."""
    commands = fake_squeue(tmp_path)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    profile = toolkit.SlurmProfile(name="s")
    for number, (name, job) in enumerate([("r-1", "r"), ("p-2", "p"), ("p-3", "p")], 1):
        uri = f"slurm://c/{number}"
        registry.remember(uri=uri, name=name, job=job, profile=profile)
    rows = "==job|1|RUNNING|N/A|None|x\n==job|2|PENDING|2999-01-01T00:00:00|Priority|x\n"
    (commands / "rows").write_text(f"{rows}==job|3|COMPLETED|N/A|None|x\n")
    (commands / "scancel").write_text('#!/bin/sh\n[ "$1" != 2 ] || { echo no >&2; exit 1; }\n')

    def run(*argv: str) -> Answer:
        return subprocess.run([TOOLKIT, *argv], capture_output=True, text=True, check=False)

    return run


def test_the_list_can_be_filtered(program: Callable[..., Answer]) -> None:
    def names(*argv: str) -> list[str]:
        return [row["name"] for row in json.loads(program("list", "--json", *argv).stdout)]

    assert names() == ["r-1", "p-2", "p-3"]
    assert names("--job", "p") == ["p-2", "p-3"]
    assert names("--state", "pending", "--state", "RUNNING") == ["r-1", "p-2"]
    assert names("--state", "RUNNING", "--last", "1") == ["r-1"]
    assert names("--job", "q") == []
    assert program("list", "--job", "q").stdout == (
        "no such runs; `toolkit list` shows the newest of all\n"
    )
    assert program("list", "--state", "LOST").returncode == 2
    (row,) = json.loads(program("list", "--state", "PENDING", "--json").stdout)
    assert row["expected_start"] == "2999-01-01T00:00:00"
    assert row["reason"] == "Priority: others come first; expected to start Jan 1 00:00"


def test_a_place_that_is_away_is_explained_once(
    program: Callable[..., Answer], tmp_path: Path
) -> None:
    squeue = tmp_path / "bin/squeue"
    squeue.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    lines = program("list").stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["slurm://c/1", "UNKNOWN", "r-1"],
        ["slurm://c/2", "UNKNOWN", "p-2"],
        ["slurm://c/3", "UNKNOWN", "p-3"],
    ]
    assert "Unable to contact slurm controller" in lines[0]
    assert [line.rpartition("  ")[2] for line in lines[1:]] == ["as above"] * 2


def test_cancel_and_wait_take_several_runs(program: Callable[..., Answer]) -> None:
    done = program("cancel", "r-1", "p-2", "p-3", "--json")
    assert done.returncode == 1  # one was refused; the others are cancelled all the same
    assert json.loads(done.stdout) == [
        {"uri": "slurm://c/1", "name": "r-1", "asked": True, "error": None},
        {
            "uri": "slurm://c/2",
            "name": "p-2",
            "asked": False,
            "error": "scancel refused slurm://c/2: no",
        },
        {"uri": "slurm://c/3", "name": "p-3", "asked": False, "error": None},
    ]
    assert program("cancel", "p-3", "nobody").returncode == 2
    waited = program("wait", "p-3", "r-1", "--timeout", "0", "--json")
    assert waited.returncode == 1
    assert "p-3: SUCCEEDED" in waited.stderr
    assert waited.stderr.endswith("not ended after 0 s: slurm://c/1\n")
    waited = program("wait", "p-3", "slurm://c/3", "--json")
    assert (waited.returncode, len(json.loads(waited.stdout))) == (0, 2)


def test_a_list_reads_no_more_than_it_shows(
    user: User, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = user.run("a", 1)
    left_behind(run, "done")
    assert run.run_dir is not None
    (run.run_dir / "metrics.jsonl").write_text('{"step": 7}\n')
    (row,) = summaries.listed([run], brief=True)
    assert (row["state"], set(row)) == ("SUCCEEDED", {"uri", "name", "state", "reason"})
    (row,) = summaries.listed([run])
    assert row["metrics"] == {"step": 7}
    assert summaries.listed([run], states=[toolkit.RunState.FAILED]) == []
