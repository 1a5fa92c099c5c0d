"""Another attempt on the nodes that the job has, instead of a wait in Slurm's queue."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.batch_role import Role
from tests.support.ending_batch import Cluster, Job
from toolkit.rendering import payload
from toolkit.supervisor.batch_opening import NothingToDo, Start, open_batch_attempt
from toolkit.supervisor.evidence.job_log import JobLog

HELD = "==n1 alloc==\n==n2 alloc==\n"
BEGIN = 'for n in 0 1; do echo 3 >"$logs/began-$n"; done\n'
END = 'for n in 0 1; do echo {0} >"$logs/ended-$n"; done\n'
FAIL = BEGIN + END.format(1) + "exit 1\n"
FAILS_ONCE = f'case "$logs" in */attempt-0) {FAIL} ;; esac\n' + BEGIN + END.format(0)
STAYS = "started again on the same nodes"


@pytest.fixture
def role(tmp_path: Path) -> Role:
    role = Role(tmp_path, step=FAILS_ONCE)
    (role.state / "held").write_text(HELD)
    return role


def test_a_failed_attempt_is_followed_by_another_one_on_the_same_nodes(role: Role) -> None:
    role.step = (
        'echo "$TRAIN_ATTEMPT $TRAIN_ATTEMPT_BEGAN" >"$logs/told"; echo "of $logs"\n' + FAILS_ONCE
    )
    assert role.run(TRAIN_ATTEMPT_BEGAN="1000000000") == 0
    assert role.text("reason") == f"retryable: exit status 1; {STAYS}"
    assert (role.text("exit_status"), role.text("exit_status", 1)) == ("1", "0")
    assert role.text("reason", 1) == "done: all steps made"
    assert role.text("since", 1) == "0"
    assert role.asked("scontrol requeue") == role.asked("scontrol update") == []
    ports = [word for line in role.asked("srun") for word in line.split() if "endpoint" in word]
    assert len({*ports}) == 2, "no rank of the first attempt can meet those of the second"
    assert role.text("told") == "0 1000000000"
    number, began = role.text("told", 1).split()
    assert (number, int(began) > 1_700_000_000) == ("1", True)
    # Each attempt's part of the log begins where the one before has ended.
    begin = int(role.text("log", 1).split()[0])
    text = role.log.read_bytes()
    assert b"attempt 0 ended" in text[:begin] and b"attempt-1" not in text[:begin]
    assert not role.path("scheduled", 1).exists(), "it has waited for no nodes"


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("printf '==n1 alloc==\\n==n2 drng==\\n' >\"$STATE/held\"", "is drained"),
        ("printf '==n1 alloc==\\n==n2 mix*==\\n' >\"$STATE/held\"", "does not answer"),
        ("printf '==n1 alloc==\\n' >\"$STATE/held\"", "Slurm does not name one"),
        ('rm "$logs/ended-1"', "a node has not come to its end"),
        ("echo extern 3 >$STATE/steps", "the controller has missed the end of the step"),
        ("echo >$STATE/../bin/squeue", "the controller does not list the steps"),
        ('printf "n1\\nn1\\n" >"$logs/failing_node"', "two attempts have failed first on one"),
    ],
)
def test_a_job_that_may_need_other_nodes_is_queued_again(
    role: Role, what: str, reason: str
) -> None:
    role.step = FAIL.replace("exit 1", f"{what}; exit 1")
    assert role.run() == 1
    assert not role.path("", 1).exists(), reason
    assert role.text("reason").startswith("retryable: ")
    assert "; queued again" in role.text("reason")
    assert role.asked("scontrol requeue") == ["scontrol requeue 7"]


def test_the_next_attempt_waits_until_the_controller_has_noted_the_end_of_the_step(
    role: Role,
) -> None:
    """An srun that starts earlier would wait for this step's resources."""
    asks = """echo asked >>"$CALLS"
[ -e "$STATE/ended" ] || { touch "$STATE/ended"; echo ==7.3==; }
"""
    squeue = role.folder / "bin/squeue"
    squeue.write_text(squeue.read_text() + asks)
    assert role.run() == 0
    assert role.text("reason") == f"retryable: exit status 1; {STAYS}"
    calls = [call.split()[0] for call in role.asked("srun", "asked")]
    assert calls == ["srun", "asked", "asked", "srun"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGUSR1, "retryable: exit status 1; queued again"),
        (signal.SIGUSR2, "cancelled: by toolkit cancel; not queued again"),
    ],
)
def test_a_signal_ends_the_wait_for_the_end_of_the_step(
    role: Role, number: signal.Signals, reason: str
) -> None:
    squeue = role.folder / "bin/squeue"
    squeue.write_text(squeue.read_text() + 'echo ==7.3==; touch "$STATE/asked"\n')
    assert role.signalled(number, (role.state / "asked").exists) == 1
    assert role.text("reason") == reason
    queued = role.asked("scontrol requeue")
    assert queued == (["scontrol requeue 7"] if number == signal.SIGUSR1 else [])


