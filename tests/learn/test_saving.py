"""What the pages on checkpoints say of whole files of DCP, and of `train`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.learn.support.page import pages
from tests.learn.support.runner import BIN, PATIENCE_S, call

PAGES = pages()


def execute(folder: Path, *command: str) -> None:
    """Call a command, which has to succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [BIN / command[0], *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    )


@pytest.mark.slow
def test_a_sharded_checkpoint_becomes_one_file(tmp_path: Path) -> None:
    PAGES["sharded-checkpoints"].place_files(tmp_path)
    assert call("torchrun --nproc-per-node 2 sharded.py save", tmp_path).status == 0
    module = "torch.distributed.checkpoint.format_utils"
    execute(tmp_path, "python", "-m", module, "dcp_to_torch", "step-5", "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["model"]["0.weight"].shape == (8, 8)


@pytest.mark.slow
def test_the_command_of_train_keeps_as_many_checkpoints_as_it_says(tmp_path: Path) -> None:
    (block,) = (
        b for b in PAGES["checkpoints"].blocks() if b.language == "bash" and "-m train" in b.text
    )
    execute(tmp_path, *block.text.split())
    kept = list(tmp_path.glob("runs/mine/checkpoints/attempt-*/step-*"))
    assert len(kept) == 3
