"""What follows when an attempt ends: the functions of the batch script, run by bash."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import toolkit
from tests.fakes import fake_slurm
from tests.support.ending_job import Job

REPORT = "  exitcode  : {} (pid: 77)"
AGAIN = ["requeue 7"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("outcome", "status", "stopping", "printed", "ends", "reason", "asked"),
    [
        pytest.param("done", 0, "", "", 0, "done: all steps made", [], id="done"),
        pytest.param("done", 1, "walltime", "", 0, "done: all steps made", [], id="done late"),
        pytest.param(
            "fatal", 1, "", "", 1, 'fatal: rank 1: it "said" so; not queued again', [], id="fatal"
        ),
        pytest.param(
            "fatal", 0, "", "", 1, 'fatal: rank 1: it "said" so; not queued again', [], id="fatal 0"
        ),
        pytest.param(
            "retryable", 1, "", "", 1, 'retryable: rank 1: it "said" so; queued again', AGAIN,
            id="lost a rank",
        ),
        pytest.param(
            "running", 1, "", "", 1,
            "retryable: killed without a word, at step 50 or later; queued again", AGAIN,
            id="all ranks killed",
        ),
        pytest.param(
            "running", 1, "", "error: Detected 1 oom_kill event in StepId=7.0.", 1,
            "fatal: out of memory: the kernel killed a process; not queued again", [],
            id="out of memory",
        ),
        pytest.param(
            "running", 1, "",
            "slurmstepd: error: StepId=7.0 exceeded memory limit (9 > 8), being killed", 1,
            "fatal: out of memory: StepId=7.0 exceeded memory limit (9 > 8); not queued again", [],
            id="out of memory by accounting",
        ),
        pytest.param(
            "preempted", 1, "", "", 1, 'preempted: rank 1: it "said" so; queued again', AGAIN,
            id="preempted",
        ),
        pytest.param(
            "preempted", 1, "walltime", "", 1, "walltime: out of time; queued again", AGAIN,
            id="out of time",
        ),
        pytest.param(
            "preempted", 1, "cancelled", "", 1,
            "cancelled: by toolkit cancel; not queued again", [], id="cancelled",
        ),
        pytest.param(
            "preempted", 1, "terminated", "", 1, "cancelled: by scancel; not queued again", [],
            id="scancel",
        ),
        pytest.param(
            "retryable", 1, "", REPORT.format(93), 93,
            'no_progress: a worker exited with status 93 (rank 1: it "said" so); not queued again',
            [], id="a worker says 93",
        ),
        pytest.param("", 0, "", "", 0, "done: all steps made", [], id="no outcome, 0"),
        pytest.param(
            "", 1, "", "", 1,
            "retryable: exit status 1 without a word in outcome.json; queued again", AGAIN,
            id="no outcome, 1",
        ),
        pytest.param(
            "", 1, "", REPORT.format(2), 1,
            "fatal: exit status 2: another start would end like this one; not queued again", [],
            id="no outcome, a worker's 2",
        ),
        pytest.param(
            "", 127, "", "", 127,
            "fatal: exit status 127: another start would end like this one; not queued again", [],
            id="no torchrun",
        ),
        pytest.param(
            "", 1, "walltime", "", 1, "walltime: out of time; queued again", AGAIN,
            id="no outcome, out of time",
        ),
    ],
)  # fmt: skip
def test_the_outcome_decides(
    job: Job,
    outcome: str,
    status: int,
    stopping: str,
    printed: str,
    ends: int,
    reason: str,
    asked: list[str],
) -> None:
    if outcome:
        rank = None if outcome == "done" else 1
        job.told(status=outcome, attempt=0, step=50, rank=rank, reason='it "said" so')
    assert job.conclude(status, stopping=stopping, printed=printed) == ends
    assert (job.reason, job.asked) == (reason, asked)
    assert (job.folder(0) / "step").exists() == bool(outcome)


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_an_outcome_is_read_however_it_is_laid_out(job: Job, indent: int | None) -> None:
    outcome = {"status": "fatal", "attempt": 0, "step": 3, "rank": None, "reason": 'a, "b" \\ }'}
    (job.run_dir / "outcome.json").write_text(json.dumps(outcome, indent=indent))
    assert job.conclude(1) == 1
    assert job.reason == 'fatal: a, "b" \\ }; not queued again'
    assert (job.folder(0) / "step").read_text() == "3\n"


def test_the_outcome_of_an_earlier_attempt_is_not_this_ones(job: Job) -> None:
    job.attempt = 1
    job.had(0, "walltime", step=50)
    job.told(status="preempted", attempt=0, step=50, rank=None, reason="x")
    assert job.conclude(1) == 1
    assert job.reason == "retryable: exit status 1 without a word in outcome.json; queued again"
    assert (job.folder(1) / "step").read_text() == "50\n"


def test_what_an_earlier_attempt_printed_is_not_this_ones(job: Job) -> None:
    job.log.write_text(REPORT.format(93) + "\n")
    assert job.conclude(1) == 1
    assert job.asked == AGAIN


def test_failures_use_up_the_requeues(job: Job) -> None:
    job.attempt = 2
    job.had(0, "retryable", step=10)
    job.had(1, "node_failure", step=20)
    job.told(status="retryable", attempt=2, step=30, rank=1, reason="gone")
    assert job.conclude(1) == 1
    assert job.reason == "retryable: rank 1: gone; gave up after 2 requeues"
    assert job.asked == []


@pytest.mark.parametrize("word", ["walltime", "preempted"])
def test_time_and_preemption_use_up_nothing_while_there_is_progress(job: Job, word: str) -> None:
    job.attempt = 9
    for attempt in range(9):
        job.had(attempt, word, step=10 * (attempt + 1))
    job.told(status="retryable", attempt=9, step=100, rank=1, reason="gone")
    assert job.conclude(1) == 1
    assert job.asked == AGAIN


@pytest.mark.parametrize(("allowed", "asked"), [(3, AGAIN), (2, [])])
def test_preemptions_have_a_limit_of_their_own(job: Job, allowed: int, asked: list[str]) -> None:
    job.attempt, job.limit, job.preemptions = 3, 1, allowed
    for attempt, word in enumerate(["preempted", "requeued", "walltime"]):
        job.had(attempt, word, step=10 * (attempt + 1))
    job.told(status="retryable", attempt=3, step=100, rank=1, reason="gone")
    assert job.conclude(1) == 1
    assert job.asked == asked
    assert ("gave up after 2 preemptions (retries.preemptions)" in job.reason) == (not asked)


def test_out_of_time_uses_up_requeues_where_no_outcome_shows_progress(job: Job) -> None:
    job.attempt = 2
    job.had(0, "walltime")
    job.had(1, "walltime")
    assert job.conclude(1, stopping="walltime") == 1
    assert job.reason == "walltime: out of time; gave up after 2 requeues"


def test_no_new_step_in_three_attempts_ends_the_job_with_93(job: Job) -> None:
    job.attempt, job.limit = 3, 99
    for attempt, step in enumerate([57, 57, 50]):
        job.had(attempt, "walltime", step=step)
    job.told(status="preempted", attempt=3, step=57, rank=None, reason="x")
    assert job.conclude(1, stopping="walltime") == 93
    assert job.reason == (
        "no_progress: out of time; no step beyond 57 in 3 attempts (retries.no_progress)"
    )
    assert job.asked == []


def test_one_new_step_starts_the_count_anew(job: Job) -> None:
    job.attempt, job.limit = 3, 99
    for attempt in range(3):
        job.had(attempt, "retryable", step=57)
    job.told(status="retryable", attempt=3, step=58, rank=0, reason="x")
    assert job.conclude(1) == 1
    assert job.asked == AGAIN


def test_attempts_of_an_earlier_job_in_the_same_directory_do_not_count(job: Job) -> None:
    job.attempt = 5
    for attempt in range(5):
        job.had(attempt, "retryable", step=57)
    job.told(status="retryable", attempt=5, step=57, rank=0, reason="x")
    assert job.run("_since=5; conclude 1") == 1
    assert job.asked == AGAIN


def test_preempted_before_it_began_is_no_attempt_without_progress(job: Job) -> None:
    job.attempt = 3
    job.environ["RESTARTS"] = "4"
    for attempt in range(3):
        job.had(attempt, "preempted")
    job.told(status="preempted", attempt=0, step=57, rank=None, reason="x")
    printed = f"{KILLED} DUE TO PREEMPTION ***"
    assert job.conclude(1, stopping="terminated", printed=printed) == 1
    assert job.reason == "preempted: Slurm has taken the nodes; queued again"
    assert not (job.folder(3) / "step").exists()
    assert job.asked == []


def test_without_requeues_what_failed_in_the_job_is_not_queued_again(job: Job) -> None:
    job.limit = 0
    job.told(status="retryable", attempt=0, step=5, rank=0, reason="x")
    assert job.conclude(1) == 1
    assert job.reason == "retryable: rank 0: x; not queued again (retries.requeue is 0)"
    assert job.asked == []


@pytest.mark.parametrize("requeue", [0, 1])
@pytest.mark.parametrize(
    ("secret", "reason"),
    [("x", "done: all steps made\n"), ("", "fatal: ended before torchrun was started\n")],
)
def test_the_rendered_script_leaves_a_reason(
    tmp_path: Path, secret: str, reason: str, requeue: int
) -> None:
    job = toolkit.JobSpec(
        name="probe", module="train", secrets={"TOKEN": None}, retries={"requeue": requeue}
    )
    environ = {**fake_slurm.install(tmp_path, nodes=1), "TOKEN": secret}
    script = tmp_path / "script.sh"
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s"))))
    run_dir = tmp_path / "run"
    argv = ["bash", str(script), str(run_dir)]
    subprocess.run(argv, env=environ, capture_output=True, check=False)
    assert (run_dir / "logs/attempt-0/reason").read_text() == reason


@pytest.mark.parametrize("requeue", [0, 1])
@pytest.mark.parametrize(
    ("mode", "ended", "reason"),
    [
        ("", None, "cancelled: by toolkit cancel"),
        ("continue", None, "done: all steps made"),
        ("continue", 2.0, "done: all steps made"),
        ("continue", 0.0, "cancelled: by toolkit cancel"),
    ],
)
def test_a_cancel_whose_signal_came_too_early_is_known_by_its_mark(
    tmp_path: Path, mode: str, ended: float | None, reason: str, requeue: int
) -> None:
    """Not by one that an earlier attempt has answered, whose end is `ended` here."""
    script, run_dir = tmp_path / "script.sh", tmp_path / "run"
    job = toolkit.JobSpec(name="probe", module="train", retries={"requeue": requeue})
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s"))))
    attempt = 1 if mode == "continue" else 0
    (run_dir / "logs").mkdir(parents=True)
    if attempt:
        (run_dir / "logs/attempt-0").mkdir()
    (run_dir / "cancel_requested").touch()
    os.utime(run_dir / "cancel_requested", (1.0, 1.0))
    if ended is not None:
        (run_dir / "logs/attempt-0/exit_status").touch()
        os.utime(run_dir / "logs/attempt-0/exit_status", (ended, ended))
    argv = ["bash", str(script), str(run_dir), mode]
    environ = fake_slurm.install(tmp_path, nodes=1)
    subprocess.run(argv, env=environ, capture_output=True, check=False)
    assert (run_dir / f"logs/attempt-{attempt}/reason").read_text().startswith(reason)


REQUEUES = """#!/bin/sh
case "$*" in
*"show job"*) echo "JobId=1234 JobState=RUNNING Restarts=0 " ;;
requeue*) kill -TERM "$(cat "$PIDS")" ;;
*) echo node1 ;;
esac
"""

DIES = """#!/bin/sh
echo $PPID >"$PIDS"
kill -TERM $PPID $$
"""


def test_the_signal_of_its_own_requeue_does_not_change_why_a_script_has_ended(
    tmp_path: Path,
) -> None:
    """scancel --full ends the script's child processes, too, and so the script."""
    environ, run_dir = fake_slurm.install(tmp_path, nodes=1), tmp_path / "run"
    environ["PIDS"] = str(tmp_path / "pids")
    (tmp_path / "bin/scontrol").write_text(REQUEUES)
    dies = tmp_path / "bin/stop-here"
    dies.write_text(DIES)
    dies.chmod(0o755)
    script = tmp_path / "script.sh"
    job = toolkit.JobSpec(name="probe", module="train", retries={"requeue": 1})
    profile = toolkit.SlurmProfile(name="s", prolog=("stop-here",))
    script.write_text(toolkit.render(toolkit.plan(job, profile)))
    with (tmp_path / "job.log").open("a") as log:
        argv = ["bash", str(script), str(run_dir)]
        subprocess.run(argv, env=environ, stdout=log, stderr=log, check=False)
    assert (run_dir / "logs/attempt-0/reason").read_text() == f"{BY_SIGNAL}\n"


