"""What docs/learn/torchrun.md says of restarts, of processes that are spawned, and of jobs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.learn.support.page import pages
from tests.learn.support.runner import BIN, PATIENCE_S

PAGE = pages()["torchrun"]
LAST_LINE = "epoch 6 step 144 loss 0.3738"


def output_of(folder: Path, *command: str, **environment: str) -> str:
    """Call a command with the files of the page, and return what it prints."""
    PAGE.place_files(folder)
    done = subprocess.run(
        [BIN / command[0], *command[1:]],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done
    return done.stdout


@pytest.mark.slow
def test_torchrun_starts_all_ranks_again_and_they_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    command = ("torchrun", "--standalone", "--max-restarts=1", "--nproc-per-node=2", "killed.py")
    lines = output_of(tmp_path, *command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1").splitlines()
    starts = [line for line in lines if "begin" in line]
    assert starts == ["2 ranks begin with epoch 1 of 6", "2 ranks begin with epoch 4 of 6"]
    assert lines[-1] == LAST_LINE
    assert len(lines) == len(starts) + 6


@pytest.mark.slow
def test_spawned_processes_print_the_losses_of_the_page(tmp_path: Path) -> None:
    (block,) = (b for b in PAGE.blocks() if b.text.startswith("# spawned.py\n"))
    (tmp_path / "spawned.py").write_text(block.text)
    assert LAST_LINE in output_of(tmp_path, "python", "spawned.py").splitlines()


@pytest.mark.slow
def test_the_job_file_of_the_page_runs_on_this_machine(tmp_path: Path) -> None:
    shown = output_of(tmp_path, "toolkit", "run", "job.yaml")
    assert LAST_LINE in shown
    (checkpoint,) = tmp_path.glob("runs/*/checkpoint.pt")
    assert checkpoint.is_file()
