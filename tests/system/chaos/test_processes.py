"""Processes that the kernel ends: a rank killed, in the job and beyond it; memory that runs out."""

import contextlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import toolkit
from tests.conftest import SANDBOX, Cluster, Until
from tests.support.slurm_site import Site, failure, nodes_of
from tests.system.chaos.frame import Trial, go_on, submit, unharmed
from tests.system.chaos.memory import limited

pytestmark = pytest.mark.slurm


@pytest.mark.slow  # drawn faults (test_drawn.py) kill ranks on Slurm, too
def test_a_rank_is_killed_twice_and_restarted_in_the_job_then_by_a_requeue(
    site: Site, reference: Trial, until: Until
) -> None:
    trial = submit(site, "retries.in_job=1")
    until(trial.saved, "a first checkpoint")
    # A torchrun that sees the other one wait before its own rank's end counts no restart, so the
    # torchrun of rank 0, whose count the events have, must be the first to notice.
    trial.kill_rank(0)
    until(lambda: trial.events("resume"), "restarted in the job")
    (resumed,) = trial.events("resume")
    assert (resumed["attempt"], resumed["restart"]) == (0, 1)
    until(lambda: any(e["restart"] for e in trial.events("checkpoint")), "a checkpoint of it")
    trial.kill_rank(0)
    until(lambda: trial.events("resume", attempt=1), "started again")
    unharmed(trial, reference, until)
    assert trial.reasons()[0].startswith("retryable: ")
    assert len(trial.reasons()) == 2


@pytest.mark.slow
def test_a_killed_torchrun_is_a_failure_of_its_node_and_counts(
    cluster: Cluster, site: Site, reference: Trial, until: Until
) -> None:
    """Slurm stops the other node's ranks with SIGTERM, which is no preemption of the run."""
    trial = submit(site, "retries.requeue=1")
    until(trial.saved, "a first checkpoint")
    _, node = nodes_of(cluster, trial.run)
    trial.kill_torchrun(1)
    until(lambda: trial.saved(attempt=1), "a checkpoint of the second attempt")
    reason = f"retryable: torchrun was killed on {node} (exit status 137)"
    assert trial.reasons()[0].startswith(f"{reason}, at step ")
    assert trial.reasons()[0].endswith("; started again on the same nodes")
    assert (trial.attempt(0) / "failing_node").read_text() == f"{node}\n"
    # A kill of the first step that Slurm sends again must not hit a step of the same number.
    assert not trial.step_numbers(0) & trial.step_numbers(1)
    trial.kill_torchrun(1, attempt=1)
    status = trial.run.wait(300)
    assert status.state is toolkit.RunState.FAILED, failure(trial.run)
    assert trial.reasons()[1].endswith("; gave up after 1 requeues")
    unharmed(go_on(trial, site), reference, until)


@pytest.mark.slow
def test_a_killed_batch_script_is_named_and_the_run_goes_on_when_told_to(
    cluster: Cluster, site: Site, reference: Trial, until: Until
) -> None:
    """Slurm then calls the job FAILED and does not queue it again; its ranks call it a stop."""
    trial = submit(site)
    until(trial.saved, "a first checkpoint")
    trial.kill_batch_script(cluster)
    status = trial.run.wait(300)
    assert status.state is toolkit.RunState.FAILED, failure(trial.run)
    assert status.reason.startswith("FAILED: the batch script was killed, or could not write why")
    assert "`toolkit resubmit` continues" in status.reason
    trial = go_on(trial, site)
    trial.wait()
    assert trial.run.status().state is toolkit.RunState.SUCCEEDED, failure(trial.run)