@pytest.mark.parametrize(
    ("marked", "before", "reason"),
    [
        (5.0, "preempted: so; queued again", "cancelled: by toolkit cancel"),
        (5.0, "cancelled: by toolkit cancel", "done: all steps made"),
        (0.5, "preempted: so; queued again", "done: all steps made"),
    ],
    ids=["unanswered", "answered", "of an earlier job"],
)
def test_a_cancel_that_came_while_the_job_was_being_queued_again_is_known(
    tmp_path: Path, marked: float, before: str, reason: str
) -> None:
    script, run_dir = tmp_path / "script.sh", tmp_path / "run"
    job = toolkit.JobSpec(name="probe", module="train", retries={"requeue": 1})
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s"))))
    first = run_dir / "logs/attempt-0"
    first.mkdir(parents=True)
    (first / "reason").write_text(f"{before}\n")
    times = {first / "since": 1.0, first / "exit_status": 9.0, run_dir / "cancel_requested": marked}
    for path, time in times.items():
        path.write_text("0\n")
        os.utime(path, (time, time))
    environ = fake_slurm.install(tmp_path, nodes=1) | {"SLURM_RESTART_COUNT": "1"}
    subprocess.run(["bash", script, run_dir], env=environ, capture_output=True, check=False)
    assert (run_dir / "logs/attempt-1/reason").read_text().startswith(reason)


