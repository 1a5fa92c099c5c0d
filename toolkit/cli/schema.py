"""The commands that describe what the toolkit takes."""

from __future__ import annotations  # naming a type must not import it

import json

import click

import toolkit
from toolkit.cli.options import cli, example

__all__ = ["schema"]


@cli.command(epilog=example("toolkit schema > docs/reference/job.schema.json"))
def schema() -> None:
    """Print the JSON Schema of the job file, for editors."""
    click.echo(json.dumps(toolkit.json_schema(), indent=2, ensure_ascii=False))
