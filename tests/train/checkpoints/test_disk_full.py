"""A disk without room for one more checkpoint: room is made, or the missing bytes are named."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.train.support.making import trainer_for
from train.checkpoints import store
from train.checkpoints.saver import _named
from train.checkpoints.store import Position
from train.errors import CheckpointError
from train.loop import Trainer
from train.rundir.files import read_lines

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root: mounts a small disk")
TASK = f"{Path(__file__).parents[1] / 'support/wide.py'}:Wide"
# Four matrices of 1 MiB with their vectors, and beside each of them two moments.
CHECKPOINT_BYTES = 3 * 4 * (1 << 20) + (1 << 16)

COUNT = r"\d+(?:,\d{3})+"

Disk = Callable[[float], Path]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    """Mount a disk that has room for so many checkpoints."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(checkpoints: float) -> Path:
        size = int(checkpoints * CHECKPOINT_BYTES)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "small", place], check=True)
        return place

    yield mount
    # Lazily: the writer may have files open for a moment longer.
    subprocess.run(["umount", "--lazy", place], check=True)


def trainer(run_dir: Path, **chosen: object) -> Trainer:
    made = trainer_for(0, 1, run_dir, task=TASK, **chosen)
    made.resume()
    return made


def save(made: Trainer, count: int = 1) -> None:
    for _ in range(count):
        made.train_step()
        made.saver.save(made.progress, epoch=made.epoch)
        made.saver.wait()


def steps(run_dir: Path) -> list[int]:
    """The steps of the checkpoints that are whole."""
    found = store.list_committed(run_dir)
    for position in found:
        store.verify(position.path(run_dir))
    return sorted(position.step for position in found)


def rooms(run_dir: Path) -> list[tuple[int, list[str]]]:
    events = read_lines(run_dir / "events.jsonl")
    return [(e["step"], e["removed"]) for e in events if e["event"] == "room_made"]  # type: ignore[misc]


def test_what_a_checkpoint_will_replace_goes_before_it_is_written(small_disk: Disk) -> None:
    run_dir = small_disk(2.5) / "run"
    save(trainer(run_dir), 2)
    assert steps(run_dir) == [1, 2]
    # Two are kept, but three never fit: so the older one goes first.
    save(trainer(run_dir))
    assert steps(run_dir) == [2, 3]
    assert rooms(run_dir) == [(3, ["checkpoints/attempt-0/step-00000001"])]


def test_a_restart_that_keeps_fewer_checkpoints_has_room_again(small_disk: Disk) -> None:
    run_dir = small_disk(2.5) / "run"
    full = trainer(run_dir, keep_checkpoints=3)
    save(full, 2)
    with pytest.raises(CheckpointError) as caught:
        save(full)
    path = Position(attempt=0, step=3).path(run_dir)
    assert re.sub(COUNT, "N", str(caught.value)) == (
        f"cannot write checkpoint {path}: No space left on device; it needs N bytes, N are free on "
        "that disk; attempt-0/step-00000001 may go, as with --keep-checkpoints 1; make room there "
        "and start again; earlier checkpoints are untouched"
    )
    needed, free = (int(n.replace(",", "")) for n in re.findall(COUNT, str(caught.value)))
    assert free < needed < CHECKPOINT_BYTES + 2 * (1 << 16)
    assert steps(run_dir) == [1, 2]
    save(trainer(run_dir, keep_checkpoints=1))
    assert steps(run_dir) == [3]
    assert rooms(run_dir) == [(3, ["checkpoints/attempt-0/step-00000001"])]


def test_the_last_whole_checkpoint_stays_and_it_is_told_how_much_is_missing(
    small_disk: Disk,
) -> None:
    run_dir = small_disk(1.5) / "run"
    made = trainer(run_dir, keep_checkpoints=1)
    save(made)
    with pytest.raises(CheckpointError) as caught:
        save(made)
    assert "attempt-0/step-00000001 must stay; make room there and start again; " in str(
        caught.value
    )
    assert str(caught.value).endswith("earlier checkpoints are untouched")
    assert steps(run_dir) == [1]
    # Nothing of it is left that would fill the disk for the next start.
    assert [path.name for path in (run_dir / "checkpoints/attempt-0").iterdir()] == [
        "step-00000001"
    ]


def test_room_is_made_also_where_only_the_write_tells_that_there_is_none(
    small_disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a quota, which the file system's count of free bytes does not know."""
    monkeypatch.setattr(store, "free_bytes", lambda path: float("inf"))
    run_dir = small_disk(2.5) / "run"
    made = trainer(run_dir)
    save(made, 3)
    assert steps(run_dir) == [2, 3]
    (run_dir / "filler").write_bytes(bytes(CHECKPOINT_BYTES // 4))
    save(made)
    assert steps(run_dir) == [3, 4]


def test_a_start_that_was_replaced_removes_nothing_to_make_room(small_disk: Disk) -> None:
    run_dir = small_disk(2.5) / "run"
    old = trainer(run_dir)
    save(old, 2)
    old.directory.taken_over = lambda: True
    with pytest.raises(CheckpointError, match="No space left on device"):
        old.train_step()
        old.saver._checkpointer.save(
            Position(attempt=0, step=3),
            store.read_state(Position(attempt=0, step=2).path(run_dir)),
            _named(old.strategy.model_state(), old.optimizer.tensors()),
            make_room=lambda: old.saver._retention.make_room(Position(attempt=0, step=3)),
        )
        old.saver._checkpointer.wait()
    assert steps(run_dir) == [1, 2]