PROGRAM = """#!/bin/sh
case "$*" in */attempt--1/reserve | *begin-nodes*) kill -TERM $PPID; {then} ;; *) {later} ;; esac
exec /usr/bin/env -S PATH=/usr/bin:/bin {name} "$@"
"""


@pytest.mark.parametrize(
    ("then", "later", "requeue", "reason"),
    [
        (":", ":", 1, "cancelled: by scancel; not queued again\n"),
        ("kill -TERM $$", ":", 1, "cancelled: by scancel; not queued again\n"),
        (":", "kill -KILL $PPID", 1, "terminated: by Slurm; killed soon after\n"),
        (":", ":", 0, "terminated: by Slurm\n"),
        ("kill -TERM $$", ":", 0, "terminated: by Slurm\n"),
    ],
    ids=[
        *("the script lives", "what it runs ends with it", "it is killed soon after"),
        *("without requeues, the script lives", "without requeues, what it runs ends with it"),
    ],
)
def test_scancel_while_the_script_begins_is_no_success(
    tmp_path: Path, then: str, later: str, requeue: int, reason: str
) -> None:
    environ = fake_slurm.install(tmp_path, nodes=1)
    for name in ("rm", "sed"):  # which the script calls as it begins, rm once more at its end
        program = tmp_path / "bin" / name
        program.write_text(
            PROGRAM.format(name=name, then=then, later=later if name == "rm" else ":")
        )
        program.chmod(0o755)
    script = tmp_path / "script.sh"
    job = toolkit.JobSpec(name="probe", module="train", retries={"requeue": requeue})
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s"))))
    logs = tmp_path / "run/logs/attempt-0"
    argv = ["bash", str(script), str(tmp_path / "run")]
    done = subprocess.run(argv, env=environ, capture_output=True, check=False)
    assert (logs / "reason").read_text() == reason
    assert done.returncode < 0 or int((logs / "exit_status").read_text()) != 0


