"""Whose checkpoints lie there is found out before anything is written."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from train.checkpoints import safetensors_file, store
from train.checkpoints.safetensors_file import TensorPart
from train.checkpoints.store import Position, State
from train.cli.config import Config
from train.errors import RefusedError
from train.rundir.claim import claim, differences
from train.rundir.files import RunDirectory, read_lines
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo

if TYPE_CHECKING:
    from tests.train.conftest import Running, Start

OURS = {"task": "digits", "lr": 0.1, "seed": 0}


def save(run_dir: Path, *, attempt: int, **identity: object) -> Path:
    path = Position(attempt=attempt, step=3).path(run_dir)
    state = State(
        step=3, epoch=0, samples_seen=192, world_size=1, identity=identity, config={"steps": 9}
    )
    store.begin(path)
    part = TensorPart(name="model.weight", dtype=torch.float32, offsets=(0,), sizes=(2,))
    proof = safetensors_file.write(path / "rank-00000.safetensors", [part], [torch.ones(2)])
    store.write_manifest(path, state, {"rank-00000.safetensors": proof})
    return path


def claimed(run_dir: Path) -> str | None:
    rank_info = RankInfo()
    group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
    return claim(RunDirectory(run_dir, rank_info), OURS, 9, group)


# A later attempt's would be taken as soon as our own count has come so far.
@pytest.mark.parametrize("attempt", [0, 4])
def test_a_checkpoint_of_another_run_is_refused_with_every_difference(
    tmp_path: Path, attempt: int
) -> None:
    save(tmp_path, attempt=1, **OURS)
    theirs = save(tmp_path, attempt=attempt, task="digits", lr=0.2, seed=7, hidden=128)
    # Large, and irrelevant: only its state names its run.
    (theirs / "rank-00000.safetensors").unlink()
    with pytest.raises(RefusedError) as caught:
        claimed(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds checkpoints of another configuration: remove them, or use another "
        "--run-dir, or the values recorded there:\n"
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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("outcome.json", "is of version 2, and this program writes 1"),
        ("run.json", "is of version 2, and this program reads 1"),
    ],
)
def test_a_directory_of_a_newer_version_is_refused_and_stays(
    tmp_path: Path, name: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text('{"version": 2, "identity": 7, "status": 7}')
    with pytest.raises(RefusedError) as caught:
        claimed(tmp_path)
    assert str(caught.value) == (
        f"{path} {said}: continue with the version that wrote it, or use another --run-dir"
    )
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert path.read_text() == '{"version": 2, "identity": 7, "status": 7}'


OLD = {"task": "old.py:T", "lr": 0.1, "seed": 0, "train_samples": 9, "hidden": 8}


@pytest.mark.parametrize(
    ("now", "adopt", "reason"),
    [
        ({}, None, "add --adopt old.py:T if its task is the same as this one, or use"),
        ({}, "other.py:T", "--adopt other.py:T does not fit, as its task is 'old.py:T': use"),
        ({"lr": 0.2}, "old.py:T", "--adopt old.py:T does not fit, as lr must not differ: use"),
        ({"lr": 0.2}, None, "use another"),
        ({"train_samples": 8}, "old.py:T", "as train_samples must not differ: use"),
        ({}, "old.py:T", ""),
        ({"hidden": 9}, "old.py:T", ""),
    ],
)
def test_a_run_is_adopted_if_only_its_task_is_another(
    tmp_path: Path, now: dict[str, object], adopt: str | None, reason: str
) -> None:
    save(tmp_path, attempt=0, **OLD)
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "identity": OLD}))
    rank_info = RankInfo()
    group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
    identity = {**OLD, "task": "new.py:T", **now}
    if not reason:
        assert claim(RunDirectory(tmp_path, rank_info), identity, 9, group, adopt=adopt) is None
        return
    with pytest.raises(RefusedError) as caught:
        claim(RunDirectory(tmp_path, rank_info), identity, 9, group, adopt=adopt)
    first, *lines = str(caught.value).splitlines()
    assert reason in first
    assert "  task: 'old.py:T' there, 'new.py:T' here" in lines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "run.json"]


TASK = """
from torch import nn
from train.tasks.digits import Digits

