"""The phases of a start: how long each took, from the attempt's beginning to the first step."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.train.conftest import Start
from train.runtime.phases import ATTEMPT_BEGAN, Phases, process_began


def test_a_process_knows_when_it_began() -> None:
    before = time.time()
    code = "from train.runtime.phases import process_began; print(process_began())"
    done = subprocess.run(
        [sys.executable, "-c", f"import time; time.sleep(0.3); {code}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    # Before it has slept; /proc counts in hundredths of a second.
    assert before - 0.02 <= float(done.stdout) <= time.time() - 0.3


def test_phases_follow_each_other_from_the_begin_of_the_attempt() -> None:
    began = process_began()
    phases = Phases.of_process({ATTEMPT_BEGAN: str(int(began) - 100)}, restart=0)
    assert phases.began == int(began) - 100
    assert phases.seconds["start"] == pytest.approx(began - phases.began, abs=0.05)
    phases.end("imports", at=began + 2)
    phases.end("setup", at=began + 1.5)  # the clock was set back
    phases.end("restore", at=began + 3)
    assert [*phases.seconds] == ["start", "imports", "setup", "restore"]
    assert sum(phases.seconds.values()) == pytest.approx(began + 3 - phases.began, abs=0.05)
    assert phases.seconds["setup"] == 0


@pytest.mark.parametrize(
    ("value", "restart"),
    [("17", 0), ("never", 0), ("-1", 0), ("9" * 40, 0), ("{now}", 1), (None, 0)],
    ids=["years ago", "no number", "negative", "too long", "started again by torchrun", "unset"],
)
def test_an_attempt_that_did_not_begin_for_this_process_is_left_out(
    value: str | None, restart: int
) -> None:
    environ = {} if value is None else {ATTEMPT_BEGAN: value.format(now=int(time.time()) - 50)}
    phases = Phases.of_process(environ, restart=restart)
    assert phases.seconds == {}
    assert phases.began == pytest.approx(process_began(), abs=0.05)


def test_a_run_tells_how_long_each_phase_took(start: Start, tmp_path: Path) -> None:
    began = int(time.time()) - 7
    flags = ("--task", "digits", "--steps", "3")
    run = start.single(*flags, run_dir=tmp_path / "run", TRAIN_ATTEMPT_BEGAN=str(began))
    run.finish(0)
    (ready,) = [event for event in run.events() if event["event"] == "ready"]
    phases = ready["phases"]
    assert [*phases] == ["start", "imports", "process_group", "setup", "restore"]
    assert ready["began"] == began
    assert phases["start"] >= 6.9
    # They follow each other, so the last one ends when the event is written.
    assert began + sum(phases.values()) == pytest.approx(ready["time"], abs=0.5)
    (epoch,) = [event for event in run.events() if event["event"] == "epoch"]
    assert 0 < epoch["seconds"] < epoch["time"] - ready["time"]
