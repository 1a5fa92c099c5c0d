"""Checkpoints: whole or absent, recognised when damaged, never removed too early."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.train.support.ranks import on_ranks
from tests.train.support.reading import same, whole
from train.checkpoints import recovery, store
from train.checkpoints.checkpointer import Checkpointer
from train.checkpoints.reader import Stored, differences, export
from train.checkpoints.recovery import Sighting, look
from train.checkpoints.store import Position, State
from train.errors import CheckpointError, FencedError
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo

STATE = State(
    step=3, epoch=0, samples_seen=192, world_size=1, identity={"task": "digits"}, config={"lr": 0.1}
)
TENSORS = {
    "model.weight": torch.arange(6.0).reshape(2, 3),
    "model.counter": torch.tensor(7),
    "model.mask": torch.tensor([True, False, True]),
    "model.half": torch.arange(5, dtype=torch.bfloat16),
    "model.nothing": torch.zeros(0, 4),
    "optimizer.weight/step": torch.tensor(3.0),
    "optimizer.weight/exp_avg": torch.ones(2, 3),
}


def checkpointer(run_dir: Path) -> Checkpointer:
    return Checkpointer(run_dir, RankGroup(rank_info=RankInfo(), device=torch.device("cpu")))


def save(run_dir: Path, *, attempt: int = 0, step: int = 3) -> Path:
    position = Position(attempt=attempt, step=step)
    writer = checkpointer(run_dir)
    writer.save(position, replace(STATE, step=step), TENSORS)
    writer.wait()
    return position.path(run_dir)


def names(run_dir: Path) -> list[str]:
    paths = run_dir.glob("checkpoints/attempt-*/step-*")
    return sorted(f"{path.parent.name}/{path.name}" for path in paths)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert path == tmp_path / "checkpoints/attempt-0/step-00000003"
    store.verify(path)
    assert store.read_state(path) == STATE
    assert same(whole(path), TENSORS)
    stored = Stored(path)
    assert stored.listing == {n: (t.shape, t.dtype) for n, t in sorted(TENSORS.items())}
    live = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    stored.load(live)
    assert same(live, TENSORS)
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "state.json",
    ]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


FILE = "rank-00000.safetensors"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: _flip(p / FILE), "SHA-256 differs from the manifest"),
        (lambda p: _flip(p / "state.json"), "SHA-256 differs from the manifest"),
        (lambda p: os.truncate(p / FILE, 100), "100 bytes, not "),
        (lambda p: (p / FILE).unlink(), "No such file or directory"),
        (lambda p: (p / "manifest.json").unlink(), "No such file or directory"),
        (lambda p: (p / "manifest.json").write_text("{"), "not a manifest"),
        (lambda p: (p / "manifest.json").write_text("[]"), "not a manifest"),
        (lambda p: (p / "manifest.json").write_text('{"version": 9, "files": {}}'), "version 9"),
    ],
)
def test_damage_is_recognised_and_the_one_before_is_used(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    save(tmp_path, step=3)
    newest = save(tmp_path, step=6)
    damage(newest)
    seen = look(tmp_path, attempt=0)
    assert seen.best == Position(attempt=0, step=3)
    ((position, why),) = seen.damaged
    assert position == Position(attempt=0, step=6)
    assert str(newest) in why
    assert reason in why


@pytest.mark.parametrize(
    "name", [".nfs000000000001", "README", "rank-00001.safetensors", "model.safetensors"]
)
def test_what_else_lies_in_the_folder_of_a_checkpoint_is_no_part_of_it(
    tmp_path: Path, name: str
) -> None:
    save(tmp_path, step=3)
    newest = save(tmp_path, step=6)
    # Tensors of the same name, which a reader of the whole folder would take.
    save_file({"model.weight": torch.zeros(7, 7), "model.more": torch.ones(1)}, newest / name)
    seen = look(tmp_path, attempt=0)
    assert seen == Sighting(best=Position(attempt=0, step=6), damaged=())
    assert Stored(newest).listing == {n: (t.shape, t.dtype) for n, t in sorted(TENSORS.items())}
    live = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    Stored(newest).load(live)
    assert same(live, TENSORS)


def test_a_state_with_words_that_are_not_known_yet_is_read(tmp_path: Path) -> None:
    path = save(tmp_path)
    values = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**values, "of a later version": 1}))
    assert store.read_state(path) == STATE


class Poison:
    """Runs a command when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.victim,)


def test_a_poisoned_pickle_is_refused_and_never_unpickled(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    poison = pickle.dumps(Poison(victim))
    pickle.loads(poison)
    assert victim.exists()  # it works
    victim.unlink()
    # As another file beside ours: torch's usual reader opens this one first.
    path = save(tmp_path)
    (path / ".metadata").write_bytes(poison)
    assert look(tmp_path, attempt=0).best == Position(attempt=0, step=3)
    assert Stored(path).listing.keys() == TENSORS.keys()
    (path / ".metadata").unlink()
    # In place of tensors, by another user, who can also write a manifest.
    (path / FILE).write_bytes(poison)
    store.write_manifest(path, STATE, {FILE: store.measure(path / FILE)})
    store.verify(path)
    with pytest.raises(CheckpointError, match=rf"^cannot read checkpoint {path}: "):
        Stored(path)
    assert not victim.exists()


def test_a_write_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    path = save(tmp_path)
    path.rename(path.with_name("step-00000003.tmp"))
    assert look(tmp_path, attempt=0).best is None
    assert look(tmp_path / "nowhere", attempt=0).best is None
    # The leftovers do not disturb the next write of that step.
    save(tmp_path)
    assert names(tmp_path) == ["attempt-0/step-00000003"]


def test_later_attempts_come_first_and_the_future_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, attempt=0, step=9)
    save(tmp_path, attempt=1, step=6)
    save(tmp_path, attempt=2, step=12)
    assert look(tmp_path, attempt=0).best == Position(attempt=0, step=9)
    assert look(tmp_path, attempt=1).best == Position(attempt=1, step=6)
    assert look(tmp_path, attempt=7).best == Position(attempt=2, step=12)


