"""What the commands print while a run goes on, and how they end."""

from __future__ import annotations  # naming a type must not import it

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

import click

import toolkit
from toolkit import secrecy

__all__ = [
    "echo_lines",
    "follow_and_exit",
    "note",
    "report_and_exit",
    "signals_cancel",
    "stop_writing",
]


def note(notes: tuple[str, ...]) -> None:
    """Show what a plan has to say."""
    for note in notes:
        click.echo(f"note: {note}", err=True)


def echo_lines(lines: Iterator[str]) -> None:
    """Print lines as they come."""
    for line in lines:
        click.echo(line)


def echo_pending(run: toolkit.Run) -> None:
    """Say why a run has not started, each time the reason changes, until it has."""
    from toolkit.launchers.base import pauses

    shown = ""
    for pause_s in pauses():
        found = run.status()
        if found.state is not toolkit.RunState.PENDING:
            return
        if found.reason != shown:
            shown = found.reason
            click.echo(f"{run.name}: PENDING ({shown})", err=True)
        time.sleep(pause_s)


def echo_states(run: toolkit.Run) -> None:
    """Say how many points of a sweep are in which state, each time it changes, until the end."""
    from toolkit.launchers.base import pauses

    shown = ""
    for pause_s in pauses():
        found = run.status()
        if found.reason != shown:
            shown = found.reason
            click.echo(f"{run.name}: {shown}", err=True)
        if found.state.final or found.lost:
            return
        time.sleep(pause_s)


@contextlib.contextmanager
def signals_cancel(run: toolkit.Run) -> Iterator[None]:
    """Let Ctrl-C, a closed terminal and `kill` stop the run; what it prints is still shown."""

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
            echo_states(run)
        else:
            echo_pending(run)
            echo_lines(run.logs(follow=True))
    except KeyboardInterrupt:
        click.echo(
            f"\n{run.uri} goes on; `toolkit logs -f {run.name}` follows it again, "
            f"`toolkit cancel {run.name}` stops it",
            err=True,
        )
        sys.exit(130)
    report_and_exit(run)


def report_and_exit(run: toolkit.Run) -> None:
    """Wait for a run, say how it ended, and end with 0 if it has succeeded."""
    from toolkit.launchers import rundir

    found = run.wait()
    where = f"; run directory {run.run_dir}" if run.run_dir else ""
    reason = f" ({found.reason})" if found.reason else ""
    said = f"{run.name}: {found.state.upper()}{reason}{where}"
    click.echo(secrecy.redact(said, rundir.secrets_of(run.run_dir)), err=True)
    sys.exit(0 if found.state is toolkit.RunState.SUCCEEDED else 1)


def stop_writing() -> None:
    """Throw away what is still to be written, so that Python does not complain at its own exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
