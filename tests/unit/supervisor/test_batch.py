"""The program on Slurm's batch host, as a process: signals, files, exit statuses."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.support.batch_role import Role
from toolkit.supervisor.attempt import open_attempt

BOTH_BEGAN = 'echo 3 >"$logs/began-0"; echo 3 >"$logs/began-1"\n'
BOTH_END = 'for n in 0 1; do echo {0} >"$logs/ended-$n"; done\n'
FAILS = BOTH_BEGAN + BOTH_END.format(1) + "exit 1"
STOPS = (
    BOTH_BEGAN
    + 'while [ ! -e "$STATE/told" ]; do sleep 0.05; done\n'
    + 'for n in 0 1; do echo 1 | tee "$logs/ended-$n" >"$logs/stopped-$n"; done; exit 0'
)
"""A step that runs until scancel has told its nodes to stop."""


@pytest.fixture
def role(tmp_path: Path) -> Role:
    role = Role(tmp_path)
    (role.state / "scancel").write_text('case "$*" in *TERM*) touch "$STATE/told" ;; esac\n')
    return role


def test_an_attempt_leaves_its_files(role: Role) -> None:
    role.step = 'env >"$STATE/environ"\n' + BOTH_BEGAN + BOTH_END.format(0)
    (role.log).write_text("the site's banner\n")
    assert role.run(SLURM_CPUS_PER_TASK="4") == 0
    expected = {
        "reason": "done: all steps made",
        "exit_status": "0",
        "nodes": "n1\nn2",
        "since": "0",
        "log": f"18 {role.log}",
    }
    assert {name: role.text(name) for name in expected} == expected
    assert not role.path("reserve").exists()
    (step,) = role.asked("srun")
    logs = role.path("")
    assert step == (
        f"srun --nodes=2 node {str(logs).rstrip('/')} -- torchrun --rdzv-endpoint=n1:61007 "
        "--rdzv-id=7-0 --tee=3 -m train"
    )
    environ = (role.state / "environ").read_text().splitlines()
    assert {f"TRAIN_RUN_DIR={role.run_dir}", "TRAIN_ATTEMPT=0", "SRUN_CPUS_PER_TASK=4"} <= {
        *environ
    }
    assert f"probe: attempt 0 on n1,n2, run directory {role.run_dir}" in role.log.read_text()


def test_a_failed_job_is_queued_again_and_its_next_start_is_the_next_attempt(role: Role) -> None:
    role.step = FAILS
    assert role.run() == 1
    reason = "retryable: exit status 1; queued again"
    assert role.text("reason") == reason
    assert role.asked("scontrol requeue") == ["scontrol requeue 7"]
    (role.state / "restarts").write_text("1\n")
    role.step = "exit 0"
    assert role.run(SLURM_RESTART_COUNT="1") == 0
    assert role.text("reason", 1) == "done: all steps made"
    assert role.text("since", 1) == "0"


def test_without_requeues_a_failure_ends_the_job(role: Role) -> None:
    role.requeues, role.step = 0, FAILS.replace("exit 1", "exit 3")
    assert role.run() == 3
    assert role.text("reason").endswith("; not queued again (retries.requeue is 0)")
    assert role.asked("scontrol requeue") == []


def test_an_earlier_run_is_never_overwritten(role: Role) -> None:
    assert role.run() == 0
    assert role.run() == 1
    assert f"already holds a run; to go on with it: sbatch FILE {role.run_dir} continue" in (
        role.log.read_text()
    )
    assert not role.path("", 1).exists()
    role.mode = "continue"
    assert role.run() == 0
    assert role.text("since", 1) == "1"


def test_a_restart_count_of_an_outer_job_is_no_attempt(role: Role) -> None:
    """sbatch inside a job inherits its variables; the controller knows better."""
    role.step = 'echo "restarts: $SLURM_RESTART_COUNT" >"$STATE/seen"'
    assert role.run(SLURM_RESTART_COUNT="3") == 0
    assert role.text("since") == "0"
    assert (role.state / "seen").read_text() == "restarts: \n"


# ---- Stops


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (signal.SIGUSR1, "walltime: out of time; queued again"),
        (signal.SIGUSR2, "cancelled: by toolkit cancel; not queued again"),
    ],
)
def test_a_stop_reaches_the_nodes_by_scancel_since_srun_answers_term_with_kill(
    role: Role, number: signal.Signals, word: str
) -> None:
    role.step = f"trap 'echo killed >>\"$STATE/srun_got\"' TERM\n{STOPS}"
    assert role.signalled(number, lambda: role.path("began-1").exists()) == 1
    assert role.text("reason") == word
    assert role.text("stopping") == word.partition(":")[0]
    assert role.asked("scancel") == ["scancel --signal=TERM 7.3"]
    assert not (role.state / "srun_got").exists()


def test_a_stop_before_a_task_has_begun_goes_to_srun(role: Role) -> None:
    role.step = (
        "trap 'for n in 0 1; do echo 1 >\"$logs/ended-$n\"; done; exit 1' USR1\n"
        'touch "$STATE/runs"\nwhile :; do sleep 0.05; done'
    )
    assert role.signalled(signal.SIGUSR2, (role.state / "runs").exists) == 1
    assert role.text("reason") == "cancelled: by toolkit cancel; not queued again"
    assert role.asked("scancel") == []


def test_the_first_stop_counts(role: Role) -> None:
    role.step = STOPS.replace("done", 'done; sleep 0.2; kill -USR2 "$PPID"; sleep 0.2', 1)
    assert role.signalled(signal.SIGUSR1, lambda: role.path("began-1").exists()) == 1
    assert role.text("reason") == "walltime: out of time; queued again"


def test_a_script_that_is_killed_soon_after_slurms_term_has_said_why(role: Role) -> None:
    role.step = BOTH_BEGAN + "while :; do sleep 0.05; done"
    (role.state / "job_state").write_text("COMPLETING\n")
    (role.state / "down").write_text("==n2==\n")
    process = role.start()
    role.wait(process, lambda: role.path("began-1").exists())
    process.send_signal(signal.SIGTERM)
    reason = "node_failure: down: n2; killed soon after"
    role.wait(process, lambda: role.path("reason").exists() and role.text("reason") == reason)
    process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((role.state / "srun").read_text()), signal.SIGKILL)
    assert role.text("failing_node") == "n2"


@pytest.mark.parametrize("early", ["USR1", "USR2", "TERM"])
def test_a_signal_that_came_before_the_supervisor_is_heeded(role: Role, early: str) -> None:
    role.options = [f"--signals={early}"]
    (role.state / "job_state").write_text("COMPLETING\n" if early == "TERM" else "RUNNING\n")
    assert role.run() == 1
    words = {"USR1": "walltime: ", "USR2": "cancelled: by toolkit", "TERM": "cancelled: by scancel"}
    assert role.text("reason").startswith(words[early])
    assert role.asked("srun") == []


@pytest.mark.parametrize("asks", ["show job", "hostnames"])
def test_slurms_term_while_the_script_begins_is_no_success(role: Role, asks: str) -> None:
    """It comes to what the script has started, too; at its first question, it has no folder."""
    (role.state / "scontrol").write_text(
        f'case "$*" in *"{asks}"*) kill -TERM $PPID; kill -TERM $$ ;; esac\n'
    )
    (role.state / "job_state").write_text("COMPLETING\n")
    (role.state / "restarts").write_text("1\n")
    assert role.run(SLURM_RESTART_COUNT="1") == 1
    assert role.text("reason") == "cancelled: by scancel; not queued again"
    assert role.asked("srun") == []


def test_scontrol_answers_though_slurm_ends_what_the_script_has_started(role: Role) -> None:
    """Slurm's TERM of a preemption reaches scontrol, too, maybe before it reaches this program."""
    (role.state / "scontrol").write_text("kill -TERM $$\n")
    assert role.run() == 0
    assert role.text("nodes") == "n1\nn2"


