"""Asking Slurm: once for all runs, and never misread. By recorded answers."""

import json
import os
import shutil
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest

import toolkit
from tests.support.asked_slurm import JOBS, Slurm, User, counted, fake_squeue, shown
from tests.support.run_records import remember
from toolkit.cli.summary import rows_of
from toolkit.local.run import LocalRun
from toolkit.runs.records.registry import RunRecord
from toolkit.slurm.commands import Command, ask_jobs, ask_mine, ask_places, run_command
from toolkit.slurm.login.ssh import SshConnection
from toolkit.slurm.run import SlurmRun
from toolkit.slurm.status import JobRow, expected, in_words, status_of
from toolkit.slurm.submission import SlurmJob, write_jobs


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
    questions = [argv for argv in slurm.asked if "PENDING" not in argv]  # of all users' jobs
    assert [argv[0] for argv in questions] == ["squeue"]
    assert found[2].reason == "1 RUNNING, 1 SUCCEEDED"
    assert found[0].reason == "Priority: other jobs have a higher priority"


def test_the_runs_of_all_profiles_of_a_cluster_are_asked_about_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_squeue(tmp_path)
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    for number, partition in enumerate(("one", "two")):
        made = toolkit.SlurmProfile(name=partition, partition=partition)
        uri = f"slurm://c/{number + 1}"
        remember(uri, name=partition, job=partition, profile=made)
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
row|==|55305190|==|RUNNING|==|2026-11-21T23:53:13|==|None|==|/r/x.sbatch a b c|d e
row|==|9|==|RUNNING|==|N/A|==|None|==|x
|==|
row|==|55305191_1|==|PENDING|==|N/A|==|None|==|/my runs/x.sbatch /my runs continue|==|
row|==|55305192|==|CANCELLED|==|2026-11-21T23:53:11|==|BeginTime|==|/r/x.sbatch|==|
row|==|55305193|==|COMPLETING|==|2026-11-21T23:53:11|==|None|==|(null)|==|
"""
SLURM_24_11 = """\
row|==|55306609|==|PENDING|==|2026-11-22T00:19:00|==|Priority|==|/tmp/y.sbatch|==|
row|==|55306607|==|RUNNING|==|2026-11-22T00:16:48|==|None|==|/tmp/y.sbatch|==|
"""
"""Recorded on real clusters; from 24.11 on the command is shown without its arguments."""


def test_arguments_with_bars_and_newlines_make_up_no_job(slurm: Slurm) -> None:
    slurm.rows = SLURM_22_05
    rows = ask_mine(slurm)
    assert [row.job_id for row in rows] == ["55305190", "55305191_1", "55305192", "55305193"]
    assert rows[0].command == "/r/x.sbatch a b c|d e\nrow|==|9|==|RUNNING|==|N/A|==|None|==|x\n"
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


@pytest.mark.parametrize("command", [run_command, SshConnection("there").command])
def test_the_expected_start_is_told_in_the_zone_of_the_reader(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster is in Honolulu, and the reader in Zurich."""
    row = "row|==|1|==|PENDING|==|$(TZ=Pacific/Honolulu date -d @32503680000 "
    (tmp_path / "squeue").write_text(
        f'#!/bin/sh\necho "{JOBS}{row}+${{SLURM_TIME_FORMAT:-%FT%T}})|==|Priority|==|x|==|"\n'
    )
    (tmp_path / "ssh").write_text('#!/bin/sh\n[ "$1" = -G ] || exec bash -s\n')
    for program in ("squeue", "ssh"):
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("TZ", "Europe/Zurich")
    time.tzset()
    try:
        (job,) = ask_mine(command)
        status = status_of(job, None)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert status.expected_start == "3000-01-01T01:00:00+01:00"
    assert status.reason.endswith("expected to start Jan 1 01:00")


def test_what_a_job_waits_for_is_told_in_words() -> None:
    row = JobRow(
        job_id="1", word="PENDING", reason="Resources", command="", start="2999-01-02T03:04"
    )
    status = status_of(row, None)
    assert (
        status.reason == "Resources: waits for nodes to become free; expected to start Jan 2 03:04"
    )
    assert status.expected_start == "2999-01-02T03:04"
    assert in_words("ReqNodeNotAvail, UnavailableNodes:node7").endswith("down, drained or reserved")
    assert in_words("QOSMaxCpuPerUserLimit").endswith("a limit of the QOS is reached")
    assert in_words("Nodes required for job are DOWN") == "Nodes required for job are DOWN"


