"""Whose checkpoints lie there is found out before anything is written."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from train.checkpoints import disk, tensorfile
from train.checkpoints.disk import Position, State
from train.checkpoints.tensorfile import Part
from train.distributed import Group
from train.environment import Place
from train.errors import RefusedError
from train.ownership import claim
from train.rundir import RunDirectory

OURS = {"task": "digits", "lr": 0.1, "seed": 0}


def save(run_dir: Path, *, attempt: int, **identity: object) -> Path:
    path = Position(attempt=attempt, step=3).path(run_dir)
    state = State(
        step=3, epoch=0, samples_seen=192, world_size=1, identity=identity, config={"steps": 9}
    )
    disk.begin(path)
    part = Part(name="model.weight", dtype=torch.float32, offsets=(0,), sizes=(2,))
    proof = tensorfile.write(path / "rank-00000.safetensors", [part], [torch.ones(2)])
    disk.complete(path, state, {"rank-00000.safetensors": proof})
    return path


def claimed(run_dir: Path) -> str | None:
    place = Place()
    group = Group(place=place, device=torch.device("cpu"))
    return claim(RunDirectory(run_dir, place), OURS, 9, group)


# A later attempt's would be taken as soon as our own count has come so far.
@pytest.mark.parametrize("attempt", [0, 4])
def test_a_checkpoint_of_another_run_is_refused_with_every_difference(
    tmp_path: Path, attempt: int
) -> None:
    save(tmp_path, attempt=1, **OURS)
    theirs = save(tmp_path, attempt=attempt, task="digits", lr=0.2, seed=7, hidden=128)
    # Large, and of no account: whose it is, its state alone says.
    (theirs / "rank-00000.safetensors").unlink()
    with pytest.raises(RefusedError) as caught:
        claimed(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds checkpoints of another configuration: remove them, or give this run "
        "another --run-dir, or the values that stand there:\n"
        f"  rank 0 on {socket.gethostname()}: {theirs}\n"
        "    hidden: 128 there, nothing here\n"
        "    lr: 0.2 there, 0.1 here\n"
        "    seed: 7 there, 0 here"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_our_own_checkpoints_and_damaged_ones_are_no_reason_to_refuse(tmp_path: Path) -> None:
    save(tmp_path, attempt=0, **OURS)
    theirs = save(tmp_path, attempt=1, task="digits", lr=0.2, seed=7)
    (theirs / "state.json").write_text("{")
    assert claimed(tmp_path) is None
