"""Which checkpoint is used, and what is refused by name: in this process, by one rank."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

from tests.train.inference.conftest import STEPS
from train.checkpoints import recovery, store
from train.checkpoints.store import Position
from train.cli.config import Config
from train.errors import UsageError
from train.inference import checkpoint, parts
from train.inference.session import infer
from train.rundir.console import Console
from train.rundir.files import write_atomically
from train.runtime.process_group import Channel
from train.runtime.rank import RankInfo
from train.runtime.signals import StopRequest

Printed = pytest.CaptureFixture[str]


def used(run_dir: Path, **chosen: object) -> int:
    config = Config(**{"run_dir": run_dir, "task": "digits", **chosen})  # type: ignore[arg-type]
    threads = torch.get_num_threads()
    try:
        return infer(config, RankInfo(), StopRequest(), Console(rank=0))
    finally:
        torch.set_num_threads(threads)


def refused(run_dir: Path, **chosen: object) -> str:
    with pytest.raises(UsageError) as caught:
        used(run_dir, **{"evaluate_only": True, **chosen})
    return str(caught.value)


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def damage(run_dir: Path, step: int) -> Path:
    path = Position(attempt=0, step=step).path(run_dir) / store.tensor_file(0)
    path.write_bytes(path.read_bytes()[:-8])
    return path


def test_the_newest_checkpoint_is_used_or_the_one_that_is_named(
    trained: Path, capsys: Printed
) -> None:
    for chosen, step in (({}, STEPS[-1]), ({"checkpoint": STEPS[0]}, STEPS[0])):
        assert used(trained, evaluate_only=True, **chosen) == 0
        path = Position(attempt=0, step=step).path(trained)
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"digits, step {step}: test_accuracy 0.")
        assert line.endswith(f" · 360 samples · checkpoint {path}")


def test_a_damaged_checkpoint_is_passed_over_as_by_the_training_but_not_if_it_was_named(
    copy: Path, capsys: Printed
) -> None:
    path = damage(copy, STEPS[-1])
    assert used(copy, evaluate_only=True) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"digits, step {STEPS[0]}: ")
    assert err.startswith(f"train: skipping a damaged checkpoint: {path}: ")
    assert refused(copy, checkpoint=STEPS[-1]).startswith(
        f"{copy} has no whole checkpoint of step {STEPS[-1]}\n  {path}: "
    )
    damage(copy, STEPS[0])
    assert refused(copy).startswith(f"{copy} has no whole checkpoint\n  ")


def test_without_a_checkpoint_there_is_one_message(trained: Path, tmp_path: Path) -> None:
    way_out = "give --run-dir the directory of a run that has written one"
    assert refused(tmp_path) == f"{tmp_path} holds no checkpoint: {way_out}"
    missing = tmp_path / "missing"
    assert refused(missing) == f"{missing} does not exist: {way_out}"
    assert not missing.exists()
    assert refused(trained, checkpoint=5) == (
        f"--checkpoint 5: {trained} has none of that step; there are 3, 6"
    )


def test_a_checkpoint_that_the_run_removes_meanwhile_gives_way_to_the_newer_one(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    verify, newest = store.verify, Position(attempt=0, step=STEPS[-1]).path(copy)
    hidden = newest.rename(copy / "hidden")

    def verify_and_go_on(path: Path, *arguments: object, **named: object) -> None:
        if hidden.exists():
            # The run commits its next checkpoint, and removes this one.
            hidden.rename(newest)
            shutil.rmtree(path)
        verify(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "verify", verify_and_go_on)
    assert used(copy, evaluate_only=True) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"digits, step {STEPS[-1]}: ")
    assert err == ""


def test_a_checkpoint_that_goes_while_it_is_read_gives_way_as_well(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    fill, newest = recovery.fill, Position(attempt=0, step=STEPS[-1]).path(copy)

    def fill_too_late(*arguments: object) -> None:
        if newest.exists():
            shutil.rmtree(newest)
        fill(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "fill", fill_too_late)
    assert used(copy, evaluate_only=True) == 0
    assert capsys.readouterr().out.startswith(f"digits, step {STEPS[0]}: ")


OTHERS = """
from train.tasks.digits import Digits

class Half(Digits):
    def test(self):
        return super().test().part(0, 5)

class Wide(Digits):
    hidden = 64

