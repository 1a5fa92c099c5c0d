"""The commands for runs that were submitted: list, status, cancel, wait, logs, goodput and more."""

from __future__ import annotations  # naming a type must not import it

import contextlib
import itertools
import sys
from datetime import datetime
from pathlib import Path

import click

import toolkit
from toolkit.cli import exit_status, output
from toolkit.cli.main import (
    FOLLOW,
    JSON,
    RUN,
    RUN_OR_NEWEST,
    RUNS,
    RUNS_OR_NEWEST,
    TRUST,
    cli,
    example,
)
from toolkit.errors import LauncherError, RunLost

_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "prometheus")
_MOST_FIGURES = 100
"""A longer list leaves the newest figures out, which cost a read of each run."""
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
    from toolkit.cli.summary import age_of, restarts_text, rows_of
    from toolkit.runs.records.run_directory import last_figures

    # A run's state is known only after a query, so with --state all runs are queried.
    runs = toolkit.list_runs(job=job, last=None if states else last)
    selected = [toolkit.RunState(state.lower()) for state in states]
    rows = rows_of(runs, states=selected, brief=not as_json)[-last:]
    if as_json:
        output.echo_json(rows)
    elif not rows and (job or states):
        output.say("no such runs; `toolkit list` shows the newest of all")
    elif not rows:
        output.say("no runs yet; `toolkit submit JOB.yaml --to PROFILE` starts one")
    else:
        width = max(len(row["uri"]) for row in rows)
        before = ""
        for row in rows:
            reason = row["reason"].partition("\n")[0]
            # A place that does not answer gives all of its runs the same reason.
            repeated = reason and reason == before and row["state"] == "UNKNOWN"
            shown = "as above" if repeated else reason
            folder = Path(row["run_dir"]) if row["run_dir"] and len(rows) <= _MOST_FIGURES else None
            figures = last_figures(folder)
            note = "; ".join(filter(None, [restarts_text(row), figures, shown]))
            age = age_of(datetime.fromisoformat(row["created"]))
            line = f"{row['uri']:<{width}}  {row['state']:<9}  {age:>6}  {row['name']}  {note}"
            before = reason
            output.say(line.rstrip())


@cli.command(epilog=example("toolkit status slurm://sandbox/1234 --json"))
@RUNS_OR_NEWEST
@TRUST
@JSON
@click.option(
    "--watch",
    "-w",
    is_flag=True,
    help="Keep the display up to date until the run has ended; a line per run for several runs.",
)
def status(names: tuple[str, ...], trust: bool, as_json: bool, watch: bool) -> None:
    """Show the state of runs, the reason for it, and their progress."""
    from toolkit.cli.summary import summary_lines, summary_of

    runs = [toolkit.open_run(name, trust=trust) for name in names]
    if watch and as_json:
        raise click.UsageError("--watch shows lines; leave out --json")
    if watch:
        from toolkit.cli import screen

        sys.exit(screen.watch(runs[0]) if len(runs) == 1 else screen.watch_several(runs))
    # One request for all; a cluster that does not answer is an error only if one run is asked for.
    statuses = toolkit.statuses(runs) if len(runs) > 1 else [None]
    summaries = [summary_of(run, status) for run, status in zip(runs, statuses, strict=True)]
    if as_json:
        output.echo_json(summaries if len(runs) > 1 else summaries[0])
        return
    for number, summary in enumerate(summaries):
        output.echo_lines(itertools.chain([""] if number else [], summary_lines(summary)))


@cli.command(epilog=example("toolkit top"))
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    metavar="N",
    help="How many of the newest runs to look at.",
)
@click.option("--job", metavar="NAME", help="Only runs of the job with this name.")
def top(last: int, job: str | None) -> None:
    """Show the active runs, a line each, and keep the display up to date until Ctrl-C.

    A run that ends meanwhile stays. All runs of a Slurm cluster take one query. Without a terminal,
    the lines are shown once.
    """
    from toolkit.cli import screen

    screen.watch_all(last, job)