KILLED = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-25T13:13:27"

MKDIR = f"""#!/bin/sh
echo "{KILLED} DUE TO JOB REQUEUE ***" >&2
kill -TERM $PPID
exec /bin/mkdir "$@"
"""


def test_a_requeue_while_the_script_begins_is_told_as_one(tmp_path: Path) -> None:
    """slurmstepd has said so before the script has looked where its log begins."""
    environ, run_dir = fake_slurm.install(tmp_path, nodes=1), tmp_path / "run"
    (tmp_path / "bin/mkdir").write_text(MKDIR)
    (tmp_path / "bin/mkdir").chmod(0o755)
    script = tmp_path / "script.sh"
    job = toolkit.JobSpec(name="probe", module="train", retries={"requeue": 1})
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s"))))
    with (tmp_path / "job.log").open("a") as log:
        argv = ["bash", str(script), str(run_dir)]
        subprocess.run(argv, env=environ, stdout=log, stderr=log, check=False)
    reason = (run_dir / "logs/attempt-0/reason").read_text()
    assert reason == "requeued: by an operator; queued again\n"


@pytest.mark.parametrize(
    ("printed", "down", "reason"),
    [
        (f"{KILLED} DUE TO JOB REQUEUE ***", "", "requeued: by an operator"),
        (f"{KILLED} DUE TO PREEMPTION ***", "n2", "preempted: Slurm has taken the nodes"),
        (
            "srun: error: Node failure on n2\n"
            f"{KILLED} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
            "",
            "node_failure: down: n2",
        ),
        (f"{KILLED} ***", "", "cancelled: by scancel"),
        (
            f"{KILLED} ***\n{KILLED.replace('JOB 7', 'STEP 7.0')} DUE TO JOB REQUEUE ***",
            "",
            "requeued: by an operator",
        ),
        (f"{KILLED} DUE TO TIME LIMIT ***", "", "walltime: out of time"),
    ],
    ids=[
        "operator",
        "preemption",
        "a node that is back already",
        "scancel",
        "a signal before",
        "time",
    ],
)
def test_slurmstepd_says_why_slurm_ends_an_attempt(
    job: Job, printed: str, down: str, reason: str
) -> None:
    job.environ |= {"DOWN": down, "RESTARTS": "0" if reason.startswith("cancelled") else "1"}
    job.told(status="preempted", attempt=0, step=5, rank=None, reason="x")
    assert job.conclude(1, stopping="terminated", printed=printed) == 1
    assert job.reason.startswith(f"{reason}; ")
    assert job.asked == []
    assert (job.folder(0) / "failing_node").exists() == reason.startswith("node_failure")


