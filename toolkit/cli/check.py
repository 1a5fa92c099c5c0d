"""The command that finds faults."""

from __future__ import annotations  # naming a type must not import it

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click

import toolkit
from toolkit.cli.options import JSON, SET, cli, example
from toolkit.cli.output import note
from toolkit.errors import InputError
from toolkit.text import secret_scan
from toolkit.text.masking import Mask

__all__ = ["check"]


@cli.command(epilog=example("toolkit check train.sbatch"))
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@SET
@click.option("--to", multiple=True, metavar="PROFILE", help="Check that it works there, too.")
@click.option("--server", is_flag=True, help="Ask the site or cluster, too; submits nothing.")
@click.option(
    "--schemas",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Hold manifests to the CustomResourceDefinitions in a folder (kubectl get crd -o yaml).",
)
@JSON
def check(
    file: Path,
    overrides: tuple[str, ...],
    to: tuple[str, ...],
    server: bool,
    schemas: Path | None,
    as_json: bool,
) -> None:
    """Say everything that is wrong with a job file, or with a batch script or manifest of your own.

    Exit status 0 if nothing is, 1 if a rule or the site finds something, 2 if the file cannot be
    read or is no job.
    """
    from toolkit import checks

    script = checks.is_script(file)
    if script and (to or overrides):
        raise click.UsageError("a batch script names its site itself; --to and --set are for jobs")
    manifests = not script and checks.is_manifests(file)
    if manifests and overrides:
        raise click.UsageError("--set is for jobs; a manifest is what it is")
    if not script and not to and (default := toolkit.default_profile()) is not None:
        to = (default,) if not manifests or _is_of_kubernetes(default) else ()
    if server and not script and not manifests and not to:
        raise click.UsageError("--server asks the site of a profile; name one with --to")
    try:
        findings = toolkit.check(file, overrides, to=to, server=server, schemas=schemas)
    except InputError as error:
        findings = [checks.finding(problem) for problem in error.problems]
    unusable = any(finding.rule is None for finding in findings)
    if as_json:
        text = json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False)
        click.echo(_without_secrets(text))
    else:
        for finding in findings:
            click.echo(_without_secrets(str(finding)), err=finding.rule is None)
    if findings:
        sys.exit(2 if unusable else 1)
    if not as_json:
        _say_fine(file, overrides, to, plain=script or manifests)


def _without_secrets(text: str) -> str:
    return secret_scan.conceal(Mask(secret_scan.values_of(os.environ)).hide(text))


def _is_of_kubernetes(name: str) -> bool:
    try:
        return toolkit.load_profile(name).kind == "kubernetes"
    except InputError:
        return False  # the command that needs it reports what is wrong with it


def _say_fine(file: Path, overrides: tuple[str, ...], to: tuple[str, ...], *, plain: bool) -> None:
    if plain:
        click.echo(f"{file}: fine")
        return
    spec = toolkit.load(file, overrides)
    for name in to:
        note(toolkit.plan(spec, toolkit.load_profile(name)).notes)
    need = spec.resources
    nodes = f"{need.min_nodes} to {need.max_nodes}" if need.elastic else need.max_nodes
    where = f" for {', '.join(to)}" if to else ""
    points = f", at {len(spec.points)} points" if spec.points else ""
    click.echo(f"{file}: fine{where}: {nodes} x {need.nproc_per_node} processes{points}")
