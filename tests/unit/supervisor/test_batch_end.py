"""What follows when an attempt on Slurm ends: the supervisor's decisions, and what it asks for."""

import json
from pathlib import Path

import pytest

from tests.support.ending_batch import Job

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
            "retryable: killed, at step 50 or later; queued again", AGAIN,
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
            "retryable: exit status 1; queued again", AGAIN,
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
    assert job.reason == "retryable: exit status 1; queued again"
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


@pytest.mark.parametrize(
    ("auth_info", "soon"),
    [("cred_expire=5", []), ("cred_expire=600", ["update jobid=7 starttime=now+10"])],
)
def test_a_requeued_job_waits_no_longer_than_it_must(
    auth_info: str, soon: list[str], job: Job
) -> None:
    """It is said twice: at once, and last, when nothing is left to do."""
    job.cluster.auth_info = auth_info
    assert job.conclude(1) == 1
    assert job.asked == [*AGAIN, *soon, *soon]


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
    job.since = 5
    assert job.conclude(1) == 1
    assert job.asked == AGAIN


def test_preempted_before_it_began_is_no_attempt_without_progress(job: Job) -> None:
    job.attempt = 3
    job.cluster.restarts = 4
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


PROGRAM = """#!/bin/sh
case "$*" in */attempt--1/reserve | *begin-nodes*) kill -TERM $PPID; {then} ;; *) {later} ;; esac
exec /usr/bin/env -S PATH=/usr/bin:/bin {name} "$@"
"""


KILLED = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-25T13:13:27"


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
    job.cluster.down, job.cluster.restarts = down, int(not reason.startswith("cancelled"))
    job.told(status="preempted", attempt=0, step=5, rank=None, reason="x")
    assert job.conclude(1, stopping="terminated", printed=printed) == 1
    assert job.reason.startswith(f"{reason}; ")
    assert job.asked == []
    assert (job.folder(0) / "failing_node").exists() == reason.startswith("node_failure")


@pytest.mark.parametrize(
    ("preempted", "left", "word"),
    [
        ("150", ("stopped-0",), "preempted"),
        ("150", ("stopped-0", "failed-1"), "preempted"),  # a rank had lost the other
        ("150", (), "preempted"),  # before its tasks had begun
        ("50", ("stopped-0",), "retryable"),  # of an earlier attempt
        ("None", ("stopped-0",), "retryable"),  # srun ends the others after a failure
        ("150", ("failed-0",), "retryable"),
    ],
)
def test_a_preemption_with_grace_time_is_known_though_no_signal_comes(
    job: Job, preempted: str, left: tuple[str, ...], word: str
) -> None:
    job.cluster.preempted = preempted
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
    job.cluster.state = "RUNNING"
    assert job.conclude(1, stopping="terminated", printed=f"{KILLED} ***") == 1
    assert job.reason == BY_SIGNAL
    assert job.asked == AGAIN


@pytest.mark.parametrize(("state", "stopped"), [("RUNNING", True), ("CANCELLED", False)])
def test_a_script_that_somebody_stops_stops_its_step(job: Job, state: str, stopped: bool) -> None:
    """Slurm itself tells all, unlike scancel --batch --signal=TERM."""
    job.cluster.state = state
    (job.folder(0) / "began-0").write_text("3\n")
    job.terminated()
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
    job.cluster.state = "COMPLETING"
    assert job.conclude(1, stopping="walltime", printed=printed) == 1
    assert job.reason.startswith(f"{word}: ")
    assert job.asked == ([] if word == "cancelled" else AGAIN)


@pytest.mark.parametrize(("began", "word"), [(False, "cancelled"), (True, "done")])
def test_a_torchrun_that_is_stopped_before_its_ranks_began_is_not_done(
    job: Job, began: bool, word: str
) -> None:
    """It may end with 0, as may one whose ranks have come to their end meanwhile."""
    if began:
        (job.folder(0) / "node-0/7-0_x/attempt_0/0").mkdir(parents=True)
    assert job.conclude(0, stopping="cancelled") == (0 if began else 1)
    assert job.reason.startswith(f"{word}: ")


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
    job.cluster.away, job.cluster.refuses = away, bool(refuses)
    assert job.conclude(1) == 1
    assert job.reason.endswith(f"; {says}")
    assert [line for line in job.asked if line != "ping"] == asked


def test_an_attempt_that_was_killed_before_it_knew_its_nodes_has_lost_none(job: Job) -> None:
    """sinfo without nodes would name any that is down."""
    job.attempt = 1
    job.cluster.down = "n9"
    (job.folder(0) / "reason").write_text("terminated: by Slurm; killed soon after\n")
    assert job.complete_previous() == 0
    assert (job.folder(0) / "reason").read_text() == "terminated: by Slurm; killed soon after\n"
    assert not (job.folder(0) / "failing_node").exists()


def test_an_attempt_that_was_killed_while_it_decided_decides_no_more(job: Job) -> None:
    job.attempt = 1
    (job.folder(0) / "reason").write_text("node_failure: down: n2; deciding\n")
    assert job.complete_previous() == 0
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
    job.cluster.restarts = 1
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
    job.cluster.down = down
    job.had(0, "terminated")
    job.log.write_text(printed)
    (job.folder(0) / "log").write_text(f"0 {job.log}\n")
    assert job.complete_previous() == 0
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
    job.cluster.down, job.cluster.restarts = down, int(restarts)
    job.cluster.auth_info = "cred_expire=600"
    job.terminated(stopping=stopping)
    assert job.reason == f"{reason}killed soon after"
    assert ("update jobid=7 starttime=now+40" in job.asked) == (restarts == "1")
    job.told(status="running", attempt=0, step=50, rank=None, reason="x")
    job.attempt = 1
    assert job.complete_previous() == 0
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
    job.cluster.restarts = 1
    job.told(status="running", attempt=0, step=50, rank=None, reason="x")
    if stopping == "terminated":
        job.terminated()
    job.killed_while_it_decides(1, stopping=stopping)
    assert job.reason == left


def test_a_node_is_excluded_though_the_script_is_killed_while_its_step_ends(job: Job) -> None:
    job.cluster.down, job.cluster.restarts = "n2", 2
    job.attempt = 1
    job.had(0, "node_failure", step=10, failing="n2")
    told = "; queued again; without n2, where two attempts have failed first"
    job.terminated()
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
    job.cluster.down, job.cluster.restarts = "n2", 2
    job.attempt = 1
    job.had(0, "node_failure", step=10, failing="n2")
    told = "; queued again; without n2, where two attempts have failed first"
    assert job.terminated(killed=False) == 1
    assert job.reason == f"node_failure: down: n2{told}"
    assert job.asked == ["update jobid=7 excnodelist=n2"]


@pytest.mark.parametrize("word", ["preempted", "requeued"])
def test_attempts_that_were_preempted_before_they_began_and_then_killed_are_not_idle(
    job: Job, word: str
) -> None:
    job.had(0, "preempted", step=100)
    job.told(status="preempted", attempt=0, step=100)
    for number in (1, 2, 3):
        job.had(number, word)
        (job.folder(number) / "reason").write_text(f"{word}: so; queued again; killed soon after\n")
        job.attempt = number + 1
        assert job.complete_previous() == 0
        assert not (job.folder(number) / "step").exists()