@pytest.mark.parametrize(
    ("preempted", "left", "word"),
    [
        ("PreemptTime=150", ("stopped-0",), "preempted"),
        ("PreemptTime=150", ("stopped-0", "failed-1"), "preempted"),  # a rank had lost the other
        ("PreemptTime=150", (), "preempted"),  # before its tasks had begun
        ("PreemptTime=50", ("stopped-0",), "retryable"),  # of an earlier attempt
        ("PreemptTime=None", ("stopped-0",), "retryable"),  # srun ends the others after a failure
        ("PreemptTime=150", ("failed-0",), "retryable"),
    ],
)
def test_a_preemption_with_grace_time_is_known_though_no_signal_comes(
    job: Job, preempted: str, left: tuple[str, ...], word: str
) -> None:
    job.environ["PREEMPTED"] = preempted
    for name in left:
        (job.folder(0) / name).write_text("1\n")
    assert job.conclude(1) == 1
    assert job.reason.startswith(f"{word}: ")
    assert job.reason.endswith("; queued again")


BY_SIGNAL = "preempted: stopped by a signal from outside; queued again"


STOPPED = "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-25T13:13:27 ***"
FAILED = "srun: error: n2: task 1: Exited with exit code 1"


@pytest.mark.parametrize(
    ("left", "outcome", "printed", "reason"),
    [
        (("stopped-0", "stopped-1"), "", STOPPED, BY_SIGNAL),
        ((), "running", f"{STOPPED}\n{FAILED}", BY_SIGNAL),  # of a task that had not begun
        (("stopped-0",), "retryable", STOPPED, "retryable: boom; queued again"),
        (("stopped-0",), "preempted", STOPPED, "preempted: boom; queued again"),
        (("stopped-0",), "", f"{FAILED}\n{STOPPED}", "retryable: "),  # srun ends the others
        (("stopped-0", "failed-1"), "", STOPPED, "retryable: "),
        (("stopped-0",), "", f"StepId=7.0 exceeded memory limit (9 > 8)\n{STOPPED}", "fatal: out"),
    ],
)
def test_a_step_that_somebody_stops_is_no_failure(
    job: Job, left: tuple[str, ...], outcome: str, printed: str, reason: str
) -> None:
    """By scancel --signal=TERM."""
    for name in left:
        (job.folder(0) / name).write_text("1\n")
    if outcome:
        job.told(status=outcome, attempt=0, step=5, rank=None, reason="boom")
    assert job.conclude(1, printed=printed) == 1
    assert job.reason.startswith(reason)


def test_a_script_that_somebody_stops_goes_on(job: Job) -> None:
    """Slurm calls a job that it has ended itself COMPLETING, CANCELLED, PENDING."""
    job.environ["STATE"] = "RUNNING"
    assert job.conclude(1, stopping="terminated", printed=f"{KILLED} ***") == 1
    assert job.reason == BY_SIGNAL
    assert job.asked == AGAIN


@pytest.mark.parametrize(("state", "stopped"), [("RUNNING", True), ("CANCELLED", False)])
def test_a_script_that_somebody_stops_stops_its_step(job: Job, state: str, stopped: bool) -> None:
    """Slurm itself tells all, unlike scancel --batch --signal=TERM."""
    job.environ["STATE"] = state
    scancel = job.run_dir / "bin/scancel"
    scancel.write_text('#!/bin/sh\necho "scancel $*" >>"$CALLS"\n')
    scancel.chmod(0o755)
    (job.folder(0) / "began-0").write_text("3\n")
    assert job.run("_step=$$; stopped_by_slurm") == 0
    assert ("scancel --signal=TERM 7.3" in job.asked) is stopped
    assert (job.folder(0) / "stopping").exists() is stopped


@pytest.mark.parametrize(
    ("printed", "word"),
    [(f"{KILLED} ***", "cancelled"), (f"{KILLED} DUE TO TIME LIMIT ***", "walltime")],
)
def test_a_job_that_is_cancelled_while_it_decides_is_not_queued_again(
    job: Job, printed: str, word: str
) -> None:
    """Slurm would start it again, which is right where its time is over."""
    job.environ["STATE"] = "COMPLETING"
    assert job.conclude(1, stopping="walltime", printed=printed) == 1
    assert job.reason.startswith(f"{word}: ")
    assert job.asked == ([] if word == "cancelled" else AGAIN)


