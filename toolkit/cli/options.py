"""What the commands share: the group, its arguments and options."""

from __future__ import annotations  # naming a type must not import it

import importlib
from pathlib import Path

import click

import toolkit

__all__ = ["CHAIN", "FOLLOW", "JOB", "JSON", "RUN", "RUNS", "SET", "TO", "TRUST", "cli", "example"]

JOB = click.argument("job", metavar="JOB.yaml", type=click.Path(path_type=Path))
RUN = click.argument("run", metavar="RUN")
RUNS = click.argument("names", metavar="RUN...", nargs=-1, required=True)
SET = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Set a key of the job file, like resources.nnodes=4. May be repeated.",
)


def _or_default(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    if value is None:
        from toolkit.profile import require_default_profile

        return require_default_profile()
    return value


TO = click.option(
    "--to",
    metavar="PROFILE",
    callback=_or_default,
    help="A profile's name or file; the default one, which `toolkit init` makes, where it is left "
    "out.",
)
FOLLOW = click.option("--follow", "-f", is_flag=True, help="Show the log until the run has ended.")
CHAIN = click.option(
    "--chain",
    type=click.IntRange(1, 1000),
    default=1,
    metavar="N",
    help="Let N jobs take turns, each going on where the one before has ended (Slurm).",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


TRUST = click.option(
    "--trust",
    is_flag=True,
    help="Believe a run directory that is not in your list of runs: what it says of its jobs, "
    "hosts and clusters is acted upon.",
)


_MODULES = {
    "init": "init",
    "check": "check",
    **dict.fromkeys(("render", "submit", "resubmit", "run"), "submit"),
    **dict.fromkeys(("list", "status", "cancel", "wait"), "runs"),
    "logs": "logs",
    "schema": "schema",
}
"""The commands in the order of `--help`, and the modules of this package that hold them."""


class _Commands(click.Group):
    """Commands whose modules are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # Of an unknown name click compares all commands, to say which one is probably meant.
        for module in [_MODULES[cmd_name]] if cmd_name in _MODULES else _MODULES.values():
            importlib.import_module(f"toolkit.cli.{module}")
        return super().get_command(ctx, cmd_name)


def example(command: str) -> str:
    """Return an epilog that click leaves as it is."""
    return f"\b\nExample:\n  {command}"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(toolkit.__version__, prog_name="toolkit")
def cli() -> None:
    """Run one PyTorch job file here, on Slurm, or on Kubernetes.

    JOB.yaml says what to run, a PROFILE where: `local`, `slurm`, `k8s`, a file in slurm/profiles or
    k8s/profiles, or one of your own. RUN is a run's URI, name, or run directory.
    """
