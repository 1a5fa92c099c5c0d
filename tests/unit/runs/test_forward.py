"""Metrics that are passed on to TensorBoard: one curve over all attempts."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import Until
from tests.support.event_files import curve, read_by_tensorboard
from tests.support.told_run import ToldRun, run_at
from toolkit.runs.records.run_directory import read_metrics
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.views.forward import forward


def record(folder: Path, *steps: int, loss: float = 1.0, **more: Any) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"time": 1e9 + step, "step": step, "loss": loss / step, **more}
            file.write(json.dumps(row) + "\n")


def ended(folder: Path) -> ToldRun:
    folder.mkdir(exist_ok=True)
    run = run_at(folder)
    run.told = RunStatus(state=RunState.SUCCEEDED)
    return run


def restarted(folder: Path) -> ToldRun:
    """Return a run of three starts, one of which torchrun has not counted."""
    run = ended(folder)
    record(folder, *range(1, 21))
    record(folder, *range(11, 31), loss=2.0)
    record(folder, *range(26, 41), loss=3.0, attempt=1)
    return run


def forward_to_board(runs: Sequence[Run], board: Path, *, follow: bool = True) -> dict[str, int]:
    found = forward(runs, "tensorboard", board, follow=follow)
    assert all(place == str(board / name) for name, (_, place) in found.items())
    return {name: records for name, (records, _) in found.items()}


def test_steps_that_were_made_again_take_the_place_of_the_earlier_ones(tmp_path: Path) -> None:
    run = restarted(tmp_path / "run")
    assert forward_to_board([run], tmp_path / "board") == {"digits": 55}
    rows = read_metrics(tmp_path / "run")
    shown = curve(tmp_path / "board/digits")
    assert [step for step, _ in shown] == [row["step"] for row in rows] == list(range(1, 41))
    assert [loss for _, loss in shown] == pytest.approx([row["loss"] for row in rows], rel=1e-6)


def test_another_process_writes_the_files_anew(tmp_path: Path) -> None:
    run = restarted(tmp_path / "run")
    for _ in range(2):
        forward_to_board([run], tmp_path / "board")
    assert [step for step, _ in curve(tmp_path / "board/digits")] == list(range(1, 41))


def test_a_run_is_followed_to_its_end(tmp_path: Path, until: Until) -> None:
    run = ended(tmp_path / "run")
    run.told = RunStatus(state=RunState.RUNNING)
    record(tmp_path / "run", 1, 2)
    passed: dict[str, int] = {}
    thread = threading.Thread(
        target=lambda: passed.update(forward_to_board([run], tmp_path / "board"))
    )
    thread.start()
    board = tmp_path / "board/digits"
    until(lambda: [step for step, _ in curve(board)] == [1, 2], "what is there is passed on")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"time": 5, "step": 3, "lo')
        file.flush()
        record(tmp_path / "run")
        file.write('ss": 0.5}\n')
    until(lambda: [step for step, _ in curve(board)] == [1, 2, 3], "a line that was torn is whole")
    record(tmp_path / "run", 4)
    run.told = RunStatus(state=RunState.SUCCEEDED)
    thread.join(300)
    assert passed == {"digits": 4}
    assert [step for step, _ in curve(board)] == [1, 2, 3, 4]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "board/digits").mkdir(parents=True)
    (tmp_path / "board/digits/thesis").touch()
    with pytest.raises(toolkit.InputError, match="exists and contains other files; name another"):
        forward_to_board([ended(tmp_path / "run")], tmp_path / "board")
    assert (tmp_path / "board/digits/thesis").exists()


def test_each_point_of_a_sweep_has_a_folder(tmp_path: Path) -> None:
    names = [f"sweep-1126-050000-abcd/000{n}-lr=1e-0{n}+x" for n in range(2)]
    points = []
    for number, name in enumerate(names):
        (tmp_path / str(number)).mkdir()
        record(tmp_path / str(number), 1)
        points.append(run_at(tmp_path / str(number), name=name))

    class Sweep(ToldRun):
        members = points

    read = forward_to_board([Sweep(points[0].record)], tmp_path / "board", follow=False)
    assert read == dict.fromkeys(names, 1)
    assert [curve(tmp_path / "board" / name) for name in names] == [[(1, 1.0)]] * 2


@pytest.mark.parametrize("name", ["/tmp/x", "../x", "a/../x", "a/b/c", ".x", "a b", ""])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(toolkit.InputError, match="cannot be a folder name"):
        forward_to_board([run_at(tmp_path, name=name)], tmp_path / "board")
    assert not (tmp_path / "board").exists()


def test_what_is_no_record_is_left_out(tmp_path: Path) -> None:
    run = ended(tmp_path / "run")
    text = '[]\n{"step": 1}\nx\n{"step": 2, "time": 5, "loss": "high", "a\\u001b": 1}\n'
    (tmp_path / "run/metrics.jsonl").write_text(text)
    assert forward_to_board([run], tmp_path / "board") == {"digits": 1}
    assert curve(tmp_path / "board/digits", "a_x1b") == [(2, 1.0)]
    assert curve(tmp_path / "board/digits") == []


@pytest.mark.slow
def test_tensorboard_itself_reads_one_curve(tmp_path: Path) -> None:
    forward_to_board([restarted(tmp_path / "run")], tmp_path / "board")
    read = read_by_tensorboard(tmp_path / "board/digits")
    assert [step for step, _ in read] == list(range(1, 41))
    assert read == curve(tmp_path / "board/digits")