SRUN = """#!/bin/sh
echo "%s" >&2
exit %d
"""
PROLOG_FAILED = (
    "slurmstepd-node1: error: TaskProlog failed status=1\n"
    "srun: error: node1: task 0: Exited with exit code 1"
)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        ("srun: error: Node failure on node1", 0, "node_failure: down: node1; queued again\n"),
        (
            "srun: error: Unable to contact slurm controller (connect failure)",
            1,
            "retryable: srun could not start torchrun: Unable to contact slurm controller "
            "(connect failure) (exit status 1); queued again\n",
        ),
        (
            PROLOG_FAILED,
            137,
            "retryable: TaskProlog failed status=1 on node1 (exit status 137); queued again\n",
        ),
    ],
)
@pytest.mark.parametrize("requeue", [0, 1])
def test_what_srun_says_is_the_reason_where_torchrun_says_nothing(
    tmp_path: Path, error: str, status: int, reason: str, requeue: int
) -> None:
    """srun ends with 0 where Slurm has lost a node: no step was made for that."""
    environ, run_dir = fake_slurm.install(tmp_path, nodes=1), tmp_path / "run"
    (tmp_path / "bin/srun").write_text(SRUN % (error, status))
    script = tmp_path / "script.sh"
    job = toolkit.JobSpec(name="probe", module="train", retries={"requeue": requeue})
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s"))))
    with (tmp_path / "job.log").open("a") as log:
        argv = ["bash", str(script), str(run_dir)]
        done = subprocess.run(argv, env=environ, stdout=log, stderr=log, check=False)
    assert done.returncode == (status or 1)
    written = run_dir / "logs/attempt-0/reason"
    assert (written.read_text() if requeue else written.exists()) == (reason if requeue else False)


ENDED_ONCE = """#!/bin/sh
if [ "$2" = hostnames ] && mkdir "$0.ended" 2>/dev/null; then kill -TERM $$; fi
exec "$0.own" "$@"
"""


def test_a_scontrol_that_slurm_ends_with_the_script_is_asked_again(tmp_path: Path) -> None:
    """Its TERM may reach the script a moment later."""
    environ, run_dir = fake_slurm.install(tmp_path, nodes=1), tmp_path / "run"
    scontrol = tmp_path / "bin/scontrol"
    scontrol.rename(f"{scontrol}.own")
    scontrol.write_text(ENDED_ONCE)
    scontrol.chmod(0o755)
    (tmp_path / "bin/srun").write_text(SRUN % ("srun: error: this far", 1))
    script = tmp_path / "script.sh"
    job = toolkit.JobSpec(name="probe", module="train", retries={"requeue": 1})
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s"))))
    with (tmp_path / "job.log").open("a") as log:
        argv = ["bash", str(script), str(run_dir)]
        subprocess.run(argv, env=environ, stdout=log, stderr=log, check=False)
    assert "this far" in (run_dir / "logs/attempt-0/reason").read_text()


@pytest.mark.parametrize(("began", "word"), [(False, "cancelled"), (True, "done")])
def test_a_torchrun_that_is_stopped_before_its_ranks_began_is_not_done(
    job: Job, began: bool, word: str
) -> None:
    """It may end with 0, as may one whose ranks have come to their end meanwhile."""
    if began:
        (job.folder(0) / "node-0/7-0_x/attempt_0/0").mkdir(parents=True)
    assert job.conclude(0, stopping="cancelled") == (0 if began else 1)
    assert job.reason.startswith(f"{word}: ")


ONE_NODE_STOPPED = """
looks=0
read() { looks=$((looks + 1)); [ "$looks" -lt 5000 ] || exit 9; return 1; }
signal_step() { echo "signalled once more"; echo 143 >"$_logs/ended-0"; }
is_removed() { return 1; }
echo 143 | tee "$_logs/stopped-1" >"$_logs/ended-1"
sleep 1000 &
_step=$!
watch_step
"""


def test_a_node_that_has_lost_the_signal_of_the_step_is_told_again(job: Job) -> None:
    """It came before the node's task had begun, whose torchrun then waits for the others."""
    assert job.run(ONE_NODE_STOPPED) == 0
    assert "signalled once more" in job.log.read_text()


# ---- A full disk, memory, a controller that is away, a later attempt


def test_programs_that_slurm_ends_with_the_script_are_no_full_disk(job: Job) -> None:
    head = job.run_dir / "bin/head"
    head.write_text('#!/bin/sh\n[ "$1" != -c ] || kill -TERM $$\nexec /usr/bin/head "$@"\n')
    head.chmod(0o755)
    assert job.conclude(1, stopping="terminated") == 1
    assert job.reason == "cancelled: by scancel; not queued again"


def test_a_full_disk_is_told_though_the_outcome_could_not_be_written(job: Job) -> None:
    job.told(status="running", attempt=0, step=50, rank=None, reason="x")
    (job.folder(0) / "reserve.full").symlink_to("/dev/full")
    assert job.conclude(1) == 1
    assert job.reason == f"fatal: no space is left for {job.run_dir}; not queued again"
    assert job.asked == []


