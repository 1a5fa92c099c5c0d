"""The commands that take a job file or start a run: render, submit, resubmit, run."""

from __future__ import annotations  # naming a type must not import it

import errno
import shlex
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import click

import toolkit
from toolkit.cli import exit_status, output
from toolkit.cli.main import CHAIN, FOLLOW, JOB, RUN, SET, TO, TRUST, cli, example
from toolkit.errors import InputError, PlanError


@cli.command(epilog=example("toolkit render jobs/digits.yaml --to slurm | less"))
@JOB
@SET
@TO
@CHAIN
@click.option("--plain", is_flag=True, help="For reading: with the supervisor's sources as text.")
@click.option("--explain", is_flag=True, help="For reading: each line after its keys.")
def render(
    job: Path, overrides: tuple[str, ...], to: str, chain: int, plain: bool, explain: bool
) -> None:
    """Print the whole script or manifest, and do nothing else.

    At a terminal, a comment replaces the supervisor inside the text.
    """
    made = _planned(job, overrides, to)
    if explain:
        from toolkit.origins import origins

        lines = [
            (", ".join(keys[:2]) + (f" and {len(keys) - 2} more" if keys[2:] else ""), line)
            for line, keys in origins(made.job, made.profile)
        ]
        width = max(len(keys) for keys, _ in lines)
        output.write("".join(f"{keys:<{width}} | {line}\n" for keys, line in lines))
        return
    from toolkit.rendering import payload

    text = toolkit.render(made.in_turns() if chain > 1 else made)
    if plain:
        text = payload.plain(text)
    elif sys.stdout.isatty():
        text = payload.folded(text)
    output.write(text)


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
    job: Path, overrides: tuple[str, ...], to: str, after: tuple[str, ...], chain: int, follow: bool
) -> None:
    """Start a new run, or all points of a sweep, and print its URI."""
    made = _planned(job, overrides, to)
    output.note(made.notes)
    from toolkit.cli import operation_line

    began = time.time()
    with operation_line.shown():
        run = toolkit.submit(made, after=after, chain=chain)
    if run.record.created < began:
        output.note((f"{run.name} continues after an interrupted submission",))
    output.say(run.uri)
    if follow:
        output.follow_and_exit(run)


@cli.command(epilog=example("toolkit resubmit slurm://sandbox/1234"))
@RUN
@CHAIN
@FOLLOW
@TRUST
def resubmit(run: str, chain: int, follow: bool, trust: bool) -> None:
    """Continue a run that has ended; of a sweep, the points that did not succeed.

    The same script or manifest continues in the same run directory, from the newest checkpoint: on
    Slurm and, except for functions, on Kubernetes with a `runs_claim`. On this machine, the error
    gives the command to continue by hand.
    """
    from toolkit.cli import operation_line

    with operation_line.shown():
        opened = toolkit.resubmit(toolkit.open_run(run, trust=trust), chain=chain)
    output.say(opened.uri)
    if follow:
        output.follow_and_exit(opened)


@cli.command(name="run", epilog=example("toolkit run jobs/digits.yaml --set resources.nnodes=4"))
@JOB
@SET
@click.option("--to", default="local", metavar="PROFILE", help="A profile of this machine.")
def run_here(job: Path, overrides: tuple[str, ...], to: str) -> None:
    """Run on this machine, in the foreground; Ctrl-C stops it as `toolkit cancel` does."""
    run = toolkit.run(_planned(job, overrides, to, here=True))
    with output.signals_cancel(run) as received:
        output.say(f"{run.uri}: run directory {run.run_dir}", err=True)
        try:
            output.echo_log(output.follow_lines(run))
        except OSError as error:  # the reader of the output has gone, so the run is not wanted
            run.cancel()
            if error.errno not in (errno.EPIPE, errno.EIO):
                why = f"the output cannot be written: {error.strerror}; the run is stopped"
                output.say(why, err=True)
            run.wait()
            output.stop_writing()
            sys.exit(exit_status.FAILED)
        status = run.wait()
        output.print_end(run, status)
    name = shlex.quote(str(job))
    if status.state is toolkit.RunState.FAILED:
        output.say(f"next: toolkit logs {run.name}", err=True)
    else:
        output.say(f"next: toolkit report {run.name}; toolkit render {name} --to slurm", err=True)
    if signal.SIGINT in received:
        sys.exit(exit_status.INTERRUPTED)
    sys.exit(exit_status.of_runs([status]))


def _planned(
    path: Path, overrides: Iterable[str], to: str, *, here: bool = False
) -> toolkit.LaunchPlan:
    """Return the plan of a job file; the problems of a plan get their places in the file.

    Raises:
        InputError: every problem of the file or of the plan; with `here`, another place's profile.
    """
    if path.suffix == ".py":
        job_file = f"{{name: mine, script: {path}, resources: {{nproc_per_node: 2}}}}"
        way_out = f"write {job_file} into job.yaml, and name that file"
        raise InputError(f"is a script, not a job file; {way_out}", place=str(path))
    job, profile = toolkit.load(path, overrides), toolkit.load_profile(to)
    output.note_origins([to])
    if here and not isinstance(profile, toolkit.LocalProfile):
        raise InputError(f"profile {to!r} is not of this machine; use `toolkit submit --to {to}`")
    try:
        return toolkit.plan(job, profile)
    except PlanError as error:
        from toolkit.job.spec import read_job

        raise PlanError(map(read_job(path, overrides).located, error.problems)) from None