def test_a_job_whose_supervisor_was_removed_is_queued_again_and_unpacks_it(
    role: Role, tmp_path: Path
) -> None:
    file = tmp_path / "supervisor.pyz"
    role.program = ("-ISu", str(file))
    for removed in (True, False):
        file.write_bytes(payload.archive("slurm"))
        role.run_dir = tmp_path / f"run-{removed}"
        role.step = FAILS_ONCE.replace("exit 1", f"rm {file}; exit 1" if removed else "exit 1")
        assert role.run() == (1 if removed else 0)
        assert role.path("", 1).exists() != removed


def test_failures_on_the_same_nodes_count_as_those_of_a_queued_job(role: Role) -> None:
    role.step, role.requeues = FAIL, 1
    assert role.run() == 1
    assert role.text("reason") == f"retryable: exit status 1; {STAYS}"
    assert role.text("reason", 1) == "retryable: exit status 1; gave up after 1 requeues"
    assert not role.path("", 2).exists()


TELLS = """cat >"$logs/../../outcome.json" <<END
{"status": "running", "attempt": $TRAIN_ATTEMPT, "step": %s, "rank": null, "reason": null}
END
"""


@pytest.mark.parametrize(
    ("step", "follow"),
    [
        ("$((5 + TRAIN_ATTEMPT))", [STAYS, STAYS, "gave up after 2 requeues"]),
        ("5", [STAYS, "queued again"]),
    ],
)
def test_what_makes_no_step_twice_in_a_row_is_queued_again(
    role: Role, step: str, follow: list[str]
) -> None:
    role.step = TELLS % step + FAIL
    assert role.run() == 1
    reasons = sorted(role.run_dir.glob("logs/attempt-*/reason"))
    assert [path.read_text().rpartition("; ")[2].strip() for path in reasons] == follow


def test_after_a_requeue_all_attempts_of_the_job_count(role: Role) -> None:
    role.requeues = 3
    role.step = (
        f'case "$logs" in */attempt-1) rm "$STATE/held"; touch "$STATE/held" ;; esac\n{FAIL}'
    )
    assert role.run() == 1
    assert role.text("reason", 1) == "retryable: exit status 1; queued again"
    (role.state / "restarts").write_text("1\n")
    role.run(SLURM_RESTART_COUNT="1")
    assert role.text("since", 2) == "0"
    role.requeues = 1
    (role.state / "restarts").write_text("2\n")
    role.run(SLURM_RESTART_COUNT="2")
    assert role.text("reason", 3).startswith("gave_up: gave up after 1 requeues")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGUSR1, "walltime: out of time; queued again"),
        (signal.SIGUSR2, "cancelled: by toolkit cancel; not queued again"),
    ],
)
def test_a_later_attempt_heeds_signals(role: Role, number: signal.Signals, reason: str) -> None:
    (role.state / "scancel").write_text('case "$*" in *TERM*) touch "$STATE/told" ;; esac\n')
    waits = 'while [ ! -e "$STATE/told" ]; do sleep 0.05; done\n'
    stops = 'for n in 0 1; do echo 1 | tee "$logs/ended-$n" >"$logs/stopped-$n"; done\n'
    role.step = f'case "$logs" in */attempt-0) {FAIL} ;; esac\n{BEGIN}{waits}{stops}'
    assert role.signalled(number, lambda: role.path("began-1", 1).exists()) == 1
    assert role.text("reason", 1) == reason


def test_a_cancellation_between_two_attempts_counts(role: Role) -> None:
    mark = role.run_dir / "cancel_requested"
    role.step = f'touch -d "now + 1 minute" {mark}\n{FAIL}'
    assert role.run() == 1
    assert role.text("reason", 1) == "cancelled: by toolkit cancel; not queued again"
    assert len(role.asked("srun")) == 1


@pytest.mark.parametrize("refuses", [False, True])
def test_a_supervisor_that_fails_as_its_attempt_ends_queues_the_job_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    job = Job(tmp_path, cluster=Cluster(down="n1:alloc n2:alloc", refuses=refuses))

    def fails() -> None:
        raise RuntimeError("boom")

    with job.batch() as batch:
        for node in (0, 1):
            (job.folder(0) / f"ended-{node}").write_text("1\n")
        monkeypatch.setattr(sys, "argv", [__file__])  # the program is still there
        monkeypatch.setattr(batch, "run", lambda: batch.conclude(1))
        monkeypatch.setattr(batch, "tell_stalls", fails)
        assert batch.supervised() == 1
        assert not batch.stays
    end = "not queued again" if refuses else "queued again"
    assert job.reason == f"lost: the supervisor failed: RuntimeError: boom; {end}"
    assert job.asked[0] == "requeue 7"


def test_who_has_taken_over_is_left_alone(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"logs/attempt-{number}").mkdir(parents=True)
        (tmp_path / f"logs/attempt-{number}/since").write_text("0\n")
    start = Start(str(tmp_path), "", 0, "", takes_turns=False, after=0)
    with pytest.raises(NothingToDo, match="attempt 1 has taken over"):
        open_batch_attempt(start, JobLog(os.devnull, 0))
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["attempt-0", "attempt-1"]
