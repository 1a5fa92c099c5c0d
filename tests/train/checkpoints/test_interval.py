"""`--checkpoint-every auto` saves as often as cost and failures make best, on all ranks alike."""

from __future__ import annotations

import json
import math
import signal
import time
from typing import TYPE_CHECKING

import pytest

from train.checkpoints import interval
from train.checkpoints.checkpointer import SaveTiming
from train.checkpoints.interval import ASSUMED_S, Interval, history
from train.rundir.console import Console

if TYPE_CHECKING:
    from tests.train.conftest import Start


def at(event: str, seconds: float, **fields: object) -> dict[str, object]:
    return {"event": event, "time": seconds, **fields}


HISTORIES: dict[str, tuple[list[dict[str, object]], tuple[int, float, float | None]]] = {
    "the first start": ([at("start", 0)], (0, 0.0, None)),
    "stopped in time": (
        [at("start", 0), at("checkpoint", 50, stall_seconds=0.5), at("stopped", 60)],
        (0, 60.0, 0.5),
    ),
    "extended": ([at("start", 0), at("done", 10)], (0, 10.0, None)),
    "an error": ([at("start", 0), at("error", 30)], (1, 30.0, None)),
    "killed after a checkpoint": (
        [at("start", 0), at("checkpoint", 50, stall_seconds=2)],
        (1, 50.0, 2.0),
    ),
    "killed twice": ([at("start", 0), at("start", 5), at("ready", 9)], (2, 4.0, None)),
    "no number": (
        [at("start", 0), at("checkpoint", 9, stall_seconds="x"), {"event": "ready"}],
        (1, 0.0, None),
    ),
    "a clock that was set back": ([at("start", 100), at("ready", 50)], (1, 0.0, None)),
    "no time at all": ([at("start", 0), at("checkpoint", 1, stall_seconds=0)], (1, 1.0, 0.001)),
}


@pytest.mark.parametrize("case", HISTORIES)
def test_earlier_starts_are_counted_by_how_they_ended(case: str) -> None:
    events, expected = HISTORIES[case]
    this_start = [] if case == "the first start" else [at("start", 1000)]
    assert history(events + this_start) == expected


def test_the_interval_is_that_of_youngs_formula(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [at("start", 0), at("checkpoint", 3600, stall_seconds=8)] * 3
    chosen = Interval([*failed, at("start", 20_000)], Console(rank=0))
    between = (3 * 3600 + ASSUMED_S) / 4
    assert math.isclose(chosen.seconds, math.sqrt(2 * 8 * between), rel_tol=1e-3)
    chosen.committed(SaveTiming(stall_s=2, total_s=5))
    assert math.isclose(chosen.seconds, math.sqrt(2 * 2 * between), rel_tol=1e-3)
    chosen.committed(SaveTiming(stall_s=2.1, total_s=5))
    said = capsys.readouterr().out
    assert said == (
        f"a checkpoint every {math.sqrt(4 * between):.0f} s, by √(2 · 2.000 s · {between:.0f} s): "
        "the last one stopped training for 2.000 s; 3 failures in 3.0 h, and one more is assumed "
        "in the next 24 h\n"
    )
    # A write that takes longer than the interval: the next save would wait for it.
    chosen.committed(SaveTiming(stall_s=2, total_s=9999))
    assert chosen.seconds == 9999
    assert "every 9999 s" in capsys.readouterr().out


def test_a_first_checkpoint_measures_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval, "FIRST_S", 0.0)
    assert Interval([at("start", 0)], Console(rank=0)).due
    monkeypatch.setattr(interval, "FIRST_S", 1e9)
    chosen = Interval([at("start", 0)], Console(rank=0))
    assert not chosen.due
    chosen.seconds = 1e-9
    chosen.saving()
    while not chosen.due:
        time.sleep(0.001)


def test_all_ranks_save_when_it_is_due_by_the_clock_of_rank_0(start: Start) -> None:
    run_dir = start.home / "run"
    flags = ("--task=chars", "--global-batch=12", "--checkpoint-every=auto")
    start.whole(2, *flags, "--steps=1", run_dir=run_dir)
    # As if it had failed so often that the best interval is a fraction of a second.
    events = run_dir / "events.jsonl"
    first = events.read_text().splitlines()[0]
    assert json.loads(first)["event"] == "start"
    with events.open("a") as file:
        file.write(f"{first}\n" * 20_000)
    running, other = start.each(2, *flags, "--steps=1000000", run_dir=run_dir)

    def saved() -> list[int]:
        return [e["step"] for e in running.events() if e["event"] == "checkpoint" if e["step"] > 1]

    running.wait_until(lambda: len(saved()) > 2)
    running.process.send_signal(signal.SIGTERM)
    assert [running.wait(), other.wait()] == [75, 75], running.output()
    assert running.outcome()["status"] == "preempted"
    assert "a checkpoint every" in running.output()
