"""The command that detects the site and writes its profile: init."""

from __future__ import annotations  # naming a type must not import it

from pathlib import Path

import click

from toolkit.cli.main import cli, example

__all__ = ["init"]


@cli.command(epilog=example("toolkit init && toolkit submit jobs/digits.yaml --follow"))
@click.option(
    "--kind",
    type=click.Choice(["slurm", "kubernetes", "local"]),
    help="Which scheduler; by default Slurm if it is here, then Kubernetes.",
)
@click.option("--name", metavar="NAME", help="The profile's name; by default that of the cluster.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write; by default one among your own profiles.",
)
@click.option("--print", "only_print", is_flag=True, help="Show the profile and write nothing.")
@click.option("--force", is_flag=True, help="Overwrite a profile, and make it the default one.")
def init(
    kind: str | None, name: str | None, output: Path | None, only_print: bool, force: bool
) -> None:
    """Detect the site, and write a profile of it; it becomes the default one."""
    from toolkit.profile import draft
    from toolkit.profile.detect import discover

    site = discover()
    made = draft.draft(site, kind=kind, name=name)
    if only_print:
        click.echo(made.text, nl=False)
        return
    for line in draft.found_lines(site):
        click.echo(line)
    path, is_default = draft.keep_draft(made, output=output, force=force)
    click.echo()
    role = "the default profile from now on" if is_default else "another one stays the default"
    click.echo(f"written: {path}, {role}")
    to = "" if is_default else f" --to {path if output else made.name}"
    click.echo(f"next: read it, then `toolkit submit JOB.yaml{to} --follow`")
