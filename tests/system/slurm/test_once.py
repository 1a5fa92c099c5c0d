"""Jobs without restarts on a real Slurm cluster: what their short script leaves, and the status."""

from pathlib import Path

import pytest

import toolkit
from tests.conftest import Cluster, Until
from tests.support.slurm_site import Site, failure, output
from toolkit.slurm.run import SlurmRun

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

WAITS = """
import os, pathlib, signal, sys, time
def stop(*_):
    pathlib.Path(os.environ["TRAIN_RUN_DIR"], "saved-" + os.environ["RANK"]).touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(os.environ["TRAIN_RUN_DIR"], "ready-" + os.environ["RANK"]).touch()
while True:
    time.sleep(0.1)
"""

SEGFAULTS = """
import os, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), 11)
time.sleep(100)
"""

FAILS_LATER = """
import os, pathlib, time
folder = pathlib.Path(os.environ["TRAIN_RUN_DIR"])
(folder / ("ready-" + os.environ["RANK"])).touch()
while not (folder / "fail").exists():
    time.sleep(0.1)
os._exit(1)
"""


NOT_AGAIN = "not queued again (retries.requeue is 0)"


class Once:
    """Submits scripts for two nodes, without restarts."""

    def __init__(self, site: Site, folder: Path, until: Until) -> None:
        self.site, self.folder, self.until = site, folder, until

    def submit(self, script: str, **more: object) -> SlurmRun:
        path = self.folder / "script.py"
        path.write_text(script)
        wanted = {"name": "once", "script": str(path), "resources": {"nnodes": 2}, **more}
        plan = toolkit.plan(toolkit.JobSpec.model_validate(wanted), self.site.profile)
        assert plan.starts_once
        return self.site.launcher.submit(plan)

    def running(self, **more: object) -> SlurmRun:
        """Submit ranks that wait for a signal; return when all of them do."""
        run = self.submit(WAITS, **more)
        self.until(lambda: len(files(run, "ready-*")) == 2, "both ranks wait")
        return run


@pytest.fixture
def once(site: Site, tmp_path: Path, until: Until) -> Once:
    return Once(site, tmp_path, until)


def files(run: SlurmRun, pattern: str) -> list[Path]:
    assert run.run_dir is not None
    return list(run.run_dir.glob(pattern))


def left(run: SlurmRun) -> dict[str, str]:
    """Return the attempt's reason."""
    found = [*files(run, "logs/attempt-0/reason"), *files(run, "logs/attempt-0/exit_status")]
    return {path.name: path.read_text().strip() for path in found}


def test_a_job_that_ends_well_is_done(once: Once) -> None:
    run = once.submit("import os; print('rank', os.environ['RANK'])")
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    assert left(run) == {"reason": "done: all steps made", "exit_status": "0"}
    assert {"[rank 0] rank 0", "[rank 1] rank 1"} <= set(output(run).splitlines())


def test_a_failure_leaves_torchruns_status_and_its_report(once: Once) -> None:
    run = once.submit(SEGFAULTS)
    status = run.wait(300)
    assert status.state is toolkit.RunState.FAILED
    failed = run.failure()
    assert failed is not None and str(failed).endswith("killed by SIGSEGV")
    assert status.reason == f"failed: {failed}; {NOT_AGAIN}", failure(run)
    assert left(run) == {"reason": f"retryable: {failed}; {NOT_AGAIN}", "exit_status": "1"}


def test_a_missing_torchrun_is_said_to_have_kept_it_from_starting(once: Once) -> None:
    venv = once.folder / "venv/bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text("PATH=/usr/bin:/bin\n")
    once.site.profile = once.site.profile.model_copy(update={"venv": str(venv.parent)})
    status = once.submit(WAITS).wait(300)
    assert status.state is toolkit.RunState.FAILED
    assert "fatal: torchrun is not in PATH; set 'venv' or 'modules'" in status.reason


def test_cancel_lets_all_ranks_save(once: Once) -> None:
    run = once.running()
    run.cancel()
    status = run.wait(300)
    assert (status.state, status.reason) == (
        toolkit.RunState.CANCELLED,
        "cancelled: by toolkit cancel; not queued again",
    ), failure(run)
    assert left(run)["reason"] == "cancelled: by toolkit cancel; not queued again"
    assert len(files(run, "saved-*")) == 2


def test_scancel_lets_all_ranks_save(cluster: Cluster, once: Once) -> None:
    run = once.running()
    cluster.slurm("scancel", run.job_id)
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    once.until(lambda: left(run)["reason"] == "cancelled: by scancel; not queued again", "told")
    once.until(lambda: len(files(run, "saved-*")) == 2, "both have saved")


def test_out_of_time_lets_all_ranks_save(cluster: Cluster, once: Once) -> None:
    # The warning comes stop.grace + 30 s before the end, so at the next look of Slurm (30 s).
    run = once.running(stop={"grace": "3m"}, time_limit="10m")
    cluster.end_in(200, run.job_id)
    status = run.wait(300)
    assert status.state is toolkit.RunState.FAILED, failure(run)
    assert status.reason.endswith(f"walltime: out of time; {NOT_AGAIN}")
    assert left(run) == {"reason": f"walltime: out of time; {NOT_AGAIN}", "exit_status": "1"}
    assert len(files(run, "saved-*")) == 2


def test_a_script_that_slurm_kills_has_said_why(cluster: Cluster, once: Once) -> None:
    deaf = WAITS.replace("sys.exit(75)", "time.sleep(100)")
    run = once.submit(deaf, stop={"grace": "60s"})
    once.until(lambda: len(files(run, "ready-*")) == 2, "both ranks wait")
    cluster.slurm("scancel", run.job_id)
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    assert left(run)["reason"] == "cancelled: by scancel; killed soon after"


def test_a_node_that_restarts_unnoticed_by_slurm_does_not_hold_the_job(
    once: Once, cluster: Cluster
) -> None:
    """srun alone would wait for the lost task till the time limit, even after a cancel."""
    run = once.submit(FAILS_LATER, stop={"grace": "10s"})
    once.until(lambda: len(files(run, "ready-*")) == 2, "both ranks wait")
    cluster("power-off", "node2")
    cluster("power-on", "node2")
    assert run.run_dir is not None
    (run.run_dir / "fail").touch()
    assert run.wait(400).state is toolkit.RunState.FAILED, failure(run)