@cli.command(epilog=example("toolkit cancel slurm://sandbox/1234"))
@RUNS
@TRUST
@JSON
def cancel(names: tuple[str, ...], trust: bool, as_json: bool) -> None:
    """Stop runs, with time for a checkpoint."""
    # If one of them is unknown, none is cancelled.
    runs = [toolkit.open_run(name, trust=trust) for name in names]
    rows = []
    for run, status in zip(runs, toolkit.statuses(runs), strict=True):
        error = None
        message = f"{run.uri} has ended already"
        if status.lost:
            message = error = f"{run.uri}: {status.reason}"
        elif not status.state.final:
            message = f"{run.uri} is asked to stop; `toolkit wait {run.name}` waits for it"
            try:
                run.cancel()
            except LauncherError as refusal:  # the others are cancelled all the same
                message = error = str(refusal)
        output.say(message, err=True)
        asked = not status.state.final and error is None
        rows.append({"uri": run.uri, "name": run.name, "asked": asked, "error": error})
    if as_json:
        output.echo_json(rows)
    sys.exit(exit_status.FAILED if any(row["error"] for row in rows) else exit_status.DONE)


@cli.command(epilog=example("toolkit wait digits-1120-174558-k3f9 && echo trained"))
@RUNS
@click.option("--timeout", type=float, metavar="SECONDS", help="Give up after this long.")
@TRUST
@JSON
def wait(names: tuple[str, ...], trust: bool, timeout: float | None, as_json: bool) -> None:
    """Wait until runs have ended; exit status 0 if all of them succeeded."""
    from toolkit.cli import operation_line

    runs = [toolkit.open_run(name, trust=trust) for name in names]
    for run, status in zip(runs, toolkit.statuses(runs), strict=True):
        if status.state is toolkit.RunState.UNKNOWN and not status.lost:
            output.say(
                f"{run.name}: UNKNOWN{output.in_parentheses(status.reason)}; waiting for an answer",
                err=True,
            )
    try:
        if len(runs) == 1 and not as_json:
            runs[0].wait(timeout)
            output.print_end_and_exit(runs[0])
        with operation_line.shown() as line:

            def print_end(run: toolkit.Run, status: toolkit.RunStatus) -> None:
                line.clear()
                output.print_end(run, status)

            ended = toolkit.wait(runs, timeout, on_end=print_end)
    except TimeoutError as error:
        raise LauncherError(str(error)) from None
    if as_json:
        from toolkit.cli.summary import rows_of

        output.echo_json(rows_of(runs))
    sys.exit(exit_status.of_runs(ended))


@cli.command(epilog=example("toolkit logs digits-1120-174558-k3f9 --follow --rank 0"))
@RUN_OR_NEWEST
@FOLLOW
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Only the output of this rank. May be repeated.",
)
@click.option(
    "--attempt",
    type=click.IntRange(min=0),
    metavar="N",
    help="Only one attempt: 0 is the first start, 1 the next one.",
)
@click.option("--grep", metavar="REGEX", help="Only lines that match (Python's re).")
@TRUST
def logs(
    run: str,
    follow: bool,
    ranks: tuple[int, ...],
    attempt: int | None,
    grep: str | None,
    trust: bool,
) -> None:
    """Print the output of a run, from all nodes and ranks, and then its first failure.

    Of a sweep, all points are shown, each line after its point's name; RUN_7 or RUN/NAME is one.
    """
    opened = toolkit.open_run(run, trust=trust)
    lines = (output.follow_lines if follow else type(opened).logs)(
        opened, ranks=ranks, attempt=attempt, grep=grep
    )
    first = next(lines, None)
    if first is not None:
        output.echo_log(itertools.chain([first], lines), at_once=1 if follow else 1000)
    elif (status := opened.status()).lost:
        raise RunLost(f"{opened.uri}: {status.reason}")
    elif ranks or grep is not None:
        output.say(f"no such line in the output of {opened.name}", err=True)
    if lost := opened.lost_output():
        output.say(lost, err=True)
    output.echo_failure(opened, attempt=attempt)


@cli.command(epilog=example("toolkit stacks digits-1120-174558-k3f9"))
@RUN
@TRUST
@JSON
def stacks(run: str, trust: bool, as_json: bool) -> None:
    """Show the stacks and last collectives of a running run's ranks.

    Ranks at the same place are shown together, the smallest group first: the rank that blocks the
    others is mostly at a different place.
    """
    found = toolkit.open_run(run, trust=trust).stacks()
    if as_json:
        output.echo_json(found.as_json())
    else:
        output.echo_lines(found.lines())


