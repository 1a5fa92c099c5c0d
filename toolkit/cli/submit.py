"""The commands that take a job file, or start something."""

from __future__ import annotations  # naming a type must not import it

import sys
from pathlib import Path

import click

import toolkit
from toolkit.cli.options import CHAIN, FOLLOW, JOB, RUN, SET, TO, TRUST, cli, example
from toolkit.cli.output import (
    echo_lines,
    follow_and_exit,
    follow_lines,
    note,
    report_and_exit,
    signals_cancel,
    stop_writing,
)
from toolkit.errors import InputError

__all__ = ["render", "resubmit", "run_here", "submit"]


@cli.command(epilog=example("toolkit render jobs/digits.yaml --to slurm | less"))
@JOB
@SET
@TO
@CHAIN
def render(job: Path, overrides: tuple[str, ...], to: str, chain: int) -> None:
    """Print the script or manifest, whole, and do nothing."""
    from toolkit.cli.locate import placed

    spec, profile = toolkit.load(job, overrides), toolkit.load_profile(to)
    with placed(job, overrides):
        made = toolkit.plan(spec, profile)
    if chain > 1:
        made = made.in_turns()
    click.echo(toolkit.render(made), nl=False)


@cli.command(epilog=example("toolkit submit jobs/digits.yaml --to slurm --follow"))
@JOB
@SET
@TO
@click.option(
    "--after",
    metavar="RUN[:ok|any|fail]",
    multiple=True,
    help="Wait until that run has succeeded, ended or failed (Slurm). May be repeated.",
)
@CHAIN
@FOLLOW
def submit(
    job: Path,
    overrides: tuple[str, ...],
    to: str,
    after: tuple[str, ...],
    chain: int,
    follow: bool,
) -> None:
    """Start a new run, or all points of a sweep, and print its URI."""
    from toolkit.cli.locate import placed

    spec, profile = toolkit.load(job, overrides), toolkit.load_profile(to)
    with placed(job, overrides):
        made = toolkit.plan(spec, profile)
    note(made.notes)
    run = toolkit.submit(made, after=after, chain=chain)
    click.echo(run.uri)
    if follow:
        follow_and_exit(run)


@cli.command(epilog=example("toolkit resubmit slurm://sandbox/1234"))
@RUN
@CHAIN
@FOLLOW
@TRUST
def resubmit(run: str, chain: int, follow: bool, trust: bool) -> None:
    """Let a run that has ended go on; of a sweep, the points that did not succeed.

    The same script goes on in the same run directory, from the newest checkpoint.
    """
    opened = toolkit.resubmit(toolkit.open_run(run, trust=trust), chain=chain)
    click.echo(opened.uri)
    if follow:
        follow_and_exit(opened)


@cli.command(name="run", epilog=example("toolkit run jobs/digits.yaml --set resources.nnodes=4"))
@JOB
@SET
@click.option("--to", default="local", metavar="PROFILE", help="A profile of this machine.")
def run_here(job: Path, overrides: tuple[str, ...], to: str) -> None:
    """Run on this machine, in the foreground; Ctrl-C stops it with a checkpoint."""
    from toolkit.cli.locate import placed

    spec, profile = toolkit.load(job, overrides), toolkit.load_profile(to)
    if not isinstance(profile, toolkit.LocalProfile):
        raise InputError(f"profile {to!r} is not of this machine; use `toolkit submit --to {to}`")
    with placed(job, overrides):
        made = toolkit.plan(spec, profile)
    run = toolkit.run(made)
    with signals_cancel(run):
        click.echo(f"{run.uri}: run directory {run.run_dir}", err=True)
        try:
            echo_lines(follow_lines(run))
        except OSError:  # the reader of the output has gone, so the run is not wanted
            run.cancel()
            run.wait()
            stop_writing()
            sys.exit(1)
        report_and_exit(run)