@pytest.mark.parametrize(
    ("word", "reason", "state", "said"),
    [
        ("SUSPENDED", "", "running", "SUSPENDED: `scontrol resume 1` resumes it"),
        (
            "PENDING",
            "job requeued in held state",
            "pending",
            "job requeued in held state: it was queued again and is held; "
            "`scontrol release JOB_ID` releases it",
        ),
        (
            "PENDING",
            "JobHeldUser",
            "pending",
            "JobHeldUser: it is held; `scontrol release JOB_ID` releases it",
        ),
        ("PENDING", "JobHeldAdmin", "pending", "JobHeldAdmin: an administrator holds it"),
    ],
)
def test_a_job_that_somebody_has_stopped_says_so(
    word: str, reason: str, state: str, said: str
) -> None:
    status = status_of(JobRow(job_id="1", word=word, reason=reason, command=""), None)
    assert (status.state, status.reason) == (state, said)


def test_a_run_continued_by_hand_is_seen(user: User, slurm: Slurm) -> None:
    run = user.run("a", 1)
    left_behind(run, "fatal", reason="boom")
    assert run.status().state is toolkit.RunState.FAILED
    slurm.rows = user.line("a", 9, "RUNNING", " continue")
    assert run.status().state is toolkit.RunState.RUNNING
    run.cancel()
    assert slurm.asked[-1] == ["scancel", "--batch", "--signal=USR2", "9"]
    # A second start without that argument is refused by the script, which reveals nothing about the
    # run.
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


@pytest.mark.parametrize("reason", ["JobLaunchFailure", "RaisedSignal:15(Terminated)"])
@pytest.mark.parametrize("last", ["", "preempted: stopped by a signal; queued again"])
def test_a_script_that_a_signal_has_ended_at_once_can_be_started_again(
    reason: str, last: str, user: User, slurm: Slurm
) -> None:
    """Slurm fails the job, and does not queue it again."""
    run = user.run("a", 1)
    assert run.run_dir is not None
    if last:
        attempt = run.run_dir / "logs/attempt-0"
        attempt.mkdir()
        (attempt / "reason").write_text(f"{last}\n")
        (attempt / "exit_status").write_text("143\n")
    slurm.rows = user.line("a", 1, "FAILED", reason=reason)
    status = run.status()
    assert status.state is toolkit.RunState.FAILED
    assert status.reason == (
        "FAILED: the batch script ended before its first line, by a signal, or because its "
        f"node could not open its log ({reason}); `toolkit resubmit` starts it again"
    )


@pytest.mark.parametrize("who", ["toolkit cancel", "scancel"])
def test_a_job_that_is_cancelled_while_it_waits_for_its_next_start_is_told_as_that(
    user: User, slurm: Slurm, who: str
) -> None:
    """Slurm still shows what it has waited for."""
    run = user.run("a", 1)
    assert run.run_dir is not None
    left_behind(run, "preempted", reason="boom")
    (run.run_dir / "logs/attempt-0/reason").write_text("preempted: so; queued again\n")
    if who != "scancel":
        (run.run_dir / "cancel_requested").touch()
    slurm.rows = user.line("a", 1, "CANCELLED", reason="BeginTime")
    status = run.status()
    assert (status.state, status.reason) == (toolkit.RunState.CANCELLED, f"cancelled: by {who}")


def test_a_script_that_ends_before_the_supervisor_is_told_by_its_shell(
    user: User, slurm: Slurm
) -> None:
    run = user.run("a", 1)
    assert run.run_dir is not None
    activate = f"{run.run_dir}/conda/bin/activate"
    done = subprocess.run(["bash", "-c", f"source {activate}"], capture_output=True, check=False)
    (run.run_dir / "logs").mkdir(exist_ok=True)
    (run.run_dir / "logs/job.log").write_bytes(b"module: loading\n" + done.stderr)
    slurm.rows = user.line("a", 1, "FAILED")
    status = run.status()
    assert status.state is toolkit.RunState.FAILED
    assert status.reason == (
        f"fatal: the script ended at once: {activate}: No such file or directory; `venv` wants a "
        "folder made by `python -m venv`; for conda, write `environment: conda:NAME`"
    )