@cli.command(epilog=example("toolkit goodput digits-1120-174558-k3f9"))
@RUNS_OR_NEWEST
@TRUST
@JSON
def goodput(names: tuple[str, ...], trust: bool, as_json: bool) -> None:
    """Show how runs spent their time: productive steps, and everything else.

    Goodput is the share of a run's time, from the submission on, spent on steps that were not lost.
    """
    from toolkit.cli import operation_line
    from toolkit.cli.summary import goodput_lines

    runs = [part for name in names for part in toolkit.open_run(name, trust=trust).parts]
    with operation_line.shown():
        found = [(run, run.goodput()) for run in runs]
    if as_json:
        rows = [{"uri": run.uri, "name": run.name, **one.as_json()} for run, one in found]
        output.echo_json(rows)
        return
    for run, one in found:
        output.echo_lines(goodput_lines(run.name, one))


@cli.command(epilog=example("toolkit report digits-1120-174558-k3f9 --output digits.html"))
@RUNS_OR_NEWEST
@TRUST
@click.option(
    "--output",
    "-o",
    "target",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write; by default the run's name with .html, for several runs report.html. "
    "- prints it.",
)
def report(names: tuple[str, ...], trust: bool, target: Path | None) -> None:
    """Write a page about runs: curves, timeline, goodput, failures, provenance.

    It is one file of HTML that needs no network. Several runs, and the points of a sweep, are
    compared.
    """
    from toolkit.cli import operation_line

    with operation_line.shown():
        made = toolkit.report([toolkit.open_run(name, trust=trust) for name in names])
    if target == Path("-"):
        output.write(made.html)
        return
    name = f"{made.title.replace('/', '-')}.html" if len(names) == 1 else "report.html"
    path = made.save(target or name)
    output.say(f"written: {path} ({path.stat().st_size / 1000:.0f} kB)")


@cli.command(epilog=example("toolkit forward digits-1120-174558-k3f9 --to tensorboard"))
@RUNS
@TRUST
@click.option(
    "--to",
    "tracker",
    type=click.Choice(_TRACKERS),
    required=True,
    help="The tracker; prometheus: a file for the node exporter's textfile collector.",
)
@click.option(
    "--output",
    "-o",
    "target",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="What is written: tensorboard's folder (./tensorboard), wandb's (.), or prometheus' file "
    "(toolkit.prom). mlflow and trackio use their own settings.",
)
@click.option("--once", is_flag=True, help="Forward what exists so far; do not wait for the end.")
def forward(
    names: tuple[str, ...], trust: bool, tracker: str, target: Path | None, once: bool
) -> None:
    """Pass the metrics of runs on to a tracker until they have ended.

    The curves are those of the whole run, over all attempts; nothing changes for the training.
    """
    from toolkit.cli import operation_line
    from toolkit.runs.views.forward import forward

    runs = [toolkit.open_run(name, trust=trust) for name in names]
    # Show the progress of a single upload only: following a run may take hours.
    with operation_line.shown() if once else contextlib.nullcontext():
        passed = forward(runs, tracker, target, follow=not once)
    for name, (records, place) in passed.items():
        output.say(f"{name}: {records} records in {place}")


@cli.command(epilog=example("toolkit show digits-1120-174558-k3f9 --diff"))
@RUN
@TRUST
@JSON
@click.option(
    "--diff",
    is_flag=True,
    help="Print only the changes that were not committed.",
)
def show(run: str, trust: bool, as_json: bool, diff: bool) -> None:
    """Show what a run was made from: commit, versions, packages, nodes."""
    from toolkit.cli import operation_line
    from toolkit.cli.summary import no_diff
    from toolkit.runs.records.provenance import origin_lines, origin_of

    with operation_line.shown():
        origin = origin_of(toolkit.open_run(run, trust=trust))
    changes = str((origin["git"] or {}).get("diff") or "")
    if diff and not changes:
        raise LauncherError(f"{origin['name']} has no diff: {no_diff(origin)}")
    if diff:
        # Not splitlines(), which also breaks lines at characters that are part of a file's line.
        output.echo_lines(iter(changes.removesuffix("\n").split("\n")))
    elif as_json:
        output.echo_json(origin)
    else:
        output.echo_lines(origin_lines(origin))
