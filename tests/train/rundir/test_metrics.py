"""Lines of `metrics.jsonl`: cheap, whole, in order, and never late for long."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.conftest import Until
from train.rundir import jsonl
from train.rundir.files import RunDirectory, read_lines
from train.rundir.jsonl import MetricsLog, dump, dump_numbers
from train.runtime.rank import RankInfo


def steps_in(path: Path) -> list[object]:
    return [record["step"] for record in read_lines(path)]


def test_lines_that_follow_each_other_slowly_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "TOGETHER_S", 0.0)
    log = MetricsLog(tmp_path / "lines", {"version": 1})
    for step in (1, 2, 3):
        log.note({"step": step})
        assert steps_in(tmp_path / "lines")[-1] == step


def test_lines_that_follow_each_other_fast_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "TOGETHER_S", 1e9)
    log = MetricsLog(tmp_path / "lines", {"version": 1})
    for step in (1, 2, 3):
        log.note({"step": step, "loss": 0.5})
    # The first has no other to wait for.
    assert steps_in(tmp_path / "lines") == [1]
    log.flush()
    assert steps_in(tmp_path / "lines") == [1, 2, 3]
    times = [record["time"] for record in read_lines(tmp_path / "lines")]
    assert times == sorted(times)  # type: ignore[type-var]


def test_a_line_that_no_other_follows_is_written_all_the_same(tmp_path: Path) -> None:
    """As before a step that hangs: how far the run has come is what people look for then."""
    log = MetricsLog(tmp_path / "lines", {})
    for step in range(100):
        log.note({"step": step})
    deadline = time.monotonic() + 60.0
    while steps_in(tmp_path / "lines") != list(range(100)):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_event_finds_all_metrics_before_it_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "TOGETHER_S", 1e9)
    directory = RunDirectory(tmp_path, RankInfo())
    for step in (1, 2, 3):
        directory.metric(step=step, loss=0.5)
    directory.event("error", step=3)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_a_clock_that_is_set_back_holds_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = iter((7200.0, 7200.0, 3600.0, 3600.0))
    monkeypatch.setattr(time, "time", lambda: next(hours, 3600.0))
    log = MetricsLog(tmp_path / "lines", {})
    log.note({"step": 1})
    log.note({"step": 2})
    assert steps_in(tmp_path / "lines") == [1, 2]


@pytest.mark.parametrize(
    "record",
    [
        {"step": 3, "loss": 0.1, "lr": 1e-30, "big": 1e300, "negative": -2.5, "whole": 2.0},
        {"loss": float("nan"), "other": float("-inf")},
        {"accuracy of 'it'": 0.5, "größe": 1},
        {"flag": True, "name": "x", "nothing": None, "list": [1, 2.5]},
        {},
    ],
)
def test_numbers_are_written_as_json_does(record: dict[str, object]) -> None:
    assert dump_numbers(record) == dump(record)
    assert json.loads(dump_numbers(record)) is not None


def test_a_long_file_is_thinned_and_no_step_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "WHOLE_BYTES", 500)
    monkeypatch.setattr(jsonl, "THINNED_S", 3600.0)
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, {"attempt": 0, "restart": 0})
    step = 0
    while not path.exists() or path.stat().st_size < 500:
        step += 1
        log.note({"step": step, "loss": 0.5})
        log.flush()
    whole = step
    for step in range(whole + 1, whole + 8):
        log.note({"step": step, "loss": 0.5})
        if step == whole + 5:
            log.note({"step": step, "test_accuracy": 0.9})
    log.flush()  # as before an event
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    thinned = [{k: v for k, v in row.items() if k in ("step", "count")} for row in rows[whole:]]
    assert thinned == [
        {"step": whole + 5, "count": 5},
        {"step": whole + 5},
        {"step": whole + 7, "count": 2},
    ]
    assert rows[whole + 1]["test_accuracy"] == 0.9


def test_a_record_that_waits_is_written_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(jsonl, "WHOLE_BYTES", 1)
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, {})
    for step in range(1, 5):
        log.note({"step": step, "loss": 0.5})
    until(lambda: steps_in(path)[-1] == 4, "the last record is there")
    assert sum(int(str(record.get("count", 1))) for record in read_lines(path)) == 4
