"""Sites that are less tidy than the sandbox: prologs and commands print, jobs have GraceTime."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import toolkit
from tests.conftest import Cluster, Until
from tests.support.slurm_site import Site, failure
from toolkit.slurm import SlurmRun

pytestmark = pytest.mark.slurm

# A script without outcome.json, which ends when it is told to.
WAITS = """
echo "$TRAIN_ATTEMPT" >>"$TRAIN_RUN_DIR/begun-$RANK"
trap 'exit 143' TERM
until [ -e "$TRAIN_RUN_DIR/go" ]; do sleep 0.1; done
"""

FAILS = WAITS.replace(
    "sleep 0.1", '[ ! -e "$TRAIN_RUN_DIR/fail-$TRAIN_ATTEMPT" ] || exit 3; sleep 0.1'
)

PROLOG = """#!/bin/sh
echo "print Welcome to the cluster, user 7"
echo "print 2026"
echo "export SITE=untidy"
"""


def submit(site: Site, **more: object) -> SlurmRun:
    content = {"name": "waits", "command": ["bash", "-c", WAITS], "resources": {"nnodes": 2}}
    job = toolkit.JobSpec.model_validate({**content, "retries": {"requeue": 1}, **more})
    return site.launcher.submit(toolkit.plan(job, site.profile))


def begun(run: SlurmRun, attempt: int) -> bool:
    """Whether both ranks run in an attempt."""
    files = [Path(str(run.run_dir), f"begun-{rank}") for rank in (0, 1)]
    return all(path.exists() and f"{attempt}\n" in path.read_text() for path in files)


def go(run: SlurmRun) -> None:
    Path(str(run.run_dir), "go").touch()
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)


@pytest.fixture
def printing(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """Has the site's TaskProlog print before each task."""
    prolog = tmp_path / "prolog"
    prolog.write_text(PROLOG)
    prolog.chmod(0o755)
    tmp_path.chmod(0o755)
    with cluster.configured(f"TaskProlog={prolog}"):
        yield


def test_a_requeued_job_goes_on_where_the_sites_prolog_prints(
    printing: None, cluster: Cluster, site: Site, until: Until
) -> None:
    run = submit(site)
    until(lambda: begun(run, 0), "both ranks run")
    cluster.slurm("scontrol", "requeue", run.job_id)
    # As if Slurm had taken the nodes back before the first task began.
    for path in Path(str(run.run_dir), "logs/attempt-0").glob("began-*"):
        path.unlink()
    until(lambda: begun(run, 1), "both run again")
    go(run)
    assert "Welcome to the cluster" in "\n".join(run.logs()), "the prolog has printed"


@pytest.fixture
def slow_to_requeue(cluster: Cluster) -> Iterator[None]:
    """Has the site's default delays: of requeued jobs, and between SIGTERM and SIGKILL."""
    with cluster.configured(cred_expire="120", KillWait="30"):
        yield


@pytest.mark.slow  # the attempt of a busy machine may not be gone in the seconds that it is given
@pytest.mark.parametrize("how", ["by its script", "by preemption"])
def test_a_requeued_job_does_not_wait_for_its_credentials_to_expire(
    how: str, slow_to_requeue: None, cluster: Cluster, site: Site, until: Until
) -> None:
    low = site.profile.model_copy(update={"partition": "low"})
    site.profile = low if how == "by preemption" else site.profile
    run = submit(site, command=["bash", "-c", FAILS])
    until(lambda: begun(run, 0), "both ranks run")
    assert "cred_expire=120" in cluster.slurm("scontrol", "show", "config")
    if how == "by preemption":
        cluster.slurm(
            *("sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive"),
            *("--output=/dev/null", "--wrap=sleep 1"),
        )
    else:
        Path(str(run.run_dir), "fail-0").touch()
    until(lambda: begun(run, 1), "both run again")
    ended = Path(str(run.run_dir), "logs/attempt-0/exit_status").stat().st_mtime
    shown = cluster.slurm("env", "SLURM_TIME_FORMAT=%s", "scontrol", "show", "job", run.job_id)
    eligible = int(shown.partition("EligibleTime=")[2].split()[0])
    assert eligible < ended + 60, "it was to start before its credentials had expired"
    go(run)


WRAPPER = """#!/bin/sh
echo "*** Welcome: 3 jobs RUNNING, 12345 done ***"
printf '12345\\nnode1 idle\\n\\033[1;31mMaintenance on Friday\\033[0m\\r\\n'
echo "Loading cuda/12.8 ..." >&2
{real} "$@"
status=$?
echo "12346;other"
exit $status
"""


@pytest.fixture
def wrapped(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts scripts that print before each command of Slurm, on the login node and in jobs."""
    folder = tmp_path / "wrappers"
    folder.mkdir()
    path = cluster.environ["PATH"]
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sacct", "sinfo", "srun"):
        (folder / name).write_text(WRAPPER.format(real=shutil.which(name, path=path)))
        (folder / name).chmod(0o755)
    monkeypatch.setitem(cluster.environ, "PATH", f"{folder}:{path}")


def test_a_site_whose_commands_all_print_gives_the_right_answers(
    printing: None, wrapped: None, cluster: Cluster, site: Site, until: Until
) -> None:
    run, other = submit(site), submit(site, sbatch={"begin": "now+1hour"})
    assert other.status().state is toolkit.RunState.PENDING
    assert other.status().reason.startswith("BeginTime: its begin time has not been reached")
    other.cancel()
    assert other.status().state is toolkit.RunState.CANCELLED
    until(lambda: begun(run, 0), "both ranks run", seen=lambda: failure(run))
    assert run.status() == toolkit.RunStatus(state=toolkit.RunState.RUNNING, reason="")
    cluster.slurm("scontrol", "requeue", run.job_id)
    until(lambda: begun(run, 1), "both run again", seen=lambda: failure(run))
    assert run.status().state is toolkit.RunState.RUNNING, failure(run)
    again = site.launcher.open(run.record)
    again.cancel()
    assert again.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    site.launcher.resubmit(again)
    until(lambda: begun(run, 2), "both run once more", seen=lambda: failure(run))
    go(run)
    jobs = [job.job_id for job in again.jobs]
    assert jobs[0] == run.job_id and int(jobs[1]) > int(run.job_id), jobs


@pytest.fixture
def patient(cluster: Cluster, site: Site) -> Iterator[None]:
    """Submits to a partition that gives jobs some seconds after their preemption."""
    site.profile = site.profile.model_copy(update={"partition": "low"})
    cluster.slurm("scontrol", "update", "PartitionName=low", "GraceTime=20")
    yield
    cluster.slurm("scontrol", "update", "PartitionName=low", "GraceTime=0")


def test_a_preemption_with_grace_time_is_no_failure(
    patient: None, cluster: Cluster, site: Site, until: Until
) -> None:
    run = submit(site)
    for attempt in (0, 1):
        until(lambda attempt=attempt: begun(run, attempt), f"attempt {attempt} runs")
        high = ("--parsable", "--partition=high", "--nodes=4", "--exclusive")
        cluster.slurm("sbatch", *high, "--output=/dev/null", "--wrap=sleep 1")
    until(lambda: begun(run, 2), "the third attempt runs, though one failure is allowed")
    for attempt in (0, 1):
        reason = Path(str(run.run_dir), f"logs/attempt-{attempt}/reason").read_text()
        assert reason.startswith("preempted: Slurm has taken the nodes"), failure(run)
    go(run)
