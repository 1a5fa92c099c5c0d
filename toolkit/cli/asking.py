"""The commands for runs that were submitted."""

from __future__ import annotations  # naming a type must not import it

import json

import click

import toolkit
from toolkit.cli.following import echo_lines, report_and_exit
from toolkit.cli.words import FOLLOW, JSON, RUN, cli, example
from toolkit.errors import LauncherError

__all__ = ["cancel", "list_runs", "logs", "status", "wait"]


@cli.command(name="list", epilog=example("toolkit list --json"))
@JSON
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="How many runs.",
)
def list_runs(as_json: bool, last: int) -> None:
    """List the runs that were submitted from here, the newest last."""
    from toolkit import summaries

    rows = [summaries.short(run) for run in list(toolkit.list_runs())[-last:]]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif not rows:
        click.echo("no runs yet; `toolkit submit JOB.yaml --to PROFILE` starts one")
    else:
        width = max(len(row["uri"]) for row in rows)
        for row in rows:
            click.echo(
                f"{row['uri']:<{width}}  {row['state']:<9}  {row['name']}  "
                f"{row['reason'].partition(chr(10))[0]}".rstrip()
            )


@cli.command(epilog=example("toolkit status slurm://sandbox/1234 --json"))
@RUN
@JSON
def status(run: str, as_json: bool) -> None:
    """Say where a run stands, and why."""
    from toolkit import summaries

    found = summaries.whole(toolkit.open_run(run))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        echo_lines(summaries.lines(found))


@cli.command(epilog=example("toolkit logs digits-1120-174558-k3f9 --follow"))
@RUN
@FOLLOW
def logs(run: str, follow: bool) -> None:
    """Print what a run has printed; of a sweep, name a point: RUN_7, or RUN/NAME."""
    echo_lines(toolkit.open_run(run).logs(follow=follow))


@cli.command(epilog=example("toolkit cancel slurm://sandbox/1234"))
@RUN
def cancel(run: str) -> None:
    """Ask a run to stop, with a checkpoint."""
    opened = toolkit.open_run(run)
    if opened.status().state.final:
        click.echo(f"{opened.uri} has ended already", err=True)
        return
    opened.cancel()
    click.echo(
        f"{opened.uri} is asked to stop; `toolkit wait {opened.name}` waits for it", err=True
    )


@cli.command(epilog=example("toolkit wait digits-1120-174558-k3f9 && echo trained"))
@RUN
@click.option("--timeout", type=float, metavar="SECONDS", help="Give up after this long.")
def wait(run: str, timeout: float | None) -> None:
    """Wait until a run has ended; exit status 0 if it succeeded."""
    opened = toolkit.open_run(run)
    found = opened.status()
    if found.state is toolkit.RunState.UNKNOWN and not found.lost:
        click.echo(f"{opened.name}: UNKNOWN ({found.reason}); waiting for an answer", err=True)
    try:
        opened.wait(timeout)
    except TimeoutError as error:
        raise LauncherError(str(error)) from None
    report_and_exit(opened)