def test_the_term_of_its_own_requeue_does_not_change_why_an_attempt_has_ended(role: Role) -> None:
    role.step = FAILS
    (role.state / "scontrol").write_text('case "$*" in requeue*) kill -TERM $PPID ;; esac\n')
    assert role.run() == 1
    assert role.text("reason").startswith("retryable: ")


def test_after_slurms_term_srun_may_say_0_though_torchrun_has_not_come_to_its_end(
    role: Role,
) -> None:
    role.step = BOTH_BEGAN + 'while [ ! -e "$STATE/stop" ]; do sleep 0.05; done; exit 0'
    (role.state / "job_state").write_text("COMPLETING\n")
    process = role.start()
    role.wait(process, lambda: role.path("began-1").exists())
    process.send_signal(signal.SIGTERM)
    role.wait(process, lambda: role.path("reason").exists())
    (role.state / "stop").touch()
    assert process.wait(timeout=60) == 1
    assert role.text("reason") == "cancelled: by scancel; not queued again"


# ---- `toolkit cancel` leaves a mark before its signal


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
    role: Role, mode: str, ended: float | None, reason: str
) -> None:
    """Not by one that an earlier attempt has answered, whose end is `ended` here."""
    role.mode, attempt = mode, int(mode == "continue")
    role.path("", 0).mkdir(parents=True) if attempt else (role.run_dir / "logs").mkdir(parents=True)
    mark = role.run_dir / "cancel_requested"
    mark.touch()
    os.utime(mark, (1.0, 1.0))
    if ended is not None:
        role.path("exit_status").touch()
        os.utime(role.path("exit_status"), (ended, ended))
    role.run()
    assert role.text("reason", attempt).startswith(reason)


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
    role: Role, marked: float, before: str, reason: str
) -> None:
    role.path("").mkdir(parents=True)
    mark = role.run_dir / "cancel_requested"
    times = {role.path("since"): 1.0, role.path("exit_status"): 9.0, mark: marked}
    for path, time in times.items():
        path.write_text("0\n")
        os.utime(path, (time, time))
    role.path("reason").write_text(f"{before}\n")
    (role.state / "restarts").write_text("1\n")
    role.run(SLURM_RESTART_COUNT="1")
    assert role.text("reason", 1).startswith(reason)