@pytest.mark.parametrize(
    ("status", "stopping", "word"),
    [("running", "", "fatal"), ("preempted", "walltime", "walltime"), ("done", "", "done")],
)
def test_out_of_memory_ends_a_job_that_has_not_ended_otherwise(
    job: Job, status: str, stopping: str, word: str
) -> None:
    job.told(status=status, attempt=0, step=50, rank=None, reason="x")
    (job.folder(0) / "oom-1").write_text("n2\n")
    job.conclude(1, stopping=stopping)
    assert job.reason.partition(":")[0] == word
    assert ("the kernel killed a process on n2; not queued again" in job.reason) == (
        word == "fatal"
    )


@pytest.mark.parametrize(
    ("away", "refuses", "asked", "says"),
    [
        (2, "", ["requeue 7"] * 3, "queued again"),
        (0, "yes", ["requeue 7"] * 2, "scontrol could not queue it again"),
    ],
)
def test_a_controller_that_is_away_is_asked_again_and_one_that_refuses_is_not(
    job: Job, away: int, refuses: str, asked: list[str], says: str
) -> None:
    job.environ |= {"AWAY": str(away), "REFUSES": refuses}
    # It pings, and then waits as long as there is no answer.
    assert job.run("sleep() { :; }; conclude 1") == 1
    assert job.reason.endswith(f"; {says}")
    assert [line for line in job.asked if line != "ping"] == asked


def test_an_attempt_that_was_killed_before_it_knew_its_nodes_has_lost_none(job: Job) -> None:
    """sinfo without nodes would name any that is down."""
    job.attempt = 1
    job.environ["DOWN"] = "n9"
    (job.folder(0) / "reason").write_text("terminated: by Slurm; killed soon after\n")
    assert job.run("complete_previous_attempt") == 0
    assert (job.folder(0) / "reason").read_text() == "terminated: by Slurm; killed soon after\n"
    assert not (job.folder(0) / "failing_node").exists()


def test_an_attempt_that_was_killed_while_it_decided_decides_no_more(job: Job) -> None:
    job.attempt = 1
    (job.folder(0) / "reason").write_text("node_failure: down: n2; deciding\n")
    assert job.run("complete_previous_attempt") == 0
    assert (job.folder(0) / "reason").read_text() == "node_failure: down: n2; killed soon after\n"


def test_an_attempt_that_another_one_has_followed_changes_nothing(job: Job) -> None:
    """Behind a cut cable it went on while Slurm started the next one elsewhere."""
    job.had(0, "lost", step=50)
    job.folder(1)
    job.told(status="running", attempt=1, step=60, rank=None, reason="x")
    assert job.conclude(1) == 1
    assert job.reason == "lost: so"
    assert (job.folder(0) / "step").read_text() == "50\n"
    assert job.asked == []
    assert "fenced: attempt 1 has taken over; not queued again" in job.log.read_text()


def test_a_job_that_slurm_has_queued_again_meanwhile_is_not_queued_again(job: Job) -> None:
    """Its script has heard no signal, which came before bash had begun."""
    job.environ["RESTARTS"] = "1"
    assert job.conclude(1) == 1
    assert job.reason == "requeued: by Slurm, which has not said why; queued again"
    assert job.asked == []


LOST = """\
srun: error: Node failure on n2
slurmstepd-n2: error: *** JOB 7 ON n2 CANCELLED AT 2026-11-28T20:52:07 DUE TO NODE FAILURE, SEE \
SLURMCTLD LOG FOR DETAILS ***
"""


@pytest.mark.parametrize(("down", "printed"), [("n2", ""), ("", LOST)])
def test_the_next_attempt_says_what_the_last_had_no_time_to_say(
    job: Job, down: str, printed: str
) -> None:
    """The node may be back already."""
    job.attempt = 1
    job.environ["DOWN"] = down
    job.had(0, "terminated")
    job.log.write_text(printed)
    (job.folder(0) / "log").write_text(f"0 {job.log}\n")
    assert job.run("complete_previous_attempt") == 0
    assert (job.folder(0) / "reason").read_text() == (
        "node_failure: down: n2; killed before it could say so\n"
    )
    assert (job.folder(0) / "failing_node").read_text() == "n2\n"


@pytest.mark.parametrize(
    ("down", "restarts", "stopping", "reason"),
    [
        ("n2", "1", "terminated", "node_failure: down: n2; queued again; "),
        ("", "1", "terminated", "requeued: by Slurm, which has not said why; queued again; "),
        ("", "0", "terminated", "cancelled: by scancel; "),
        ("", "0", "walltime", "walltime: out of time; "),
        ("", "0", "cancelled", "cancelled: by toolkit cancel; "),
    ],
)
def test_a_script_that_is_killed_while_its_step_ends_has_said_why(
    job: Job, down: str, restarts: str, stopping: str, reason: str
) -> None:
    job.environ |= {"DOWN": down, "RESTARTS": restarts}
    job.run("stopped_by_slurm; kill -KILL $$", stopping=stopping)
    assert job.reason == f"{reason}killed soon after"
    job.told(status="running", attempt=0, step=50, rank=None, reason="x")
    job.attempt = 1
    assert job.run("complete_previous_attempt") == 0
    assert (job.folder(0) / "reason").read_text() == f"{reason}killed soon after\n"
    assert (job.folder(0) / "step").read_text() == "50\n"
    assert (job.folder(0) / "failing_node").exists() == bool(down)


