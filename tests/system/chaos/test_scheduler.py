"""A scheduler that is down, that preempts a run, or that gets the command to end it."""

from collections.abc import Callable

import pytest

import toolkit
from tests.conftest import Cluster, Until
from tests.support.slurm_site import Site, failure
from tests.system.chaos.frame import STEPS, Trial, consistent, go_on, submit, unharmed

pytestmark = pytest.mark.slurm


@pytest.mark.slow
def test_the_controller_is_away_when_a_rank_dies_and_when_the_job_ends(
    cluster: Cluster, site: Site, reference: Trial, until: Until
) -> None:
    trial = submit(site)
    until(trial.saved, "a first checkpoint")
    cluster("stop", "slurmctld")
    try:
        trial.kill_rank(1)
        until(lambda: trial.reasons()[0].endswith("; queued again"), "it wants to be queued again")
        assert trial.processes(), "its script waits for the controller"
    finally:
        cluster("start", "slurmctld")
    until(lambda: trial.saved(attempt=1), "it is started again, and trains")
    cluster("stop", "slurmctld", "--kill")
    trial.pace(0)
    until(lambda: trial.reasons()[1].startswith("done"), "it ends meanwhile")
    cluster("start", "slurmctld")
    unharmed(trial, reference, until)
    assert len(trial.reasons()) == 2


@pytest.mark.slow
def test_a_requeue_of_a_suspended_job_is_no_failure(
    cluster: Cluster, site: Site, reference: Trial, until: Until
) -> None:
    """Its script is stopped, and killed before it can say why it ends."""
    trial = submit(site, "retries.requeue=1")
    until(trial.saved, "a first checkpoint")
    cluster.slurm("scontrol", "suspend", trial.job_id)
    cluster.slurm("scontrol", "requeuehold", trial.job_id)
    until(lambda: trial.run.status().state is toolkit.RunState.PENDING, "it is held")
    cluster.slurm("scontrol", "release", trial.job_id)
    until(lambda: trial.events("resume", attempt=1), "started again")
    unharmed(trial, reference, until)
    assert trial.reasons()[0] == "requeued: by an operator"


@pytest.mark.slow
def test_preemption_and_walltime_cost_a_run_nothing_but_time(
    cluster: Cluster, site: Site, reference: Trial, until: Until
) -> None:
    more = ("stop.grace=3m", "time_limit=10m", "retries.requeue=1")
    trial = submit(site, *more, pace=0.3, partition="low")
    until(trial.saved, "a first checkpoint")
    urgent = cluster.slurm(
        *("sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive"),
        *("--output=/dev/null", "--wrap=sleep 1"),
    ).strip()
    until(lambda: trial.saved(attempt=1), "it goes on after the urgent job")
    # KillWait (5 s) may end its script before the script knows why, or has reported everything.
    said, killed = trial.reasons()[0], not (trial.attempt(0) / "exit_status").exists()
    why = "preempted: Slurm has taken the nodes; "
    assert said == f"{why}queued again" or (
        killed and said.startswith((why, "terminated: by Slurm"))
    ), said
    assert "JobState=COMPLETED" in cluster.slurm("scontrol", "show", "job", urgent)
    # The warning comes stop.grace + 30 s before the end, at Slurm's next look (every 30 s).
    trial.pace(1)
    cluster.end_in(200, trial.run.job_id)
    until(lambda: trial.events("resume", attempt=2), "it goes on with new time")
    assert trial.reasons()[1] == "walltime: out of time; queued again"
    for attempt in (0, 1):
        (resumed,) = trial.events("resume", attempt + 1)
        if stopped := trial.events("stopped", attempt):
            assert resumed["step"] == stopped[0]["step"], "no step was lost"
        else:  # KillWait was over before
            assert attempt == 0, "who is out of time has had the whole grace"
            saved = trial.events("checkpoint", attempt)[-1]
            assert resumed["step"] >= saved["step"], "nothing was lost that was saved"
    unharmed(trial, reference, until)
    assert len(trial.reasons()) == 3


@pytest.mark.slow
def test_scancel_at_any_moment_leaves_a_run_that_goes_on(
    cluster: Cluster, site: Site, reference: Trial, until: Until
) -> None:
    trial = submit(site, pace=0.02, every=1)  # so that it is nearly always in a checkpoint
    moments: dict[str, Callable[[int], object]] = {
        "before it has a directory": lambda n: True,
        "as it has its directory": lambda n: trial.attempt(n).exists(),
        "as its ranks meet": lambda n: (trial.attempt(n) / "began-1").exists(),
        "as they have met": lambda n: trial.events("start", n),
        "in its first steps": lambda n: list(trial.folder.glob(f"{n}-*")),
        "in a checkpoint": lambda n: list(trial.run_dir.glob(f"checkpoints/attempt-{n}/*.tmp")),
        "at its end": lambda n: trial.steps() >= STEPS - 10,
    }
    for moment, reached in moments.items():
        number = len(trial.reasons())
        trial.pace(0.0 if moment == "at its end" else 0.02)
        until(lambda reached=reached, number=number: reached(number), moment)
        cluster.slurm("scancel", trial.job_id)
        status = trial.run.wait(300)
        assert status.state in (toolkit.RunState.CANCELLED, toolkit.RunState.SUCCEEDED), (
            f"{moment}: {failure(trial.run)}"
        )
        until(
            lambda trial=trial: not trial.processes(), f"{moment}: no process is left on any node"
        )
        consistent(trial)
        assert all(trial.reasons()), f"{moment}: {trial.reasons()}"
        if status.state is toolkit.RunState.SUCCEEDED:
            break
        # "terminated": killed after KillWait, before the script could find out the cause.
        words = {reason.partition(":")[0] for reason in trial.reasons()}
        assert words <= {"cancelled", "terminated"}, f"{moment}: {trial.reasons()}"
        go_on(trial, site)
    unharmed(trial, reference, until)
