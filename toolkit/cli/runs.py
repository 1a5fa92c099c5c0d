"""The commands for runs that were submitted."""

from __future__ import annotations  # naming a type must not import it

import json
import sys

import click

import toolkit
from toolkit.cli.options import JSON, RUN, RUNS, TRUST, cli, example
from toolkit.cli.output import echo_lines, report, report_and_exit, say
from toolkit.errors import LauncherError

__all__ = ["cancel", "list_runs", "status", "wait"]

_STATES = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "PREEMPTED", "UNKNOWN")


@cli.command(name="list", epilog=example("toolkit list --state RUNNING --json"))
@JSON
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="How many runs.",
)
@click.option("--job", metavar="NAME", help="Only runs of the job with this name.")
@click.option(
    "--state",
    "states",
    type=click.Choice(_STATES, case_sensitive=False),
    multiple=True,
    help="Only runs in this state. May be repeated.",
)
def list_runs(as_json: bool, last: int, job: str | None, states: tuple[str, ...]) -> None:
    """List the runs that were submitted from here, the newest last."""
    from toolkit.cli import summary

    # Which runs are in a state is known only when all of them have been asked.
    runs = toolkit.list_runs(job=job, last=None if states else last)
    wanted = [toolkit.RunState(state.lower()) for state in states]
    rows = summary.listed(runs, states=wanted, brief=not as_json)[-last:]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif not rows and (job or states):
        click.echo("no such runs; `toolkit list` shows the newest of all")
    elif not rows:
        click.echo("no runs yet; `toolkit submit JOB.yaml --to PROFILE` starts one")
    else:
        width = max(len(row["uri"]) for row in rows)
        before = ""
        for row in rows:
            reason = row["reason"].partition("\n")[0]
            # A place that does not answer has one reason for all of its runs.
            repeated = reason and reason == before and row["state"] == "UNKNOWN"
            shown = "as above" if repeated else reason
            line = f"{row['uri']:<{width}}  {row['state']:<9}  {row['name']}  {shown}"
            before = reason
            say(line.rstrip())


@cli.command(epilog=example("toolkit status slurm://sandbox/1234 --json"))
@RUN
@TRUST
@JSON
def status(run: str, trust: bool, as_json: bool) -> None:
    """Say where a run stands, and why."""
    from toolkit.cli import summary

    content = summary.whole(toolkit.open_run(run, trust=trust))
    if as_json:
        click.echo(json.dumps(content, indent=2))
    else:
        echo_lines(summary.lines(content))


@cli.command(epilog=example("toolkit cancel slurm://sandbox/1234"))
@RUNS
@TRUST
@JSON
def cancel(names: tuple[str, ...], trust: bool, as_json: bool) -> None:
    """Stop runs, with a checkpoint."""
    runs = [
        toolkit.open_run(name, trust=trust) for name in names
    ]  # all are known, or none is touched
    rows = []
    for run, status in zip(runs, toolkit.statuses(runs), strict=True):
        error = None
        if not status.state.final:
            try:
                run.cancel()
            except LauncherError as refused:  # one that refuses must not keep the others running
                error = str(refused)
        message = (
            f"{run.uri} has ended already"
            if status.state.final
            else error or f"{run.uri} is asked to stop; `toolkit wait {run.name}` waits for it"
        )
        say(message, err=True)
        asked = not status.state.final and error is None
        rows.append({"uri": run.uri, "name": run.name, "asked": asked, "error": error})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    sys.exit(1 if any(row["error"] for row in rows) else 0)


@cli.command(epilog=example("toolkit wait digits-1120-174558-k3f9 && echo trained"))
@RUNS
@click.option("--timeout", type=float, metavar="SECONDS", help="Give up after this long.")
@TRUST
@JSON
def wait(names: tuple[str, ...], trust: bool, timeout: float | None, as_json: bool) -> None:
    """Wait until runs have ended; exit status 0 if all of them succeeded."""
    runs = [toolkit.open_run(name, trust=trust) for name in names]
    for run, status in zip(runs, toolkit.statuses(runs), strict=True):
        if status.state is toolkit.RunState.UNKNOWN and not status.lost:
            say(f"{run.name}: UNKNOWN ({status.reason}); waiting for an answer", err=True)
    try:
        if len(runs) == 1 and not as_json:
            runs[0].wait(timeout)
            report_and_exit(runs[0])
        ended = toolkit.wait(runs, timeout, on_end=report)
    except TimeoutError as error:
        raise LauncherError(str(error)) from None
    if as_json:
        from toolkit.cli import summary

        click.echo(json.dumps(summary.listed(runs), indent=2))
    sys.exit(0 if all(status.state is toolkit.RunState.SUCCEEDED for status in ended) else 1)