def test_what_a_requeued_job_waits_for_is_named(user: User, slurm: Slurm) -> None:
    run = user.run("a", 1)
    slurm.rows = user.line("a", 1, "PENDING", reason="BeginTime")
    assert run.status().reason.startswith("BeginTime: its begin time has not been reached")
    left_behind(run, "retryable", reason="boom")
    again = user.run("a", 1).status().reason
    assert again.startswith("BeginTime: requeued; ") and "cred_expire" in again


@pytest.mark.parametrize(
    ("outcome", "reason", "row", "state", "text"),
    [
        ("fatal", "", "FAILED", "FAILED", "boom"),
        ("", "", "FAILED", "FAILED", "exit status 7; see "),
        ("", "", "OUT_OF_MEMORY", "FAILED", "OUT_OF_MEMORY: NonZeroExitCode: exit status 7; see "),
        ("", "fatal: no torchrun", "FAILED", "FAILED", "fatal: no torch"),
        ("preempted", "walltime: out of time", "FAILED", "PREEMPTED", "walltime: out of time"),
        ("fatal", "walltime: out of time", "FAILED", "FAILED", "boom"),
        ("preempted", "cancelled: by toolkit cancel", "FAILED", "CANCELLED", "cancelled: by"),
        ("preempted", "terminated: by Slurm", "CANCELLED", "CANCELLED", ""),
        ("", "cancelled: by scancel; not queued again", "CANCELLED", "CANCELLED", "cancelled: by"),
        ("preempted", "terminated: by Slurm", "NODE_FAIL", "FAILED", "NODE_FAIL: "),
        ("done", "walltime: out of time", "FAILED", "SUCCEEDED", ""),
        ("done", "", "FAILED", "SUCCEEDED", ""),
        ("done", "done: all steps made", "TIMEOUT", "SUCCEEDED", ""),
        ("preempted", "walltime: out of time", "TIMEOUT", "PREEMPTED", "NonZeroExitCode"),
        ("done", "done: all steps made", "FAILED", "FAILED", "NonZeroExitCode"),  # a second job
    ],
)
def test_a_job_without_restarts_is_told_by_its_outcome_its_status_and_slurm(
    user: User, slurm: Slurm, outcome: str, reason: str, row: str, state: str, text: str
) -> None:
    run = user.run("a", 1)
    assert run.run_dir is not None
    attempt = run.run_dir / "logs/attempt-0"
    left_behind(run, outcome or "running", reason="boom")
    if not outcome:
        (run.run_dir / "outcome.json").unlink()
    (attempt / "exit_status").write_text("7\n")
    if reason:
        (attempt / "reason").write_text(f"{reason}\n")
    slurm.rows = user.line("a", 1, row, reason="NonZeroExitCode")
    found = run.status()
    assert found.state.upper() == state
    assert found.reason.startswith(text)


def test_an_id_that_is_used_again_is_not_this_run(user: User, slurm: Slurm) -> None:
    run = user.run("a", 1)
    left_behind(run, "done")
    slurm.rows = user.line("other", 1, "RUNNING")
    assert run.status().state is toolkit.RunState.SUCCEEDED


# ---- The answering cluster


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
    assert slurm.asked[-1][5:7] == ["-j", "1,2"]


# ---- Accounting


