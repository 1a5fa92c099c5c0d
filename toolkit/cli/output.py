"""What the commands print while a run goes on, and how they end."""

from __future__ import annotations  # naming a type must not import it

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

import toolkit

__all__ = [
    "echo_failure",
    "echo_lines",
    "follow_and_exit",
    "follow_lines",
    "note",
    "report",
    "report_and_exit",
    "say",
    "signals_cancel",
    "stop_writing",
]

_MOST_POINTS = 20
"""How many failed points of a sweep are named one by one."""


def note(notes: tuple[str, ...]) -> None:
    """Show what a plan has to say."""
    for note in notes:
        click.echo(f"note: {note}", err=True)


def echo_lines(lines: Iterator[str]) -> None:
    """Print lines as they come."""
    for line in lines:
        say(line)


def say(text: str, *, err: bool = False) -> None:
    """Print what runs and schedulers say, so that a terminal shows it and does not obey it."""
    from toolkit.text import untrusted

    click.echo("\n".join(map(untrusted.for_terminal, text.split("\n"))), err=err)


def tell_waiting(run: toolkit.Run) -> Callable[[toolkit.RunStatus], None]:
    """Return a callback that prints why a run waits, each time the reason changes."""
    shown = ""

    def tell(status: toolkit.RunStatus) -> None:
        nonlocal shown
        waits = status.state in (toolkit.RunState.PENDING, toolkit.RunState.UNKNOWN)
        line = f"{status.state.upper()} ({status.reason})" if waits else ""
        if line and line != shown:
            _say(run, f"{run.name}: {line}")
        shown = line

    return tell


def tell_states(run: toolkit.Run) -> Callable[[toolkit.RunStatus], None]:
    """Return a callback that prints the number of points per state, each time it changes."""
    shown = ""

    def tell(status: toolkit.RunStatus) -> None:
        nonlocal shown
        if status.reason != shown:
            shown = status.reason
            _say(run, f"{run.name}: {shown}")

    return tell


def follow_lines(run: toolkit.Run, **view: Any) -> Iterator[str]:
    """Yield a run's lines until it has ended, and print meanwhile why the run waits.

    Args:
        run: The run.
        view: Which lines are wanted, as `Run.logs` takes it.
    """
    tell = tell_states(run) if run.points else tell_waiting(run)
    return run.logs(follow=True, on_status=tell, **view)


def echo_failure(run: toolkit.Run, *, attempt: int | None = None) -> None:
    """Say what failed first, with its traceback; of a sweep, a line for each point that failed."""
    if not run.points:
        for line in failure.lines() if (failure := run.failure(attempt=attempt)) else ():
            say(line, err=True)
        return
    failed = ((point.name, point.failure(attempt=attempt)) for point in run.points)
    texts = [f"{name}: first failure: {failure}" for name, failure in failed if failure]
    for line in texts[:_MOST_POINTS]:
        say(line, err=True)
    if len(texts) > _MOST_POINTS:
        click.echo(f"{len(texts) - _MOST_POINTS} more points have failed", err=True)


def _echo_states(run: toolkit.Run) -> None:
    """Say where the points of a sweep stand, each time it changes, until all have ended."""
    from toolkit.runs.run import pauses

    tell = tell_states(run)
    for pause_s in pauses():
        status = run.status()
        tell(status)
        if status.state.final or status.lost:
            return
        time.sleep(pause_s)


@contextlib.contextmanager
def signals_cancel(run: toolkit.Run) -> Iterator[None]:
    """Let Ctrl-C, a closed terminal and `kill` stop the run; its output is still shown."""
    import signal

    def cancel(*_: object) -> None:
        run.cancel()
        with contextlib.suppress(OSError):  # the terminal may be gone
            click.echo("stopping with a checkpoint…", err=True)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, cancel) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow_and_exit(run: toolkit.Run) -> None:
    """Show a run until it has ended, and end as it did; Ctrl-C leaves it alone."""
    try:
        if run.points:
            _echo_states(run)
        else:
            echo_lines(follow_lines(run))
    except KeyboardInterrupt:
        click.echo(
            f"\n{run.uri} goes on; `toolkit logs -f {run.name}` follows it again, "
            f"`toolkit cancel {run.name}` stops it",
            err=True,
        )
        sys.exit(130)
    report_and_exit(run)


def report_and_exit(run: toolkit.Run) -> None:
    """Wait for a run, say how it ended and what failed, and end with 0 if it has succeeded."""
    status = run.wait()
    report(run, status)
    sys.exit(0 if status.state is toolkit.RunState.SUCCEEDED else 1)


def report(run: toolkit.Run, status: toolkit.RunStatus) -> None:
    """Say how a run ended, and what failed."""
    if status.state is toolkit.RunState.FAILED:
        echo_failure(run)
    where = f"; run directory {run.run_dir}" if run.run_dir else ""
    reason = f" ({status.reason})" if status.reason else ""
    _say(run, f"{run.name}: {status.state.upper()}{reason}{where}")


def _say(run: toolkit.Run, text: str) -> None:
    from toolkit.runs import run_directory

    say(run_directory.mask_of(run.run_dir).hide(text), err=True)


def stop_writing() -> None:
    """Discard buffered output, so that Python does not report an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
