"""The command that shows what a run has printed."""

from __future__ import annotations  # naming a type must not import it

from collections.abc import Iterator

import click

import toolkit
from toolkit.cli.options import FOLLOW, RUN, TRUST, cli, example
from toolkit.cli.output import echo_failure, echo_lines, follow_lines

__all__ = ["logs"]


@cli.command(epilog=example("toolkit logs digits-1120-174558-k3f9 --follow --rank 0"))
@RUN
@FOLLOW
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Only what this rank has printed. May be repeated.",
)
@click.option(
    "--attempt",
    type=click.IntRange(min=0),
    metavar="N",
    help="Only one attempt: 0 is the first start, 1 the one after a requeue.",
)
@click.option("--grep", metavar="REGEX", help="Only lines that hold this (Python's re).")
@TRUST
def logs(
    run: str,
    follow: bool,
    ranks: tuple[int, ...],
    attempt: int | None,
    grep: str | None,
    trust: bool,
) -> None:
    """Print what a run has printed, of all nodes and ranks, and last what failed first.

    Of a sweep, all points are shown, each line after its point's name; RUN_7 or RUN/NAME is one.
    """
    opened = toolkit.open_run(run, trust=trust)
    if follow:
        lines = follow_lines(opened, ranks=ranks, attempt=attempt, grep=grep)
    else:
        lines = opened.logs(ranks=ranks, attempt=attempt, grep=grep)
    counted = _Count(lines)
    echo_lines(counted)
    if not counted.lines and (ranks or grep is not None):
        click.echo(f"no such line in what {opened.name} has printed", err=True)
    echo_failure(opened, attempt=attempt)


class _Count(Iterator[str]):
    """Counts the lines that pass."""

    def __init__(self, source: Iterator[str]) -> None:
        self._source = source
        self.lines = 0

    def __next__(self) -> str:
        line = next(self._source)
        self.lines += 1
        return line