# ---- srun


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        ("srun: error: Node failure on n1", 0, "node_failure: down: n1; queued again"),
        (
            "srun: error: Unable to contact slurm controller (connect failure)",
            1,
            "retryable: srun could not start torchrun: Unable to contact slurm controller "
            "(connect failure) (exit status 1); queued again",
        ),
        (
            "slurmstepd-n1: error: TaskProlog failed status=1\n"
            "srun: error: n1: task 0: Exited with exit code 1",
            137,
            "retryable: TaskProlog failed status=1 on n1 (exit status 137); queued again",
        ),
    ],
    ids=["lost a node", "no controller", "prolog"],
)
def test_what_srun_says_is_the_reason_where_torchrun_says_nothing(
    role: Role, error: str, status: int, reason: str
) -> None:
    """srun ends with 0 where Slurm has lost a node: no step was made for that."""
    role.step = f"echo '{error}' >&2; exit {status}"
    assert role.run() == (status or 1)
    assert role.text("reason") == reason


def test_steps_after_a_requeue_get_numbers_that_no_late_kill_can_mean(role: Role) -> None:
    """slurmctld sends a kill that a node has not confirmed again, and a step of the same number
    in the next attempt would be taken for the one to be killed."""
    role.step = FAILS.replace("echo 3", "echo 4")
    assert role.run() == 1
    (role.state / "restarts").write_text("1\n")
    role.step = "exit 0"
    numbers = role.folder / "bin/srun"
    numbers.write_text(
        numbers.read_text().replace("SLURM_STEP_ID=3", '$(("$(cat "$STATE/n")" + 1))')
    )
    counted = 'n=$(($(cat "$STATE/n") + 1)); echo $n >"$STATE/n"; echo "banner 17"; '
    numbers.write_text(
        numbers.read_text().replace(
            'echo $(("$(cat "$STATE/n")" + 1))', counted + "echo SLURM_STEP_ID=$n"
        )
    )
    (role.state / "n").write_text("1\n")
    assert role.run(SLURM_RESTART_COUNT="1") == 0
    # Step 2 has 3 behind it, which is free; 3 would have 4 behind it.
    assert len(role.asked("srun --export=ALL")) == 1
    (role.state / "n").write_text("2\n")
    (role.state / "restarts").write_text("2\n")
    assert role.run(SLURM_RESTART_COUNT="2") == 0
    assert len(role.asked("srun --export=ALL")) == 1 + 2, "3, whose next one is taken, and 4"


# ---- The run directory


def test_a_run_directory_removed_during_the_run_ends_it_for_good(role: Role) -> None:
    role.step = 'rm -r "$logs"; exit 1'
    assert role.run() == 1
    gone = f"{role.run_dir} was removed during the run"
    assert role.text("reason") == f"fatal: {gone}; not queued again"
    # ... and if Slurm or an operator queues the job again.
    (role.state / "restarts").write_text("1\n")
    assert role.run(SLURM_RESTART_COUNT="1") == 1
    again = f"sbatch FILE {role.run_dir} continue"
    assert role.text("reason", 1) == f"fatal: {gone}; to begin at step 0: {again}"
    assert role.text("exit_status", 1) == "1"


@pytest.mark.parametrize("begun", [True, False])
def test_a_start_after_a_requeue_refuses_an_empty_run_directory(role: Role, begun: bool) -> None:
    """Unless no earlier start has reached the script, as on a node that did not come up."""
    if begun:
        role.log.write_text("a: attempt 0 on node1, run directory run\n")
    (role.state / "restarts").write_text("1\n")
    assert role.run(SLURM_RESTART_COUNT="1") == int(begun)
    assert role.text("reason").startswith("fatal: " if begun else "done: ")


