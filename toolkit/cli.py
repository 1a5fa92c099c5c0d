"""The command line: each command is one call of the public API that a notebook can make too."""

from __future__ import annotations  # naming a type must not import it

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

import toolkit
from toolkit import secrecy
from toolkit.errors import InputError, LauncherError, ToolkitError

__all__ = ["main"]

JOB = click.argument("job", metavar="JOB.yaml", type=click.Path(path_type=Path))
RUN = click.argument("run", metavar="RUN")
SET = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Set a key of the job file, like resources.nnodes=4. May be repeated.",
)
TO = click.option("--to", required=True, metavar="PROFILE", help="A profile's name or file.")
FOLLOW = click.option("--follow", "-f", is_flag=True, help="Show the log until the run has ended.")
CHAIN = click.option(
    "--chain",
    type=click.IntRange(1, 1000),
    default=1,
    metavar="N",
    help="Let N jobs take turns, each going on where the one before has ended (Slurm).",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _Commands(click.Group):
    """Commands in the order they were written."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _example(command: str) -> str:
    """Return an epilog that click leaves as it is."""
    return f"\b\nExample:\n  {command}"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(toolkit.__version__, prog_name="toolkit")
def cli() -> None:
    """Run one PyTorch job file here, on Slurm, or on Kubernetes.

    JOB.yaml says what to run, a PROFILE where: `local`, `slurm`, `k8s`, a file in slurm/profiles or
    k8s/profiles, or one of your own. RUN is a run's URI, name, or run directory.
    """


@cli.command(epilog=_example("toolkit check jobs/digits.yaml --to slurm"))
@JOB
@SET
@click.option("--to", multiple=True, metavar="PROFILE", help="Check that it works there, too.")
@click.option("--server", is_flag=True, help="Ask the Slurm site, too; submits nothing.")
def check(job: Path, overrides: tuple[str, ...], to: tuple[str, ...], server: bool) -> None:
    """Say everything that is wrong with a job file.

    Exit status 2 if the files are wrong, 1 if the site contradicts them.
    """
    spec = toolkit.load(job, overrides)
    if server and not to:
        raise click.UsageError("--server asks the site of a profile; name one with --to")
    problems: list[toolkit.Problem] = []
    for name in to:
        try:
            made = toolkit.plan(spec, toolkit.load_profile(name))
            toolkit.render(made)
        except InputError as error:
            problems += error.problems
        else:
            _note(made.notes)
    if problems:
        raise InputError(problems)
    if found := [str(p) for name in to if server for p in toolkit.ask_site(spec, to=name)]:
        raise LauncherError("\n".join(found))
    need = spec.resources
    nodes = f"{need.min_nodes} to {need.max_nodes}" if need.elastic else need.max_nodes
    where = f" for {', '.join(to)}" if to else ""
    points = f", at {len(spec.points)} points" if spec.points else ""
    click.echo(f"{job}: fine{where}: {nodes} x {need.nproc_per_node} processes{points}")


@cli.command(epilog=_example("toolkit render jobs/digits.yaml --to slurm | less"))
@JOB
@SET
@TO
def render(job: Path, overrides: tuple[str, ...], to: str) -> None:
    """Print the script or manifest, whole, and do nothing."""
    made = toolkit.plan(toolkit.load(job, overrides), toolkit.load_profile(to))
    click.echo(toolkit.render(made), nl=False)


@cli.command(epilog=_example("toolkit submit jobs/digits.yaml --to slurm --follow"))
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
    spec, profile = toolkit.load(job, overrides), toolkit.load_profile(to)
    _note(toolkit.plan(spec, profile).notes)
    run = toolkit.submit(spec, to=profile, after=after, chain=chain)
    click.echo(run.uri)
    if follow:
        _follow_and_exit(run)


@cli.command(epilog=_example("toolkit resubmit slurm://sandbox/1234"))
@RUN
@CHAIN
@FOLLOW
def resubmit(run: str, chain: int, follow: bool) -> None:
    """Let a run that has ended go on; of a sweep, the points that did not succeed.

    The same script goes on in the same run directory, from the newest checkpoint.
    """
    opened = toolkit.resubmit(run, chain=chain)
    click.echo(opened.uri)
    if follow:
        _follow_and_exit(opened)


@cli.command(name="run", epilog=_example("toolkit run jobs/digits.yaml --set resources.nnodes=4"))
@JOB
@SET
@click.option("--to", default="local", metavar="PROFILE", help="A profile of this machine.")
def run_here(job: Path, overrides: tuple[str, ...], to: str) -> None:
    """Run on this machine, in the foreground; Ctrl-C stops it with a checkpoint."""
    from toolkit.launchers.local import LocalLauncher

    spec, profile = toolkit.load(job, overrides), toolkit.load_profile(to)
    if not isinstance(profile, toolkit.LocalProfile):
        raise InputError(f"profile {to!r} is not of this machine; use `toolkit submit --to {to}`")
    made = toolkit.plan(spec, profile)
    run = LocalLauncher(profile, tied=True).submit(made)
    with _signals_cancel(run):
        click.echo(f"{run.uri}: run directory {run.run_dir}", err=True)
        try:
            _echo_lines(run.logs(follow=True))
        except OSError:  # nobody reads us any more, so nobody wants the run
            run.cancel()
            run.wait()
            _stop_writing()
            sys.exit(1)
        _report_and_exit(run)


@cli.command(name="list", epilog=_example("toolkit list --json"))
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


@cli.command(epilog=_example("toolkit status slurm://sandbox/1234 --json"))
@RUN
@JSON
def status(run: str, as_json: bool) -> None:
    """Say where a run stands, and why."""
    from toolkit import summaries

    found = summaries.whole(toolkit.open_run(run))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _echo_lines(summaries.lines(found))


@cli.command(epilog=_example("toolkit logs digits-1120-174558-k3f9 --follow"))
@RUN
@FOLLOW
def logs(run: str, follow: bool) -> None:
    """Print what a run has printed; of a sweep, name a point: RUN_7, or RUN/NAME."""
    _echo_lines(toolkit.open_run(run).logs(follow=follow))


@cli.command(epilog=_example("toolkit cancel slurm://sandbox/1234"))
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


@cli.command(epilog=_example("toolkit wait digits-1120-174558-k3f9 && echo trained"))
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
    _report_and_exit(opened)


@cli.command(epilog=_example("toolkit schema > docs/reference/job.schema.json"))
def schema() -> None:
    """Print the JSON Schema of the job file, for editors."""
    click.echo(json.dumps(toolkit.json_schema(), indent=2, ensure_ascii=False))


def _note(notes: tuple[str, ...]) -> None:
    for note in notes:
        click.echo(f"note: {note}", err=True)


def _echo_lines(lines: Iterator[str]) -> None:
    for line in lines:
        click.echo(line)


def _echo_pending(run: toolkit.Run) -> None:
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


def _echo_states(run: toolkit.Run) -> None:
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
def _signals_cancel(run: toolkit.Run) -> Iterator[None]:
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


def _follow_and_exit(run: toolkit.Run) -> None:
    try:
        if run.points:
            _echo_states(run)
        else:
            _echo_pending(run)
            _echo_lines(run.logs(follow=True))
    except KeyboardInterrupt:
        click.echo(
            f"\n{run.uri} goes on; `toolkit logs -f {run.name}` follows it again, "
            f"`toolkit cancel {run.name}` stops it",
            err=True,
        )
        sys.exit(130)
    _report_and_exit(run)


def _report_and_exit(run: toolkit.Run) -> None:
    from toolkit.launchers import rundir

    found = run.wait()
    where = f"; run directory {run.run_dir}" if run.run_dir else ""
    reason = f" ({found.reason})" if found.reason else ""
    said = f"{run.name}: {found.state.upper()}{reason}{where}"
    click.echo(secrecy.redact(said, rundir.secrets_of(run.run_dir)), err=True)
    sys.exit(0 if found.state is toolkit.RunState.SUCCEEDED else 1)


def main() -> None:
    """Run the command line; what the user can mend is one message and an exit status."""
    try:
        # Not cli.main(), which would make a closed pipe a failure before we can look at it.
        with cli.make_context("toolkit", sys.argv[1:]) as context:
            cli.invoke(context)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except ToolkitError as error:
        said = secrecy.redact(str(error), secrecy.values_of(os.environ))
        click.echo(secrecy.conceal(said), err=True)
        sys.exit(error.exit_status)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        _stop_writing()  # whoever read us has seen enough (`| head`) or closed the terminal
        sys.exit(0)


def _stop_writing() -> None:
    """Throw away what is still to be written, so that Python does not complain at its own exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
