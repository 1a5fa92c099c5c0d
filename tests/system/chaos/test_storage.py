"""A file system that is full, and a database for accounting that is down."""

import errno
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import toolkit
from tests.conftest import SANDBOX, Cluster, Until
from tests.support.slurm_site import Site, failure
from tests.system.chaos.frame import Trial, go_on, submit, unharmed

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with accounting, and with a small file system, `disk`, on all of its nodes."""
    folder = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
    disk = folder / "disk"
    disk.mkdir()
    # Before the nodes are made, so that all of them have it.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "chaos", disk], check=True)
    argv = ["up", "--nodes", "2", "--kill-wait", "5", "--accounting", "--dir", str(folder / "sb")]
    try:
        subprocess.run([SANDBOX, *argv], check=True)
        yield Cluster(folder / "sb")
    finally:
        subprocess.run([SANDBOX, "down", "--dir", str(folder / "sb")], check=True)
        subprocess.run(["umount", disk], check=True)
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def nothing_is_left_there(second: Cluster, until: Until) -> Iterator[None]:
    yield
    second.slurm("scancel", "--user=root")
    until(lambda: second("ps", "--json").strip() == "[]", "no process is left on any node")


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_a_reason_and_it_goes_on_when_there_is_room(
    second: Cluster, tmp_path: Path, reference: Trial, until: Until
) -> None:
    disk = second.folder.parent / "disk"
    site = Site(second, tmp_path)
    trial = submit(site, "retries.in_job=1", runs_dir=str(disk))
    until(trial.saved, "a first checkpoint")
    fill(disk / "filler")
    status = trial.run.wait(300)
    (disk / "more filler").touch()
    fill(disk / "more filler")
    again = go_on(trial, site).run.wait(300)
    (disk / "filler").unlink()
    (disk / "more filler").unlink()
    assert again.reason == f"FAILED: no space was left for {trial.run_dir}"
    assert status.state is again.state is toolkit.RunState.FAILED, failure(trial.run)
    reason, _ = trial.reasons()
    assert "no space" in reason.lower() and reason.startswith("fatal: "), reason
    assert "no space" in status.reason.lower()
    unharmed(go_on(trial, site), reference, until)


@pytest.mark.slow
def test_without_the_accounting_database_runs_are_submitted_followed_and_ended(
    second: Cluster, tmp_path: Path, reference: Trial, until: Until
) -> None:
    second("stop", "slurmdbd")
    try:
        site = Site(second, tmp_path)
        trial = submit(site)
        until(trial.saved, "a first checkpoint")
        assert trial.run.status().state is toolkit.RunState.RUNNING
        second.slurm("scontrol", "requeue", trial.run.job_id)
        until(lambda: trial.events("resume", attempt=1), "it goes on")
        unharmed(trial, reference, until)
    finally:
        second("start", "slurmdbd")
    ended = ["sacct", "-n", "-X", "--duplicates", "-j", trial.run.job_id, "-o", "state"]
    until(lambda: "COMPLETED" in second.slurm(*ended), "the database has heard of it since")


@pytest.mark.slow
@pytest.mark.parametrize("requeued", [False, True], ids=["", "requeued"])
def test_a_run_directory_removed_during_the_run_ends_the_run_and_nothing_begins_anew(
    cluster: Cluster, site: Site, requeued: bool, until: Until
) -> None:
    """Where torchrun would start the ranks again, and where Slurm starts the script again."""
    trial = submit(site, "retries.in_job=2")
    until(trial.saved, "a first checkpoint")
    shutil.rmtree(trial.run_dir)
    if requeued:
        cluster.slurm("scontrol", "requeue", trial.job_id)
    status = trial.wait(pace=0.2)
    assert status.state is toolkit.RunState.FAILED, failure(trial.run)
    # The script looks once a second: it may have ended before the requeue came.
    told = ["was removed during the run; not queued again", *(["is gone"] if requeued else [])]
    ends = tuple(f": {trial.run_dir} {what}" for what in told)
    assert status.reason.endswith(ends), status.reason
    assert not trial.events("checkpoint")
