"""A script that only prints: the job file's `log_pattern` makes steps of its lines, for real."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import TOOLKIT
from tests.support.slurm_site import Site
from toolkit.runs.evidence.progress import progress_of
from toolkit.runs.records.run_directory import read_metrics

# The last rank prints figures, as in Megatron; all ranks print something. The first start is lost.
PRINTING = """
import os, sys, time
rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
lost = sys.argv[1:] == ["lost"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(1 if lost else 4, 6 if lost else 10):
    time.sleep(0.05)
    print(f"step {step}/9 loss {1 / step:.3f}" if rank == last else f"step {step} of rank {rank}")
sys.exit(lost and rank == last)
"""
PATTERN = r"step (?P<step>\d+)/(?P<steps>\d+) loss (?P<loss>\S+)"


PER_EPOCH = """
import time
for epoch in range(1, 4):
    for step in range(1, 6):
        time.sleep(0.02)
        print(f"Epoch {epoch} [{step}/5] loss {1 / epoch / step:.3f}")
    print(f"test Epoch {epoch} [1/5] loss 9")
"""


def job(folder: Path, **more: Any) -> dict[str, Any]:
    """Return a job file's content: the last of two ranks prints figures."""
    script = folder / "printing.py"
    script.write_text(PRINTING)
    pattern = {"log_pattern": PATTERN, "log_rank": "last"}
    return {"name": "printing", "script": str(script), **pattern, **more}


def toolkit_in(folder: Path, *words: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    return subprocess.run(
        [TOOLKIT, *words], cwd=folder, capture_output=True, text=True, timeout=280
    )


def test_status_and_goodput_know_the_steps_of_a_run_that_was_restarted(tmp_path: Path) -> None:
    file, retries = tmp_path / "printing.yaml", {"in_job": 1}
    content = job(tmp_path, args=["lost"], resources={"nproc_per_node": 2}, retries=retries)
    file.write_text(json.dumps(content))
    done = toolkit_in(tmp_path, "run", file)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    run = toolkit.open_run(str(run_dir))
    progress = progress_of(run_dir)
    assert progress is not None
    assert (progress.step, progress.steps_planned, progress.loss, progress.restart) == (
        9,
        9,
        0.111,
        1,
    )
    goodput = run.goodput()
    assert (goodput.steps, goodput.steps_again, goodput.starts, goodput.ranks) == (9, 2, 2, 2)
    assert goodput.seconds["start"] > 0 and goodput.seconds["setup"] > 0


def test_steps_that_count_within_epochs_are_one_count_in_status_goodput_and_report(
    tmp_path: Path,
) -> None:
    (tmp_path / "epochs.py").write_text(PER_EPOCH)
    pattern = r"Epoch (?P<epoch>\d+) \[(?P<step>\d+)/(?P<steps>\d+)\] loss (?P<loss>\S+)"
    job = {"name": "epochs", "script": "epochs.py", "log_pattern": pattern}
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = toolkit_in(tmp_path, "run", "job.json")
    left_out = "3 lines were left out, whose step is lower than the one before, such as step 1"
    assert done.returncode == 0 and f"log_pattern: {left_out}" in done.stderr, done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    progress, goodput = progress_of(run_dir), toolkit.open_run(str(run_dir)).goodput()
    assert progress is not None
    assert (progress.step, progress.loss) == (15, 0.067)
    assert (goodput.step, goodput.steps, goodput.steps_again) == (15, 15, 0)
    assert "(step 15, 1 start)" in toolkit_in(tmp_path, "goodput", run_dir).stdout
    assert f"log_pattern: {left_out}" in toolkit_in(tmp_path, "status", run_dir).stdout
    page = toolkit.report([toolkit.open_run(str(run_dir))]).html
    assert "<dt>step</dt><dd>15" in page and left_out in page


@pytest.mark.slurm
def test_the_last_rank_is_on_the_second_node_of_a_batch_script(site: Site, tmp_path: Path) -> None:
    content = job(tmp_path, resources={"nnodes": 2, "cpus_per_node": 1})
    spec = toolkit.JobSpec.model_validate(content)
    run = site.launcher.submit(toolkit.plan(spec, site.profile))
    status = run.wait(280)
    assert status.state is toolkit.RunState.SUCCEEDED, [*run.logs()]
    assert run.run_dir is not None
    rows = read_metrics(run.run_dir)
    assert [row["step"] for row in rows] == list(range(4, 10))
    assert rows[-1]["loss"] == 0.111
