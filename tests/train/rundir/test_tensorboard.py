"""Event files for TensorBoard: one curve over all starts, and never in the way of the training."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Until
from tests.support.event_files import curve, events, read_by_tensorboard
from tests.train.conftest import ROOT, Running, Start
from tests.train.support import held
from train.rundir import tensorboard
from train.rundir.console import Console
from train.rundir.tensorboard import EventFile

FIGURES = {"epoch": 0, "samples_seen": 8, "loss": 0.5, "lr": 0.1}
STEPS = ("--steps=12", "--checkpoint-every=0")


def event_file(run_dir: Path, *, attempt: int = 0, first_step: int = 1) -> EventFile:
    return EventFile(run_dir, attempt=attempt, first_step=first_step, console=Console(rank=0))


def steps_of(folder: Path, tag: str = "loss") -> list[int]:
    return [step for step, _ in curve(folder, tag)]


@pytest.fixture(scope="module")
def restarted(session_start: Start) -> Running:
    """A run that was killed after step 50, and has gone on from the checkpoint of step 40."""
    run_dir, flags = session_start.home / "restarted", ["--steps=100", "--checkpoint-every=40"]
    held_at = {"HELD_AT": "50", "HELD_BY": "TRAIN_ATTEMPT=0"}
    first = session_start.command([sys.executable, *held.MODULE, *flags], run_dir, 0, held_at)
    first.wait_until_held(50, saved=40)
    first.wait_until(lambda: 50 in steps_of(run_dir / "tensorboard"))
    first.end()
    return session_start.single(*flags, run_dir=run_dir, attempt=1).finish()


def test_a_run_that_was_started_again_is_one_curve(restarted: Running) -> None:
    folder = restarted.run_dir / "tensorboard"
    assert len(list(folder.iterdir())) == 2
    assert [event.step for event in events(folder) if event.session_log.status] == [1, 41]
    shown = dict(curve(folder))
    # The first step of each start, the step before each evaluation, and the last one.
    evaluated = {m["step"]: m["test_accuracy"] for m in restarted.metrics() if "loss" not in m}
    assert {1, 41, 100, *evaluated} <= shown.keys()
    assert shown == pytest.approx({step: restarted.losses()[step] for step in shown}, rel=1e-6)
    assert dict(curve(folder, "test_accuracy")) == pytest.approx(evaluated, rel=1e-6)


def test_tags_are_those_that_the_launcher_passes_on(restarted: Running) -> None:
    tags = {value.tag for event in events(restarted.run_dir / "tensorboard")
            for value in event.summary.value}  # fmt: skip
    assert tags == {"loss", "lr", "samples_per_s", "test_accuracy", "test_loss"}


@pytest.mark.slow
def test_tensorboard_itself_reads_that_curve(restarted: Running) -> None:
    folder = restarted.run_dir / "tensorboard"
    for tag in ("loss", "test_accuracy"):
        assert read_by_tensorboard(folder, tag) == curve(folder, tag)


def test_fast_steps_are_few_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "EVERY_S", 1e9)
    file = event_file(tmp_path, first_step=101)
    for step in range(101, 10_001):
        file.note(step, FIGURES)
        if step == 5_000:
            file.note(step, {"epoch": 1, "test_accuracy": 0.9})
    file.close()
    folder = tmp_path / "tensorboard"
    assert steps_of(folder) == [101, 5_000, 10_000]
    assert steps_of(folder, "test_accuracy") == [5_000]
    assert steps_of(folder, "epoch") == []


def test_points_are_written_while_the_run_lives(
    tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "EVERY_S", 0.01)
    file = event_file(tmp_path)
    for step in range(1, 5):
        file.note(step, FIGURES)
        until(lambda step=step: steps_of(tmp_path / "tensorboard")[-1:] == [step], "it is there")
    file.close()
    assert steps_of(tmp_path / "tensorboard") == [1, 2, 3, 4]


def test_a_later_attempt_comes_last_whatever_its_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt, first_step, now in ((9, 90, 3600.0), (10, 95, 1800.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        file = event_file(tmp_path, attempt=attempt, first_step=first_step)
        for step in (first_step, 100):
            file.note(step, {"loss": attempt})
        file.close()
    assert curve(tmp_path / "tensorboard") == [(90, 9.0), (95, 10.0), (100, 10.0)]


def test_an_evaluation_before_the_first_step_starts_no_thread(tmp_path: Path) -> None:
    file = event_file(tmp_path)
    before = threading.active_count()
    file.note(0, {"test_accuracy": 0.9})
    assert threading.active_count() == before
    file.close()
    assert steps_of(tmp_path / "tensorboard", "test_accuracy") == [0]


def test_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    file = event_file(tmp_path)
    file.note(1, {"loss": float("inf"), "lr": 0.5})
    file.close()
    assert steps_of(tmp_path / "tensorboard") == []
    assert steps_of(tmp_path / "tensorboard", "lr") == [1]


@pytest.fixture
def odd_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A run directory in which no event file can be written, and the reason."""
    folder = tmp_path / "run/tensorboard"
    folder.parent.mkdir()
    match request.param:
        case "link":
            (tmp_path / "else").mkdir()
            folder.symlink_to(tmp_path / "else")
            yield folder.parent, f"{folder}: is a link, which is not followed"
            assert list((tmp_path / "else").iterdir()) == []
        case "file":
            folder.touch()
            yield folder.parent, f"{folder}: is not a folder"
        case kind:
            if os.getuid() != 0:
                pytest.skip("needs root: mounts a small disk")
            folder.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "small", folder], check=True)
            try:
                if kind == "full":
                    (folder / "other").write_bytes(bytes(4096))
                else:
                    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
                what = {"full": "No space left on device", "read-only": "Read-only file system"}
                yield folder.parent, what[kind]
            finally:
                subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("odd_place", ["link", "file", "full", "read-only"], indirect=True)
