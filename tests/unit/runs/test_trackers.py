"""Trackers that only append: one row for each step, once, whoever passes it on."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import ROOT
from tests.support.told_run import run_at
from tests.unit.runs.test_forward import ended, record, restarted
from toolkit.cli import runs as commands
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.views.forward import forward
from toolkit.runs.views.trackers import TRACKERS, _AppendingTracker, _Row

PACKAGES = ROOT / ".cache/trackers"
"""Where tests/peers.sh puts the real trackers."""


class Rows(_AppendingTracker):
    """A tracker that keeps what it is sent."""

    place = "memory"

    def __init__(self, *, sent: int = -1) -> None:
        super().__init__(sent=sent)
        self.rows: list[_Row] = []

    def send(self, row: _Row) -> None:
        self.rows.append(row)

    def flush(self) -> None:
        """Nothing is held back."""


def test_an_evaluation_adds_to_the_row_of_its_step() -> None:
    tracker = Rows()
    tracker.add(1, 5.0, {"loss": 2.0})
    tracker.add(1, 6.0, {"test_loss": 3.0, "p\u00e4rt:1": 1.0})
    tracker.add(2, 7.0, {"loss": 1.0})
    assert tracker.rows == [_Row(1, 6.0, {"loss": 2.0, "test_loss": 3.0, "p_rt_1": 1.0})]
    tracker.close(ended=True)
    assert [row.step for row in tracker.rows] == [1, 2]


def test_a_step_that_may_get_more_figures_is_left_for_later() -> None:
    tracker = Rows()
    tracker.add(1, 5.0, {"loss": 2.0})
    tracker.close(ended=False)
    assert tracker.rows == []
    assert tracker.sent == -1


def test_each_step_is_sent_once() -> None:
    tracker = Rows(sent=3)  # by an earlier process
    for first, last in ((1, 8), (6, 12)):  # a failure after step 8; a checkpoint of step 5
        tracker.begin(first)
        for step in range(first, last + 1):
            tracker.add(step, 5.0, {"loss": 1 / step})
    tracker.close(ended=True)
    assert [row.step for row in tracker.rows] == list(range(4, 13))


def test_the_command_names_all_trackers() -> None:
    assert commands._TRACKERS == TRACKERS


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_a_library_that_is_missing_is_named(tracker: str, tmp_path: Path) -> None:
    message = f"--to {tracker}: needs {tracker}: pip install {tracker}"
    with pytest.raises(toolkit.InputError, match=message):
        forward([ended(tmp_path / "run")], tracker)


def test_who_has_settings_of_its_own_takes_no_output(tmp_path: Path) -> None:
    with pytest.raises(toolkit.InputError, match="--output: mlflow has its own settings"):
        forward([ended(tmp_path / "run")], "mlflow", tmp_path)


def test_prometheus_gets_the_newest_figures_of_all_runs(tmp_path: Path) -> None:
    runs = [restarted(tmp_path / "run"), run_at(tmp_path / "other", name="other")]
    runs[1].told = RunStatus(state=RunState.RUNNING)
    (tmp_path / "other").mkdir()
    record(tmp_path / "other", 7, loss=7.0)
    target = tmp_path / "runs.prom"
    for _ in range(2):
        forward(runs, "prometheus", target, follow=False)
        lines = target.read_text().splitlines()
        assert 'toolkit_run_figure{name="loss",run="digits"} 0.075' in lines
        assert 'toolkit_run_figure{name="loss",run="other"} 1.0' in lines
        assert 'toolkit_run_step{run="digits"} 40.0' in lines


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "thesis.txt"
    target.write_text("of years\n")
    with pytest.raises(
        toolkit.InputError, match=r"thesis\.txt: exists and was not created by the toolkit"
    ):
        forward([ended(tmp_path / "run")], "prometheus", target)
    assert target.read_text() == "of years\n"


FORWARD = """
import sys
from pathlib import Path
from tests.support.told_run import run_at
from toolkit.runs.views.forward import forward
from toolkit.runs.state import RunState, RunStatus
tracker, folder, state, output = sys.argv[1:]
run = run_at(Path(folder))
run.told = RunStatus(state=RunState[state])
forward([run], tracker, Path(output) if output else None, follow=False)
"""


def need_trackers() -> None:
    """Skip a test, or fail it under CI, where the real trackers are missing."""
    if not PACKAGES.is_dir():
        if os.environ.get("CI"):
            pytest.fail("CI must have the trackers")
        pytest.skip("needs the trackers; see tests/peers.sh")


def passed_on(tracker: str, folder: Path, output: str = "") -> None:
    """Pass on a run of three starts by three processes: one comes in the midst of the run."""
    need_trackers()
    run_dir = folder / "run"
    restarted(run_dir)
    whole = (run_dir / "metrics.jsonl").read_text()
    environ = {
        **os.environ,
        "PYTHONPATH": f"{PACKAGES}:{ROOT}",
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    # The first one sees step 20 of the first start, and 19 of the second one.
    for lines, state in ((29, "RUNNING"), (None, "SUCCEEDED"), (None, "SUCCEEDED")):
        text = whole if lines is None else "".join(whole.splitlines(keepends=True)[:lines])
        (run_dir / "metrics.jsonl").write_text(text)
        argv = [sys.executable, "-c", FORWARD, tracker, str(run_dir), state, output]
        done = subprocess.run(argv, env=environ, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == "" or tracker == "trackio"  # it prints a line when Python ends


STEPS = list(range(1, 41))


@pytest.mark.slow
def test_mlflow_has_one_run_with_each_step_once(tmp_path: Path) -> None:
    passed_on("mlflow", tmp_path)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        rows = database.execute(
            "select run_uuid, step, value from metrics where key = 'loss' order by step"
        ).fetchall()
        states = database.execute("select status from runs").fetchall()
    assert len({run for run, _, _ in rows}) == 1
    assert [step for _, step, _ in rows] == STEPS
    assert states == [("FINISHED",)]


@pytest.mark.slow
def test_trackio_has_one_run_with_each_step_once(tmp_path: Path) -> None:
    passed_on("trackio", tmp_path)
    with sqlite3.connect(tmp_path / "trackio/digits.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step")
        found = [(run, step, json.loads(metrics)["loss"]) for run, step, metrics in rows]
    assert [(run, step) for run, step, _ in found] == [("digits", step) for step in STEPS]
    assert found[0][2] == 1.0


def history(path: Path) -> Iterator[dict[str, float]]:
    """Yield the rows in a file of W&B: a log as LevelDB has them, of protobuf records."""
    data = path.read_bytes()[7:]
    at, whole = 7, b""
    while data:
        if (room := 32768 - at % 32768) < 7:
            data, at = data[room:], at + room
            continue
        _, size, kind = struct.unpack("<IHB", data[:7])
        whole += data[7 : 7 + size]
        data, at = data[7 + size :], at + 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield {key: value for key, value in _figures(whole)}
            whole = b""


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a protobuf message that have a length."""
    while data:
        key, data = _varint(data)
        if key & 7 == 2:
            size, data = _varint(data)
            yield key >> 3, data[:size]
            data = data[size:]
        elif key & 7 == 0:
            _, data = _varint(data)
        else:
            data = data[8 if key & 7 == 1 else 4 :]


