"""A run directory removed during the run: the batch script says so, and begins nothing anew."""

import subprocess
from pathlib import Path

import pytest

import toolkit
from tests.fakes import fake_slurm
from tests.support.planned import job as job_of


class Script:
    """A batch script with restarts, whose torchrun fails as told."""

    def __init__(self, folder: Path, torchrun: str) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.environ = fake_slurm.install(folder, nodes=1) | {"SLURM_JOB_NUM_NODES": "1"}
        self.environ |= {"SLURM_JOB_PARTITION": "p"}
        (folder / "bin/torchrun").write_text(f"#!/bin/sh\n{torchrun}\n")
        job = job_of(retries={"requeue": 2})
        (folder / "script.sh").write_text(
            toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="s")))
        )

    def start(self, *, restarts: int = 0) -> int:
        """Run the script as Slurm does; its log is beside the run directory."""
        with (self.folder / "log").open("a") as log:
            return subprocess.run(
                ["bash", self.folder / "script.sh", self.run_dir],
                env=self.environ | {"SLURM_RESTART_COUNT": str(restarts)},
                stdout=log,
                stderr=log,
                timeout=120,
                check=False,
            ).returncode

    def reason(self, attempt: int = 0) -> str:
        return (self.run_dir / f"logs/attempt-{attempt}/reason").read_text().strip()


def test_a_failure_without_the_run_directory_is_final_and_named(tmp_path: Path) -> None:
    script = Script(tmp_path, 'rm -r "$TRAIN_RUN_DIR"; exit 1')
    assert script.start() == 1
    gone = f"{script.run_dir} was removed during the run"
    assert script.reason() == f"fatal: {gone}; not queued again"
    # ... and if Slurm or an operator queues the job again.
    assert script.start(restarts=1) == 1
    again = f"sbatch FILE {script.run_dir} continue"
    assert script.reason(1) == f"fatal: {gone}; to begin at step 0: {again}"


def test_a_run_directory_that_is_out_of_reach_for_a_moment_is_not_removed(tmp_path: Path) -> None:
    """A handle that the file server has forgotten says so; a removed file does not exist."""
    script = Script(tmp_path, 'rm "$TRAIN_RUN_DIR"/logs/attempt-0/since; exit 1')
    stat = tmp_path / "bin/stat"
    stat.write_text(
        "#!/bin/sh\ncase $* in */since) echo 'stat: Stale file handle' >&2; exit 1 ;; esac\n"
        'exec /usr/bin/stat "$@"\n'
    )
    stat.chmod(0o755)
    script.start()
    assert script.reason().startswith("retryable: ")


@pytest.mark.parametrize("begun", [True, False])
def test_a_start_after_a_requeue_refuses_an_empty_run_directory(
    begun: bool, tmp_path: Path
) -> None:
    """Unless no earlier start has reached the script, as on a node that did not come up."""
    script = Script(tmp_path, "exit 0")
    if begun:
        (tmp_path / "log").write_text("a: attempt 0 on node1, run directory run\n")
    assert script.start(restarts=1) == int(begun)
    assert script.reason().startswith("fatal: " if begun else "done: ")
