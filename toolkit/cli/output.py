"""Prints the progress and the end of runs for the commands."""

from __future__ import annotations  # naming a type must not import it

import contextlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import click

import toolkit
from toolkit.cli import exit_status

_MOST_POINTS = 20
"""How many failed points of a sweep are listed."""

_MOST_LISTED = 1000
"""How many problems of files are listed."""

_T = TypeVar("_T")


def note(notes: Iterable[str]) -> None:
    """Show notes that stop nothing, such as those of a plan."""
    for note in notes:
        say(f"note: {note}", err=True)


def note_origins(profiles: Iterable[str]) -> None:
    """Name the files of profiles that are not the project's own."""
    from toolkit.profile import origin_notes

    for name in profiles:
        note(origin_notes(name))


def say(text: str, *, err: bool = False) -> None:
    """Print a message; all text of commands goes through here or through `write()`.

    Characters that a terminal would obey or hide are escaped, since messages quote names of files,
    reasons of schedulers and keys of job files. Further lines of a message are indented, so that
    none looks like another message.
    """
    from toolkit.text.control import printable

    click.echo(printable(text).replace("\n", "\n  "), err=err)


@contextlib.contextmanager
def shown_meanwhile(text: str) -> Iterator[None]:
    """Show a line on stderr during this block, at a terminal; without rich, which loads slowly."""
    from toolkit.text.control import printable

    draws = sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    width = shutil.get_terminal_size().columns - 1
    if draws:
        click.echo(printable(text)[:width] + "\r", nl=False, err=True)
    try:
        yield
    finally:
        if draws:
            click.echo("\x1b[K", nl=False, err=True)


def first_of(texts: Sequence[_T], what: str) -> Iterator[_T]:
    """Yield the first texts of a list, and note how many more there are."""
    yield from texts[:_MOST_LISTED]
    if len(texts) > _MOST_LISTED:
        note([f"{len(texts) - _MOST_LISTED} more {what} are not shown"])


def echo_lines(lines: Iterable[str]) -> None:
    """Print lines as they come, each as `say()` does."""
    for line in lines:
        say(line)


def echo_log(lines: Iterable[str], *, at_once: int = 1) -> None:
    """Print the lines of a log, so many at once, with colours and progress bars.

    A log that grows is printed line by line, as the lines come.
    """
    from toolkit.text.control import for_terminal

    lines = iter(lines)
    while some := list(itertools.islice(lines, at_once)):
        click.echo("\n".join(map(for_terminal, some)))


def echo_json(value: object) -> None:
    """Print a value as JSON that is indented; only what a terminal would obey or hide is escaped.

    Outside of its strings JSON has no such characters.
    """
    from toolkit.text.control import without_control

    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN and Infinity, which JSON does not know: a loss that has diverged
        text = json.dumps(_finite(value), indent=2, ensure_ascii=False)
    click.echo(without_control(text, lambda c: json.dumps(c)[1:-1]))


def _finite(value: object) -> object:
    """Return a value with null for NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(text: str) -> None:
    """Print the input of another program, such as a script; escape it only for a terminal."""
    if sys.stdout.isatty():
        from toolkit.text.control import printable

        text = printable(text)
    click.echo(text, nl=False)


def _status_printer(run: toolkit.Run) -> Callable[[toolkit.RunStatus], None]:
    """Return a callback that prints a status when it changes.

    It prints why a run waits; for a sweep, the number of points per state.
    """
    shown = ""

    def show(status: toolkit.RunStatus) -> None:
        nonlocal shown
        waits = status.state in (toolkit.RunState.PENDING, toolkit.RunState.UNKNOWN)
        line = f"{status.state.upper()}{in_parentheses(status.reason)}" if waits else ""
        line = status.reason if run.points else line
        if line and line != shown:
            _say(run, f"{run.name}: {line}")
        shown = line

    return show


def follow_lines(run: toolkit.Run, **view: Any) -> Iterator[str]:
    """Yield the lines of a run until it has ended, and print why it waits.

    `view` are arguments of `Run.logs`, which select the lines.
    """
    return run.logs(follow=True, on_status=_status_printer(run), **view)


def echo_failure(run: toolkit.Run, *, attempt: int | None = None) -> None:
    """Print the first failure with its traceback; for a sweep, a line for each failed point."""
    if not run.points:
        try:
            failure = run.failure(attempt=attempt)
        except toolkit.LauncherError as error:
            say(f"what failed first is unknown: {error}", err=True)
            return
        for line in failure.lines() if failure else ():
            say(line, err=True)
        return
    from toolkit.runs.evidence.failure import headline

    failed = ((point.name, point.failure(attempt=attempt)) for point in run.points)
    texts = [f"{name}: {headline(failure)}" for name, failure in failed if failure]
    for line in texts[:_MOST_POINTS]:
        say(line, err=True)
    if len(texts) > _MOST_POINTS:
        say(f"{len(texts) - _MOST_POINTS} more points have failed", err=True)


@contextlib.contextmanager
def signals_cancel(run: toolkit.Run) -> Iterator[list[int]]:
    """Let Ctrl-C, a closed terminal and `kill` stop the run; its output is shown to the end.

    Yields the list of the signals that have come.
    """
    import signal

    received: list[int] = []

    def cancel(number: int, _: object) -> None:
        run.cancel()
        word = "still stopping" if received else "stopping"
        received.append(number)
        with contextlib.suppress(OSError):  # the terminal may be gone
            say(f"{word}: each rank has `stop.grace` to save, then it is killed", err=True)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, cancel) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow_and_exit(run: toolkit.Run) -> None:
    """Show a run until it has ended, and exit with its status; Ctrl-C leaves the run alone."""
    from toolkit.runs.run import pauses

    try:
        if not run.points:
            echo_log(follow_lines(run))
        show = _status_printer(run)
        for pause_s in pauses() if run.points else ():
            show(status := run.status())
            if status.state.final or status.lost:
                break
            time.sleep(pause_s)
    except KeyboardInterrupt:
        say(
            f"\n{run.uri} continues; `toolkit logs -f {run.name}` follows it again, "
            f"`toolkit cancel {run.name}` stops it",
            err=True,
        )
        sys.exit(exit_status.INTERRUPTED)
    print_end_and_exit(run)


def print_end_and_exit(run: toolkit.Run) -> None:
    """Wait for a run, report its end, and exit with 0 if it has succeeded, else with 1."""
    status = run.wait()
    print_end(run, status)
    sys.exit(exit_status.of_runs([status]))


def print_end(run: toolkit.Run, status: toolkit.RunStatus) -> None:
    """Print how a run ended, its first failure, and what has interrupted it."""
    from toolkit.runs.evidence.restarts import in_words
    from toolkit.runs.evidence.stacks import steps_left_out

    if status.state is toolkit.RunState.FAILED:
        echo_failure(run)
    if run.run_dir and (why := steps_left_out(run.run_dir)):
        _say(run, f"{run.name}: log_pattern: {why}")
    where = f"; run directory {run.run_dir}" if run.run_dir else ""
    after = f" after {words}" if (words := in_words(run.restarts())) else ""
    _say(run, f"{run.name}: {status.state.upper()}{in_parentheses(status.reason)}{after}{where}")


def in_parentheses(reason: str) -> str:
    """Return the reason as the words that follow a state; "" without one."""
    return f" ({reason})" if reason else ""


def _say(run: toolkit.Run, text: str) -> None:
    from toolkit.runs.records.run_secrets import mask_of

    say(mask_of(run.run_dir).hide(text), err=True)


def stop_writing() -> None:
    """Discard buffered output, so that Python does not report an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
