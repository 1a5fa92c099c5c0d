"""The command that finds faults."""

from __future__ import annotations  # naming a type must not import it

from pathlib import Path

import click

import toolkit
from toolkit.cli.following import note
from toolkit.cli.words import JOB, SET, cli, example
from toolkit.errors import InputError, LauncherError

__all__ = ["check"]


@cli.command(epilog=example("toolkit check jobs/digits.yaml --to slurm"))
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
            note(made.notes)
    if problems:
        raise InputError(problems)
    if found := [str(p) for name in to if server for p in toolkit.ask_site(spec, to=name)]:
        raise LauncherError("\n".join(found))
    need = spec.resources
    nodes = f"{need.min_nodes} to {need.max_nodes}" if need.elastic else need.max_nodes
    where = f" for {', '.join(to)}" if to else ""
    points = f", at {len(spec.points)} points" if spec.points else ""
    click.echo(f"{job}: fine{where}: {nodes} x {need.nproc_per_node} processes{points}")