def test_one_question_to_the_accounting_tells_what_is_lost(user: User, slurm: Slurm) -> None:
    names = ("late", "killed", "masked", "unknown", "swept")
    runs = [user.run(name, i, points=2 * (name == "swept")) for i, name in enumerate(names, 1)]
    (user.folder / "killed/logs/attempt-0").mkdir()
    line = "c|==|{}|==|{}|==|{}|==|/usr/bin/sbatch {}/{}/job.sbatch|==|"
    slurm.accounting = "\n".join(
        [
            line.format(1, "RUNNING", "0:0", user.folder, "late"),
            line.format(2, "CANCELLED by 0", "0:15", user.folder, "killed"),
            line.format(3, "FAILED", "0:0", user.folder, "masked").removesuffix("|==|"),
            "c|==|9|==|FAILED|==|0:0|==|the second line of an argument|==|",
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
    assert slurm.asked[-1][-2:] == ["-j", "1,2,3,4,5"]


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


# ---- Waiting and listing


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


def test_a_list_reads_no_more_than_it_shows(
    user: User, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = user.run("a", 1)
    left_behind(run, "done")
    assert run.run_dir is not None
    (run.run_dir / "metrics.jsonl").write_text('{"step": 7}\n')
    (row,) = rows_of([run], brief=True)
    keys = {"uri", "name", "state", "reason", "created", "run_dir", "restarts"}
    assert (row["state"], set(row)) == ("SUCCEEDED", keys)
    (row,) = rows_of([run])
    assert row["metrics"] == {"step": 7}
    assert rows_of([run], states=[toolkit.RunState.FAILED]) == []


QUEUE = """\
row|==|50|==|4000|==|gpu|==|Resources|==|
row|==|51|==|3000|==|gpu,long|==|Priority|==|
row|==|52|==|3000|==|gpu|==|Priority|==|
row|==|53|==|9000|==|gpu|==|Dependency|==|
row|==|54|==|0|==|gpu|==|JobHeldUser|==|
row|==|55|==|2000|==|gpu|==|None|==|
row|==|56|==|1000|==|long|==|Priority|==|
row|==|57|==|3500|==|long|==|Priority|==|
a line of a plug-in
"""
"""As squeue prints pending jobs, of a cluster with two partitions."""


def test_the_place_counts_the_jobs_of_the_partition_that_wait_for_their_turn() -> None:
    slurm = Slurm()
    slurm.others = QUEUE
    places = ask_places(slurm, {"50", "51", "52", "53", "55", "56", "99"})
    assert {job_id: str(place) for job_id, place in places.items()} == {
        "50": "queue position 1 of 4 in partition gpu",
        "51": "queue position 2 of 3 in partition long",  # and 2 of 4 in that of gpu
        "52": "queue position 3 of 4 in partition gpu",  # of the same priority, and later
        "55": "queue position 4 of 4 in partition gpu",
        "56": "queue position 3 of 3 in partition long",
    }


def test_a_job_that_waits_for_its_turn_tells_its_place(tmp_path: Path) -> None:
    slurm = Slurm()
    user = User(tmp_path, slurm)
    slurm.rows = user.line("a", 51, "PENDING", reason="Priority", start="2999-01-02T03:04:00")
    slurm.rows += user.line("b", 53, "PENDING", reason="Dependency")
    slurm.others = QUEUE
    turn, dependent = (user.run(name, job_id).status() for name, job_id in (("a", 51), ("b", 53)))
    assert turn.reason == (
        "Priority: other jobs have a higher priority; queue position 2 of 3 in partition long; "
        "expected to start Jan 2 03:04"
    )
    assert (turn.place_in_queue, dependent.place_in_queue) == (2, None)
    assert "place" not in dependent.reason


@pytest.mark.parametrize(("wish", "condition"), [("ok", "afterok"), ("any", "afterany")])
def test_a_job_waits_for_a_point_that_was_continued_by_hand(
    tmp_path: Path, wish: str, condition: str
) -> None:
    slurm = Slurm()
    user = User(tmp_path, slurm)
    sweep = user.run("sw", 77, points=2)
    slurm.rows = user.line("sw", "77_0", "COMPLETED") + user.line("sw", "77_1", "FAILED")
    slurm.rows += user.line("sw", "78_1", "RUNNING", " continue")
    assert sweep.conditions(wish) == [f"{condition}:78_1"]
    assert cast(SlurmRun, sweep.points[1]).conditions(wish) == [f"{condition}:78_1"]


def test_a_resubmitted_run_is_not_over_while_slurm_is_away(user: User, slurm: Slurm) -> None:
    run = user.run("a", 1)
    left_behind(run, "fatal", reason="nan")
    folder = run.run_dir
    assert folder is not None
    (folder / "logs/attempt-0/reason").write_text("fatal: nan\n")
    slurm.error = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    assert run.unreachable("away").state is toolkit.RunState.FAILED
    for name in ("outcome.json", "logs/attempt-0/reason"):
        os.utime(folder / name, (1, 1))
    write_jobs(folder, [SlurmJob(job_id="2", mode="continue")])
    unknown = toolkit.RunStatus(state=toolkit.RunState.UNKNOWN, reason=slurm.error)
    assert toolkit.statuses([run]) == [unknown]
    with pytest.raises(toolkit.LauncherError, match="cannot be cancelled"):
        run.cancel()
    (folder / "logs/attempt-1").mkdir()
    assert not run.status().lost