def test_a_failed_write_leaves_nothing_behind_and_the_next_one_succeeds(tmp_path: Path) -> None:
    before = save(tmp_path, step=3)
    # A file where the directory should be: the rename at the very end fails.
    blocked = Position(attempt=0, step=6).path(tmp_path)
    blocked.with_name(blocked.name + ".old.tmp").write_text("in the way")
    blocked.mkdir()
    writer = checkpointer(tmp_path)
    writer.save(Position(attempt=0, step=6), STATE, TENSORS)
    with pytest.raises(CheckpointError, match=rf"^cannot write checkpoint {blocked}: "):
        writer.wait()
    writer.wait()  # said once
    assert not blocked.with_name(blocked.name + ".tmp").exists()
    store.verify(before)
    writer.save(Position(attempt=0, step=7), replace(STATE, step=7), TENSORS)
    writer.wait()
    assert look(tmp_path, attempt=0).best == Position(attempt=0, step=7)


def test_who_may_not_commit_leaves_nothing_behind(tmp_path: Path) -> None:
    def refuse() -> None:
        raise FencedError("a newer attempt is here")

    writer = checkpointer(tmp_path)
    writer.save(Position(attempt=0, step=3), STATE, TENSORS, may_commit=refuse)
    with pytest.raises(FencedError, match="newer attempt"):
        # By the next save, if there is no wait before.
        writer.save(Position(attempt=0, step=6), STATE, TENSORS)
    assert list((tmp_path / "checkpoints/attempt-0").iterdir()) == []


def test_an_export_loads_without_us(tmp_path: Path) -> None:
    stored = Stored(save(tmp_path))
    export(tmp_path / "w.st", stored.listing, stored.whole)
    model = {n.removeprefix("model."): t for n, t in TENSORS.items() if n.startswith("model.")}
    assert same(load_file(tmp_path / "w.st"), model)


def test_an_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    stored = Stored(save(tmp_path / "run"))
    (tmp_path / "w.st").mkdir()
    with pytest.raises(CheckpointError, match=r"^cannot export to "):
        export(tmp_path / "w.st", stored.listing, stored.whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "w.st"]


def test_a_checkpoint_of_another_model_is_told_apart_tensor_by_tensor() -> None:
    f32, shape = torch.float32, torch.Size
    there = {"a": (shape([2, 3]), f32), "b": (shape([]), f32), "same": (shape([1]), f32)}
    here = [
        {"a": (shape([2, 4]), f32), "same": (shape([1]), f32)},
        {"c": (shape([1]), torch.int64)},
    ]
    assert differences(there, here) == [
        "a: [2, 3] float32 there, [2, 4] float32 here",
        "b: [] float32 there, nothing here",
        "c: nothing there, [1] int64 here",
    ]


def loaded_on(rank: int, run_dir: Path, broken: Path, source: int | None) -> str:
    """Return why this rank cannot load a checkpoint whose headers break after it was listed."""
    info = RankInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2, launched=True)
    group = RankGroup(rank_info=info, device=torch.device("cpu"))
    own = run_dir / str(rank)
    best = Position(attempt=0, step=3)
    found = recovery.describe(own, group, best, source=0, shared=source is None)
    group.gather("")
    if rank == 0:
        for file in broken.rglob("*.safetensors"):
            file.write_bytes(b"\xff" * 64)
    group.gather("")
    tensors = {name: torch.empty(size, dtype=kind) for name, (size, kind) in found.listing.items()}
    try:
        recovery.fill(own, group, found, tensors)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("source", [0, None])
def test_headers_that_one_rank_cannot_read_are_told_on_all_ranks(
    tmp_path: Path, source: int | None
) -> None:
    for rank in range(2):
        save(tmp_path / str(rank))
    broken = 0 if source == 0 else 1
    reasons = on_ranks(2, loaded_on, tmp_path, tmp_path / str(broken), source)
    assert reasons[0] == reasons[1]
    assert reasons[0].startswith(f"rank {broken}: cannot read checkpoint {tmp_path / str(broken)}")


def test_links_to_checkpoints_that_are_gone_are_skipped_with_a_reason(tmp_path: Path) -> None:
    """As to an archive that is not mounted here. In a process of its own, which may not end."""
    folder = tmp_path / "checkpoints/attempt-0"
    folder.mkdir(parents=True)
    for step in (10, 20):
        (folder / f"step-{step:08d}").symlink_to("/not/mounted")
    code = (
        "from pathlib import Path\n"
        "from train.checkpoints.recovery import look\n"
        f"print([p.step for p, _ in look(Path({str(tmp_path)!r}), attempt=0).damaged])\n"
    )
    argv = [sys.executable, "-c", code]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout == "[20, 10]\n"


def test_free_space_is_unknown_where_a_file_system_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exists(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    assert store.free_bytes(tmp_path / "step-00000004.tmp") == math.inf
