"""Our productive time beside that of ml-goodput-measurement, computed by its own calculator."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.unit.runs.test_goodput import Recorded

pytestmark = pytest.mark.slow

PACKAGE = ROOT / ".cache/ml-goodput-measurement"
"""Where tests/peers.sh puts it, with what it needs of Google's clients."""

CALCULATE = """
import datetime, json, sys
from ml_goodput_measurement.src.goodput import GoodputCalculator

class Log:
    def read_cloud_logging_entries(self, *_, **__):
        entries = json.load(sys.stdin)
        return entries, (datetime.datetime.now(datetime.timezone.utc), "last")

calculator = GoodputCalculator("job", "log", Log(), cache_dir=sys.argv[1])
goodput, _, _ = calculator.get_job_goodput()
total = calculator._get_total_job_time(datetime.datetime.now(datetime.timezone.utc))
print(json.dumps(goodput / 100 * total))
"""


def calculated(folder: Path, cache: Path) -> float:
    """Return the productive seconds of a run directory by Google's calculator."""
    if not PACKAGE.is_dir():
        if os.environ.get("CI"):
            pytest.fail("CI must have ml-goodput-measurement")
        pytest.skip("needs ml-goodput-measurement; see tests/peers.sh")
    done = subprocess.run(
        [sys.executable, "-c", CALCULATE, cache],
        input=json.dumps(entries_of(folder)),
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout))


def entries_of(folder: Path) -> list[dict[str, Any]]:
    """Return what a run has recorded, as its training would have logged it to Google."""
    entries: list[tuple[float, dict[str, Any]]] = []

    def note(when: float, **entry: Any) -> None:
        entries.append((when, {"job_name": "job", **entry}))

    def pause(kind: str, end: float, seconds: float) -> None:
        begin = end - seconds
        for key, when in (("start", begin), ("end", end)):
            name = f"custom_badput_event_{key}_time"
            note(when, custom_badput_event_type=kind, **{name: when})

    batch, end = 0.0, 0.0
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            batch = event["global_batch"]
        elif event["event"] == "ready":
            note(event["began"], job_start_time=event["began"])
        elif event["event"] == "epoch":
            pause("evaluation", event["time"], event["seconds"])
        elif event["event"] == "checkpoint":
            pause("checkpoint", event["time"], event["stall_seconds"])
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        begin, end = row["time"] - batch / row["samples_per_s"], row["time"]
        note(begin, step_count=row["step"] - 1, step_start_time=begin)
    note(end, job_end_time=end)
    return [entry for _, entry in sorted(entries, key=lambda one: one[0])]


def trained(run: Recorded, first: int, last: int, at: float, *, each: float = 0.7) -> float:
    """Record a start whose first step compiles; evaluations and checkpoints between the steps."""
    at = run.steps(first, first, run.start(at), each=9.0)
    for step in range(first + 1, last + 1):
        at = run.steps(step, step, at, each=each)
        if step % 25 == 0 and step < last:
            at += 1.5
            run.event("checkpoint", at, step=step, stall_seconds=1.5)
        if step % 40 == 0 and step < last:
            at += 4
            run.event("epoch", at, step=step, seconds=4.0)
    return at


def test_a_run_without_faults(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    trained(run, 1, 300, 30)
    ours = run.goodput().seconds["productive"]
    assert ours == pytest.approx(300 * 0.7)
    assert calculated(tmp_path, tmp_path) == pytest.approx(ours, rel=1e-3)


def test_a_run_that_was_restarted_and_requeued(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    at = trained(run, 1, 330, 30)
    run.restart = 1
    at = trained(run, 301, 660, at + 12)
    run.attempt, run.restart = 1, 0
    trained(run, 651, 900, at + 300)
    found = run.goodput()
    assert (found.steps, found.steps_again) == (900, 40)
    assert calculated(tmp_path, tmp_path) == pytest.approx(found.seconds["productive"], rel=1e-3)
