"""Batch scripts without a supervisor on a real Slurm cluster: srun and torchrun alone."""

from pathlib import Path

import pytest

import toolkit
from tests.conftest import Until
from tests.support.slurm_site import Site, failure, output
from toolkit.slurm.run import SlurmRun

pytestmark = pytest.mark.slurm

RANK = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(os.environ["TRAIN_RUN_DIR"]), os.environ["RANK"]
if (folder / "saved-0").exists():
    print("goes on from", (folder / f"saved-{rank}").read_text())
    sys.exit()
def stop(*_):
    time.sleep(2 * int(rank))
    (folder / f"saved-{rank}").write_text("step 3")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
(folder / f"ready-{rank}").touch()
while True:
    time.sleep(0.1)
"""


def test_slurms_warning_lets_ranks_write_a_checkpoint_from_which_the_next_job_goes_on(
    site: Site, tmp_path: Path, until: Until
) -> None:
    """The rank of the second node needs longer, and the end of the first does not kill it."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    wanted = {"name": "alone", "script": str(script), "resources": {"nnodes": 2}}
    profile = site.profile.model_copy(update={"supervisor": "none"})
    plan = toolkit.plan(toolkit.JobSpec.model_validate(wanted), profile)
    assert any("has no supervisor" in note for note in plan.notes)
    run = site.launcher.submit(plan)
    assert run.run_dir is not None
    folder = run.run_dir
    until(lambda: len(list(folder.glob("ready-*"))) == 2, "both ranks wait")
    job = run.record.uri.rpartition("/")[2]
    site.cluster.slurm("scancel", "--batch", "--signal=USR1", job)
    assert run.wait(120).state is toolkit.RunState.FAILED
    assert (folder / "logs/attempt-0/exit_status").read_text() == "1\n"
    assert {path.name for path in folder.glob("saved-*")} == {"saved-0", "saved-1"}
    again = site.launcher.resubmit(run)
    assert isinstance(again, SlurmRun)
    assert again.wait(120).state is toolkit.RunState.SUCCEEDED, failure(again)
    lines = set(output(again).splitlines())
    assert {"[rank 0] goes on from step 3", "[rank 1] goes on from step 3"} <= lines


def test_a_failure_of_a_rank_is_the_jobs(site: Site, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('no data')\n"
    )
    wanted = {
        "name": "alone",
        "script": str(script),
        "resources": {"nnodes": 2},
        "retries": {"in_job": 0},
    }
    profile = site.profile.model_copy(update={"supervisor": "none"})
    run = site.launcher.submit(toolkit.plan(toolkit.JobSpec.model_validate(wanted), profile))
    assert run.wait(120).state is toolkit.RunState.FAILED
    found = run.failure()
    assert found is not None and "ValueError: no data" in str(found)


def test_a_chain_needs_a_supervisor(site: Site) -> None:
    profile = site.profile.model_copy(update={"supervisor": "none"})
    plan = toolkit.plan(toolkit.JobSpec(name="alone", module="train"), profile)
    with pytest.raises(toolkit.PlanError, match="a chain needs a supervisor"):
        plan.in_turns()
