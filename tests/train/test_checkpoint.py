"""Checkpoints: whole or absent, recognised when damaged, never removed too early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from train import checkpoint
from train.checkpoint import Position, State
from train.errors import CheckpointError
from train.recovery import look

STATE = State(
    step=3, epoch=0, samples_seen=192, world_size=2, identity={"task": "digits"}, config={"lr": 0.1}
)
MODEL = {"weight": torch.arange(6.0).reshape(2, 3)}
OPTIMIZER = {"weight/step": torch.tensor(3.0), "weight/exp_avg": torch.ones(2, 3)}


def save(run_dir: Path, *, attempt: int, step: int) -> Path:
    path = Position(attempt=attempt, step=step).path(run_dir)
    checkpoint.save(path, replace(STATE, step=step), MODEL, OPTIMIZER)
    return path


def names(run_dir: Path) -> list[str]:
    paths = run_dir.glob("checkpoints/attempt-*/step-*")
    return sorted(f"{path.parent.name}/{path.name}" for path in paths)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = save(tmp_path, attempt=0, step=3)
    assert path == tmp_path / "checkpoints/attempt-0/step-00000003"
    checkpoint.verify(path)
    state, model, optimizer = checkpoint.load(path)
    assert state == STATE
    assert model["weight"].equal(MODEL["weight"])
    assert optimizer.keys() == OPTIMIZER.keys()
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: _flip(p / "model.safetensors"), "SHA-256 differs from the manifest"),
        (lambda p: _flip(p / "state.json"), "SHA-256 differs from the manifest"),
        (lambda p: (p / "optimizer.safetensors").write_bytes(b"x"), "1 bytes, not "),
        (lambda p: (p / "optimizer.safetensors").unlink(), "No such file or directory"),
        (lambda p: (p / "manifest.json").unlink(), "No such file or directory"),
        (lambda p: (p / "manifest.json").write_text("{"), "not a manifest"),
        (lambda p: (p / "manifest.json").write_text("[]"), "not a manifest"),
        (lambda p: (p / "manifest.json").write_text('{"version": 9, "files": {}}'), "version 9"),
    ],
)
def test_damage_is_recognised_and_the_one_before_is_used(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    save(tmp_path, attempt=0, step=3)
    newest = save(tmp_path, attempt=0, step=6)
    damage(newest)
    seen = look(tmp_path, attempt=0)
    assert seen.best == Position(attempt=0, step=3)
    ((position, why),) = seen.damaged
    assert position == Position(attempt=0, step=6)
    assert str(newest) in why
    assert reason in why


def test_a_write_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    path = save(tmp_path, attempt=0, step=3)
    path.rename(path.with_name("step-00000003.tmp"))
    assert look(tmp_path, attempt=0).best is None
    assert look(tmp_path / "nowhere", attempt=0).best is None
    # The next write of that step is not bothered by what lies there.
    save(tmp_path, attempt=0, step=3)
    assert names(tmp_path) == ["attempt-0/step-00000003"]


def test_later_attempts_come_first_and_the_future_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, attempt=0, step=9)
    save(tmp_path, attempt=1, step=6)
    save(tmp_path, attempt=2, step=12)
    assert look(tmp_path, attempt=0).best == Position(attempt=0, step=9)
    assert look(tmp_path, attempt=1).best == Position(attempt=1, step=6)
    assert look(tmp_path, attempt=7).best == Position(attempt=2, step=12)


def test_pruning_keeps_the_newest_and_other_attempts(tmp_path: Path) -> None:
    for step in (3, 6, 9, 20):
        save(tmp_path, attempt=1, step=step)
    save(tmp_path, attempt=0, step=1)
    # 20 lies beyond what was just committed: it was damaged, and must not push 6 out.
    checkpoint.prune(tmp_path, Position(attempt=1, step=9), keep=2)
    kept = ["attempt-0/step-00000001"]
    kept += [f"attempt-1/step-{step:08d}" for step in (6, 9, 20)]
    assert names(tmp_path) == kept


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    before = save(tmp_path, attempt=0, step=3)
    # A file where the directory should be: the rename at the very end fails.
    blocked = Position(attempt=0, step=6).path(tmp_path)
    blocked.with_name(blocked.name + ".old.tmp").write_text("in the way")
    blocked.mkdir()
    with pytest.raises(CheckpointError, match=rf"^cannot write checkpoint {blocked}: "):
        checkpoint.save(blocked, STATE, MODEL, OPTIMIZER)
    assert not blocked.with_name(blocked.name + ".tmp").exists()
    checkpoint.verify(before)


def test_an_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "weights.st").mkdir()
    with pytest.raises(CheckpointError, match=r"^cannot export to "):
        checkpoint.export(tmp_path / "weights.st", MODEL)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.st"]