@pytest.mark.slow
@pytest.mark.parametrize("requeue", [0, 3])
def test_a_killed_slurmstepd_keeps_no_job_from_ending_with_its_ranks(
    cluster: Cluster, site: Site, requeue: int, reference: Trial, until: Until
) -> None:
    """srun would wait for that node until the time limit."""
    trial = submit(site, f"retries.requeue={requeue}")
    until(trial.saved, "a first checkpoint")
    trial.kill_slurmstepd(cluster, nodes_of(cluster, trial.run)[1])
    unharmed(trial, reference, until)
    assert (trial.attempt(0) / "hung").exists()


@pytest.mark.slow
def test_out_of_memory_ends_the_job_with_the_node_s_name_and_it_goes_on_when_told_to(
    cluster: Cluster, site: Site, reference: Trial, until: Until
) -> None:
    with contextlib.ExitStack() as stack:
        for node in ("node1", "node2", "node3", "node4"):
            stack.enter_context(limited(cluster, node, 1 << 30))
        trial = submit(site, "retries.in_job=4")
        until(trial.saved, "a first checkpoint")
        _, node = nodes_of(cluster, trial.run)
        (trial.folder / "hungry-1").touch()
        status = trial.run.wait(300)
        (trial.folder / "hungry-1").unlink()
    assert status.state is toolkit.RunState.FAILED, failure(trial.run)
    (reason,) = trial.reasons()
    peak = r"\(rank 1 had used \d+ MiB\)"
    killed = f"the kernel killed a process on {node} {peak}"
    assert re.fullmatch(f"fatal: out of memory: {killed}; not queued again", reason), reason
    # The second start was ended; of itself it would have run out of memory, too.
    starts = list(trial.attempt(0).glob("node-1/*/attempt_*"))
    assert len(starts) == 2, starts
    unharmed(go_on(trial, site), reference, until)


@pytest.mark.slow
def test_memory_that_accounting_limits_is_told_and_not_tried_again(
    tmp_path: Path, reference: Trial, until: Until
) -> None:
    """Slurm's OverMemoryKill, which leaves no count of the kernel."""
    folder = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
    shape = ("--nodes=2", "--kill-wait=5", "--over-memory-kill", "--dir", str(folder))
    subprocess.run([SANDBOX, "up", *shape], check=True)
    try:
        trial = submit(Site(Cluster(folder), tmp_path))
        until(trial.saved, "a first checkpoint")
        (trial.folder / "hungry-1").touch()
        status = trial.run.wait(300)
        (trial.folder / "hungry-1").unlink()
    finally:
        subprocess.run([SANDBOX, "down", "--dir", str(folder)], check=True)
        shutil.rmtree(folder)
    assert status.state is toolkit.RunState.FAILED, failure(trial.run)
    (reason,) = trial.reasons()
    assert reason.startswith("fatal: out of memory: StepId="), reason
    assert " exceeded memory limit (" in reason


@pytest.mark.slow
def test_a_kill_that_slurm_sends_again_does_not_hit_the_next_attempt(
    reference: Trial, tmp_path: Path, until: Until
) -> None:
    """At Slurm's own time-outs (KillWait 30 s, MessageTimeout 10 s), with a rank that stops slowly.

    slurmctld asks its node once more a minute later. A requeued job has the same id.
    """
    folder = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
    shape = ("--nodes=4", "--kill-wait=30", "--message-timeout=10", "--dir", str(folder))
    subprocess.run([SANDBOX, "up", *shape], check=True)
    try:
        cluster = Cluster(folder)
        trial = submit(Site(cluster, tmp_path))
        until(trial.saved, "a first checkpoint")
        trial.pace(20)
        steps = trial.steps()
        until(lambda: trial.steps() > steps + 1, "a slow step has begun")
        trial.kill_torchrun(1)
        until(lambda: trial.processes_of(1), "it is queued again and started")
        trial.pace(0.5)
        unharmed(trial, reference, until, pace=0.5)
    finally:
        subprocess.run([SANDBOX, "down", "--dir", str(folder)], check=True)
        shutil.rmtree(folder)
    assert len(trial.reasons()) == 2, trial.reasons()