def test_a_step_without_its_run_directory_is_stopped_while_it_runs(role: Role) -> None:
    """torchrun would start the ranks again at step 0."""
    role.step = BOTH_BEGAN + 'rm -r "$logs"; while [ ! -e "$STATE/told" ]; do sleep 0.05; done'
    role.step = role.step.replace("while", "trap 'exit 1' USR1; while")
    assert role.run() == 1
    assert role.text("reason").startswith("fatal: ")


# ---- What a job needs


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--need-variable=NO_SUCH"], "NO_SUCH: is a secret of this job; export it first"),
        (["--need=/no/such"], "the folder of a mount is missing: /no/such"),
        (
            ["--need-program=no-such-torchrun,neither"],
            "no-such-torchrun is not in PATH; set 'modules' in the profile",
        ),
    ],
)
def test_what_keeps_a_job_from_starting_is_fatal(role: Role, options: list[str], why: str) -> None:
    role.options = options
    assert role.run() == 1
    assert role.text("reason") == f"fatal: {why}"
    assert f"probe: {why}\n" in role.log.read_text()
    assert role.text("exit_status") == "1"


# ---- Mistakes of the supervisor itself


def test_a_supervisor_that_fails_says_so_and_is_started_again_once(role: Role) -> None:
    """Its log has the traceback; a second failure in a row ends the job."""
    breaks = 'case "$*" in *hostnames*) mkdir "$RUN/logs/attempt-$N/nodes" ;; esac\n'
    (role.state / "scontrol").write_text(breaks)
    assert role.run(RUN=str(role.run_dir), N="0") == 1
    reason = role.text("reason")
    assert reason.startswith("lost: the supervisor failed: IsADirectoryError: ")
    assert reason.endswith("; queued again")
    assert "Traceback (most recent call last)" in role.log.read_text()
    assert len(role.asked("scontrol requeue")) == 1
    (role.state / "restarts").write_text("1\n")
    assert role.run(RUN=str(role.run_dir), N="1", SLURM_RESTART_COUNT="1") == 1
    assert role.text("reason", 1).endswith("; not queued again")
    assert len(role.asked("scontrol requeue")) == 1


def test_outside_of_a_job_it_says_what_is_missing(role: Role) -> None:
    role.environ = {"SLURM_JOB_ID": ""}
    assert role.run() == 1
    assert role.log.read_text() == "probe: not inside a job of Slurm: SLURM_JOB_ID is not set\n"


# ---- What no start can mend is said before nodes are held


@pytest.mark.parametrize(
    ("program", "text", "why"),
    [
        ("getent", "exit 2", "fatal: the name n1 does not resolve on that node itself"),
        ("scontrol", None, "fatal: scontrol is not in PATH on the first node"),
    ],
)
def test_what_the_ranks_could_not_do_without_is_looked_for(
    role: Role, program: str, text: str | None, why: str
) -> None:
    if text is None:
        (role.folder / "bin" / program).unlink()
    else:
        (role.folder / "bin" / program).write_text(f"#!/bin/sh\n{text}\n")
    assert role.run(**({} if text else {"PATH": str(role.folder / "bin")})) == 1
    assert role.text("reason").startswith(why)
    assert role.asked("srun") == []


def test_a_server_of_names_that_is_away_proves_nothing(role: Role) -> None:
    (role.folder / "bin/getent").write_text("#!/bin/sh\nexit 1\n")
    assert role.run() == 0


def cancelled(run_dir: Path) -> Path:
    """Write a run that was cancelled; return the mark of the cancellation."""
    before = run_dir / "logs/attempt-0"
    before.mkdir(parents=True)
    for name, text in (("since", "0"), ("reason", "cancelled: so"), ("exit_status", "1")):
        (before / name).write_text(text + "\n")
    mark = run_dir / "cancel_requested"
    mark.touch()
    os.utime(mark, (1, 1))
    return mark


def test_a_job_that_continues_a_cancelled_run_revokes_its_cancellation(tmp_path: Path) -> None:
    """Else the next `toolkit cancel` would count as the second one, which kills at once."""
    step = "echo 4 >$logs/began-0; echo 0 >$logs/ended-0; echo 0 >$logs/ended-1"
    role = Role(tmp_path, mode="continue", step=step)
    mark = cancelled(role.run_dir)
    role.run()
    assert "attempt 1 on" in role.log.read_text()
    assert not mark.exists()


def test_a_run_on_this_machine_that_is_continued_revokes_its_cancellation(tmp_path: Path) -> None:
    mark = cancelled(tmp_path)
    open_attempt(str(tmp_path), "continue")
    assert not mark.exists()