@pytest.mark.parametrize(
    ("stopping", "left"),
    [
        (
            "terminated",
            "requeued: by Slurm, which has not said why; queued again; killed soon after",
        ),
        ("walltime", "walltime: out of time; deciding"),
    ],
)
def test_a_script_that_is_killed_while_it_decides_has_said_why(
    job: Job, stopping: str, left: str
) -> None:
    job.environ["RESTARTS"] = "1"
    job.told(status="running", attempt=0, step=50, rank=None, reason="x")
    trap = "stopped_by_slurm; " if stopping == "terminated" else ""
    killed = 'grep() { [ "$1" != . ] || kill -KILL $$; command grep "$@"; }; conclude 1'
    job.run(trap + killed, stopping=stopping)
    assert job.reason == left


def test_a_node_is_excluded_though_the_script_is_killed_while_its_step_ends(job: Job) -> None:
    job.environ |= {"DOWN": "n2", "RESTARTS": "2"}
    job.attempt = 1
    job.had(0, "node_failure", step=10, failing="n2")
    told = "; queued again; without n2, where two attempts have failed first"
    job.run("stopped_by_slurm; kill -KILL $$", stopping="terminated")
    assert job.reason == f"node_failure: down: n2{told}; killed soon after"
    assert job.asked == ["update jobid=7 excnodelist=n2"]


@pytest.mark.parametrize(
    ("nodes", "reason", "failing"),
    [
        ("n2\n", "n2 has restarted", "n2\n"),
        ("n2\nn1\nn2\n", "n1 has restarted, n2 has restarted", "n1\nn2\n"),
    ],
)
def test_nodes_that_have_restarted_are_named_in_one_line(
    job: Job, nodes: str, reason: str, failing: str
) -> None:
    (job.folder(0) / "restarted").write_text(nodes)
    assert job.conclude(1) == 1
    assert job.reason == f"node_failure: {reason}; queued again"
    assert (job.folder(0) / "failing_node").read_text() == failing


def test_what_is_excluded_when_slurm_ends_the_script_is_said_once_it_has_ended(job: Job) -> None:
    job.environ |= {"DOWN": "n2", "RESTARTS": "2"}
    job.attempt = 1
    job.had(0, "node_failure", step=10, failing="n2")
    told = "; queued again; without n2, where two attempts have failed first"
    assert job.run("stopped_by_slurm; conclude 1", stopping="terminated") == 1
    assert job.reason == f"node_failure: down: n2{told}"
    assert job.asked == ["update jobid=7 excnodelist=n2"]


def test_a_signal_while_the_end_is_judged_is_never_lost(job: Job) -> None:
    """bash 5.2 loses a trap whose signal comes while it expands $(...), and `set -e` ends it."""
    job.told(status="running", attempt=0, step=50)
    job.had(0, "retryable", 40)
    body = """
seen=0
trap 'seen=$((seen + 1))' USR1
(
  trap '' USR1
  sent=0
  while [ ! -e "$_run_dir/enough" ]; do
    kill -USR1 $$ || exit
    sent=$((sent + 1))
    read -rt 0.01 -u 9 || true
  done
  echo "$sent" >"$_run_dir/sent"
) 9<> <(:) &
for n in {1..40}; do
  _why='' _word=''
  classify 1
  count
  _excluded=''
done
touch "$_run_dir/enough"
while ! wait $!; do :; done
say "judged $n times as $_word, $seen signals"
"""
    assert job.run(body) == 0, job.log.read_text()
    assert "trap:" not in job.log.read_text()
    last = job.log.read_text().splitlines()[-1].split()
    sent = int((job.run_dir / "sent").read_text())
    assert last[:4] == ["digits:", "judged", "40", "times"]
    assert 10 < int(last[6]) <= sent


def test_srun_is_ended_that_hangs_when_all_nodes_have_ended(job: Job) -> None:
    """As srun does if a node's slurmstepd was killed."""
    for node, status in enumerate((0, 7)):
        (job.folder(0) / f"ended-{node}").write_text(f"{status}\n")
    at_once = "_since=0; echo 0 >$_logs/since; read() { return 1; }"
    assert job.run(f"{at_once}\nlaunch() {{ sleep 30 & }}\nlaunch_once; exit $_status") == 7
    assert (job.folder(0) / "hung").exists()