class Wordless(Digits):
    def predictions(self, outputs, targets):
        return {"mean": outputs.mean()}

class Failing(Digits):
    def predictions(self, outputs, targets):
        raise KeyError("colour")
"""


@pytest.fixture
def others(tmp_path: Path) -> str:
    path = tmp_path / "others.py"
    path.write_text(OTHERS)
    return str(path)


def test_a_checkpoint_of_another_task_is_refused_unless_that_task_is_named(
    trained: Path, others: str, tmp_path: Path, capsys: Printed
) -> None:
    path = Position(attempt=0, step=STEPS[-1]).path(trained)
    assert refused(trained, task=f"{others}:Half") == (
        f"checkpoint {path} is of another task: give its --task, or, if this one has the same "
        f"model, add --adopt digits:\n  task: 'digits' there, '{others}:Half' here"
    )
    file = tmp_path / "file"
    assert used(trained, task=f"{others}:Half", adopt="digits", predict=file) == 0
    assert len(file.read_text().splitlines()) == 5
    # The model decides in the end.
    message = refused(trained, task=f"{others}:Wide", adopt="digits")
    assert message.startswith(f"checkpoint {path} is of another model: ")
    assert "\n  model.0.bias: [128] float32 there, [64] float32 here\n" in message


def test_a_task_that_gives_no_prediction_for_each_sample_is_refused(
    trained: Path, others: str, tmp_path: Path
) -> None:
    name, file = f"{others}:Wordless", tmp_path / "file"
    message = refused(trained, task=name, adopt="digits", predict=file, evaluate_only=False)
    assert message == (
        "task 'digits': predictions() gave 'mean' of shape [] for 64 samples: the first dimension "
        "must be the sample (docs/how-to/own-task.md)"
    )
    assert not file.exists()


def test_an_exception_in_predictions_names_the_task_and_its_line(
    trained: Path, others: str, tmp_path: Path, capsys: Printed
) -> None:
    name = f"{others}:Failing"
    assert used(trained, task=name, adopt="digits", predict=tmp_path / "file") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "train: predictions() of task 'digits' failed in the prediction; it was given outputs "
        "[64, 10] float32, targets [64] int64; its batch has inputs [64, 64] float32 and targets "
        f"[64] int64; see {others}:17"
    )


def test_a_file_may_be_in_a_folder_that_is_not_there_but_be_none(
    trained: Path, tmp_path: Path
) -> None:
    assert used(trained, predict=tmp_path / "new/folder/file") == 0
    assert (tmp_path / "new/folder/file").exists()
    message = refused(trained, predict=tmp_path / "new", evaluate_only=False)
    assert message == f"--predict {tmp_path / 'new'}: is a directory; name a file in it"
    (tmp_path / "text").touch()
    inside = tmp_path / "text/file"
    assert refused(trained, predict=inside, evaluate_only=False).startswith(f"--predict {inside}: ")


def test_a_full_disk_leaves_finished_parts_to_go_on_with(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    file, write = tmp_path / "file", write_atomically

    def write_some(path: Path, text: str) -> None:
        if path.name == "part-000002.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, text)

    with monkeypatch.context() as full:
        full.setattr(parts, "write_atomically", write_some)
        assert used(trained, predict=file) == 1
    folder = tmp_path / "file.parts"
    assert capsys.readouterr().err == (
        f"train: cannot write {file}: {folder / 'part-000002.jsonl'}: No space left on device; "
        f"finished parts stay in {folder}: fix this, then start again to continue\n"
    )
    assert used(trained, predict=file) == 0
    assert "continuing: 2 of 6 parts exist\n" in capsys.readouterr().out


def test_nodes_with_run_directories_of_their_own_are_sent_the_weights(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    assert used(trained, evaluate_only=True) == 0
    here = capsys.readouterr().out
    monkeypatch.setattr(checkpoint, "_all_see_one", lambda config, group: False)
    assert used(trained, evaluate_only=True) == 0
    assert capsys.readouterr().out == here


def test_nodes_that_do_not_share_the_folder_are_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channel, "sees_one", lambda self, directory: False)
    file = tmp_path / "file"
    assert refused(trained, predict=file, evaluate_only=False) == (
        f"--predict {file}: not all ranks see {file}.parts; name a file in a directory that all "
        "nodes share"
    )