class Mine(Digits):
    hidden = 8

    def model(self):
        return nn.Sequential(nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

class Larger(Mine):
    hidden = 9
"""


@pytest.mark.slow
def test_a_run_whose_task_has_moved_goes_on_when_it_is_told_so_and_keeps_that_in_mind(
    start: Start, tmp_path: Path
) -> None:
    run_dir, old, new = tmp_path / "run", tmp_path / "old.py", tmp_path / "new.py"
    old.write_text(TASK)

    def run(task: str, steps: int, *flags: str, attempt: int) -> Running:
        flags = ("--task", task, "--steps", str(steps), "--keep-checkpoints=9", *flags)
        return start.single(*flags, run_dir=run_dir, attempt=attempt)

    run(f"{old}:Mine", 2, attempt=0).finish()
    shutil.move(old, new)
    before = json.loads((run_dir / "run.json").read_text())
    # With other shapes it is not this run's, also with --adopt.
    adopt = ("--adopt", f"{old}:Mine")
    larger = run(f"{new}:Larger", 3, *adopt, attempt=1).finish(2)
    assert "is of another model" in larger.output()
    assert json.loads((run_dir / "run.json").read_text()) == before
    moved = run(f"{new}:Mine", 4, *adopt, attempt=2).finish()
    differing = f"task: '{old}:Mine' there, '{new}:Mine' here"
    assert f"adopted a run of another configuration: {differing}\n" in moved.output()
    (event,) = [e for e in read_lines(run_dir / "events.jsonl") if e["event"] == "adopted"]
    assert event.items() >= {"step": 2, "attempt": 2, "differing": [differing]}.items()
    after = json.loads((run_dir / "run.json").read_text())
    assert after["identity"] == {**before["identity"], "task": f"{new}:Mine"}
    (former,) = after["adopted"]
    assert former["identity"] == before["identity"]
    # From now on it is this run, with the checkpoints that it had under its former name.
    assert [position.step for position in store.list_committed(run_dir)] == [4, 2]
    run(f"{new}:Mine", 5, attempt=3).finish()
    assert [m["step"] for m in moved.metrics() if "loss" in m] == [1, 2, 3, 4, 5]


def test_exact_sums_differ_from_others_by_their_own_flag_alone() -> None:
    fast, exact = Config().identity(), Config(reduce="exact").identity()
    assert differences(fast, exact) == ["reduce: 'fast' there, 'exact' here"]
    more = Config(reduce="exact", virtual_shards=16).identity()
    assert differences(exact, more) == ["virtual_shards: 4 there, 16 here"]


def test_the_recorded_configuration_fits_another_run(start: Start, tmp_path: Path) -> None:
    """It names no run directory, and is not written through a link that was there."""
    old, new, other = tmp_path / "old", tmp_path / "new", tmp_path / "other.txt"
    old.mkdir()
    other.write_text("mine")
    (old / "config.toml").symlink_to(other)
    start.single("--task=digits", "--steps=2", run_dir=old).finish()
    assert other.read_text() == "mine"
    start.single(f"--config={old}/config.toml", run_dir=new).finish()
    assert (new / "outcome.json").exists()


LAYERS = """
from train.tasks.digits import Digits


class Layers(Digits):
    def identity(self):
        return {**super().identity(), "layers": (64, 128)}
"""


def test_a_tuple_in_an_identity_is_the_list_that_is_recorded(start: Start, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(LAYERS)
    flags, run_dir = ("--task=t.py:Layers",), tmp_path / "run"
    start.single(*flags, "--steps=2", run_dir=run_dir).finish()
    assert start.single(*flags, "--steps=4", run_dir=run_dir).finish().outcome()["step"] == 4