def _varint(data: bytes) -> tuple[int, bytes]:
    value = 0
    for place, byte in enumerate(data):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, data[place + 1 :]
    raise ValueError("cut off")


def _figures(message: bytes) -> Iterator[tuple[str, float]]:
    """Yield the items of a history record: its field 2; key, nested key and JSON are 1, 2, 16."""
    for number, part in _fields(message):
        if number == 2:
            for item in (content for n, content in _fields(part) if n == 1):
                fields = dict(_fields(item))
                if 16 in fields:
                    yield (fields.get(1) or fields[2]).decode(), json.loads(fields[16])


@pytest.mark.slow
def test_wandb_has_one_run_with_each_step_once(tmp_path: Path) -> None:
    passed_on("wandb", tmp_path, str(tmp_path / "out"))
    files = sorted((tmp_path / "out/wandb").glob("offline-run-*/run-digits.wandb"))
    assert len(files) == 3, "each of them is synced to the run with this id"
    rows = [row for path in files for row in history(path) if "loss" in row]
    assert [row["_step"] for row in rows] == STEPS
    assert rows[0]["loss"] == 1.0


OWN_WANDB = """
import os, pathlib, sys, time
import wandb
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
run = wandb.init(project="mine", mode="offline", dir=sys.argv[1])
for step in (range(1, 4) if restart == 0 else range(4, 7)):
    run.log({"loss": 1 / step}, step=step)
run.finish()
pathlib.Path(sys.argv[1], "finished-" + os.environ["RANK"]).touch()
while len(list(pathlib.Path(sys.argv[1]).glob("finished-*"))) < 2:
    time.sleep(0.1)  # for torchrun kills the other rank as soon as one fails
sys.exit(restart == 0)
"""


@pytest.mark.slow
def test_a_script_with_its_own_wandb_goes_on_with_its_run_after_a_restart(tmp_path: Path) -> None:
    need_trackers()
    script = tmp_path / "own.py"
    script.write_text(OWN_WANDB)
    profile = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    content: dict[str, Any] = {"name": "own", "script": str(script), "args": [str(tmp_path)]}
    content |= {"env": {"PYTHONPATH": str(PACKAGES)}, "retries": {"in_job": 1}}
    content |= {"resources": {"nproc_per_node": 2}}
    run = toolkit.submit(toolkit.JobSpec.model_validate(content), to=profile)
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, [*run.logs()]
    for name in (run.name, f"{run.name}-rank-1"):
        files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
        assert len(files) == 2, "each of them is synced to the run with this id"
        steps = [row["_step"] for path in files for row in history(path) if "loss" in row]
        assert steps == list(range(1, 7))
