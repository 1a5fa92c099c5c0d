"""A training that stays at a step until it is killed or asked to stop, once in a run directory.

So the kill or stop need not be quick: however slow the machine, the training has not ended by then.

`-m tests.train.support.held` in place of `-m train`, or this text for `python -c` without tests.
`HELD_AT` is the step after which it stays, `HELD_BY` the process that does, such as `RANK=1`: it
has this variable, which ends so. The others wait for it in the next step, as for any slow rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

# None of them imports torch: that shall come, as it does without us, when signals are listened to.
from train.__main__ import enter
from train.rundir.files import RunDirectory
from train.runtime.signals import StopRequest

MODULE = ("-m", "tests.train.support.held")
SAYING = "held after step "

_metric, _install = RunDirectory.metric, StopRequest.install
_requests: list[StopRequest] = []


def mark(run_dir: Path, step: int) -> Path:
    """Name the file that is there from when a training is held; it is held no second time."""
    return run_dir / f"held-{step}"


def _install_and_remember(stop: StopRequest, at_once: Callable[[str], None]) -> None:
    _requests.append(stop)
    _install(stop, at_once)


def _metric_and_stay(directory: RunDirectory, *, step: int, **values: float) -> None:
    _metric(directory, step=step, **values)
    # Of a step, not of an evaluation.
    if step == int(os.environ["HELD_AT"]) and "loss" in values and _is_meant():
        _stay(mark(directory.path, step), step)


def _is_meant() -> bool:
    name, _, end = os.environ["HELD_BY"].partition("=")
    return os.environ[name].endswith(end)


def _stay(marked: Path, step: int) -> None:
    try:
        marked.touch(exist_ok=False)
    except FileExistsError:
        return
    print(f"{SAYING}{step}\n", end="", flush=True)
    while not any(request.requested for request in _requests):
        time.sleep(0.01)


if __name__ == "__main__":
    RunDirectory.metric = _metric_and_stay  # type: ignore[assignment, method-assign]
    StopRequest.install = _install_and_remember  # type: ignore[assignment, method-assign]
    enter()