def test_where_it_cannot_be_written_training_goes_on_and_one_line_says_so(
    odd_place: tuple[Path, str], start: Start
) -> None:
    run_dir, reason = odd_place
    run = start.single(*STEPS, run_dir=run_dir).finish()
    (line,) = [line for line in run.output().splitlines() if "TensorBoard" in line]
    assert line.startswith("train: warning: no more curves for TensorBoard: cannot write ")
    assert line.endswith(reason)
    assert list(run.losses()) == list(range(1, 13))
    assert run.outcome()["status"] == "done"


def run_with(text: str, tmp_path: Path, start: Start) -> Running:
    """Train with this text in the place of tensorboardX."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "tensorboardX.py").write_text(text)
    path = f"{folder}:{ROOT}"
    return start.single(*STEPS, run_dir=tmp_path / "run", PYTHONPATH=path).finish()


MISSING = """
import os, pathlib
metrics = pathlib.Path(os.environ["TRAIN_RUN_DIR"], "metrics.jsonl").read_text()
pathlib.Path(os.environ["TRAIN_RUN_DIR"], "imported").write_text(metrics)
raise ModuleNotFoundError("No module named 'tensorboardX'", name="tensorboardX")
"""


def test_without_tensorboardx_nothing_is_written_or_said(tmp_path: Path, start: Start) -> None:
    run = run_with(MISSING, tmp_path, start)
    assert not (tmp_path / "run/tensorboard").exists()
    assert "TensorBoard" not in run.output()
    assert "warning" not in run.output()
    assert '"loss"' in (tmp_path / "run/imported").read_text(), "imported before the first step"


def test_a_tensorboardx_that_does_not_work_is_named(tmp_path: Path, start: Start) -> None:
    run = run_with(r"raise TypeError('another\nprotobuf')", tmp_path, start)
    (line,) = [line for line in run.output().splitlines() if "TensorBoard" in line]
    assert line.endswith("no more curves for TensorBoard: TypeError: another protobuf")


def test_it_can_be_turned_off(tmp_path: Path, start: Start) -> None:
    run = start.single(*STEPS, "--tensorboard=off", run_dir=tmp_path / "run").finish()
    assert not (run.run_dir / "tensorboard").exists()


def test_only_rank_0_writes(tmp_path: Path, start: Start) -> None:
    run = start.whole(2, *STEPS, run_dir=tmp_path / "run")
    (file,) = (run.run_dir / "tensorboard").iterdir()
    assert file.stat().st_size
    assert {1, 12} <= set(steps_of(run.run_dir / "tensorboard"))
