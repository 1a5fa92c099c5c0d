"""The batch scripts that docs/learn/by-hand.md shows, on a real Slurm cluster."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, Cluster, Until
from tests.learn.support.page import pages

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PY_SPY = '#!/bin/sh\necho "$(hostname) $(tr "\\0" " " < "/proc/$3/cmdline")"\n'
"""It only says of which process it is asked for the stacks: the real one is not installed here."""


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    """The files of the page, in a folder with a virtual environment."""
    pages()["by-hand"].place_files(tmp_path)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    return tmp_path


def submit(cluster: Cluster, folder: Path, script: str) -> str:
    return cluster.slurm("sbatch", "--parsable", f"--chdir={folder}", str(folder / script)).strip()


def log(folder: Path, job: str) -> str:
    path = folder / f"steps-{job}.log"
    return path.read_text() if path.exists() else ""


def times(folder: Path, job: str, what: str) -> list[tuple[str, str]]:
    """Return the ranks that have started or ended, and the step at which they did, by rank.

    srun may print lines of two tasks without a line break between them.
    """
    return sorted(
        re.findall(rf"rank (\d)(?: of 4, local rank \d)?: {what} at (\d+)", log(folder, job))
    )


def state(cluster: Cluster, job: str) -> str:
    shown = cluster.slurm("scontrol", "-o", "show", "job", job)
    return shown.partition("JobState=")[2].partition(" ")[0]


def is_over(cluster: Cluster, job: str) -> bool:
    return state(cluster, job) not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")


def test_torchrun_saves_when_slurm_warns_the_batch_shell_and_continues_in_the_same_job(
    cluster: Cluster, folder: Path, until: Until
) -> None:
    job = submit(cluster, folder, "torchrun.sbatch")
    until(
        lambda: len(times(folder, job, "starts")) == 4, "ranks start", seen=lambda: log(folder, job)
    )
    cluster.slurm("scancel", "--batch", "--signal=USR1", job)
    until(lambda: is_over(cluster, job), "the job ends", seen=lambda: log(folder, job))
    assert state(cluster, job) == "COMPLETED", log(folder, job)
    # Slurm may have killed the second node before its ranks could print the end.
    ends = times(folder, job, "ends")
    saved = next(step for rank, step in ends if rank == "0" and step != "200")
    assert times(folder, job, "starts") == [(str(r), s) for r in range(4) for s in ("0", saved)]
    assert [rank for rank, step in ends if step == "200"] == ["0", "1", "2", "3"]
    assert (folder / "step.txt").read_text() == "200"


def test_ranks_that_srun_starts_get_slurms_signal_themselves(
    cluster: Cluster, folder: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(cluster, folder, "ranks.sbatch")
    until(
        lambda: len(times(folder, job, "starts")) == 4, "ranks start", seen=lambda: log(folder, job)
    )
    (folder / "py-spy").write_text(PY_SPY)
    (folder / "py-spy").chmod(0o755)
    monkeypatch.setitem(cluster.environ, "PATH", f"{folder}:{cluster.environ['PATH']}")
    stacks = cluster.slurm("bash", str(folder / "stacks.sh"), job, "2").splitlines()
    asked = sorted(line.rstrip().partition(": ")[2] for line in stacks)
    assert [line.split()[0] for line in asked] == ["node1", "node1", "node2", "node2"]
    assert {line.partition(" ")[2] for line in asked} == {"python steps.py 200"}
    cluster.slurm("scancel", "--signal=TERM", job)
    until(lambda: is_over(cluster, job), "the job ends", seen=lambda: log(folder, job))
    assert state(cluster, job) == "COMPLETED", log(folder, job)
    saved = (folder / "step.txt").read_text()
    assert int(saved) < 200
    assert times(folder, job, "ends") == [(str(r), saved) for r in range(4)]
