"""The command for the shell: completion."""

from __future__ import annotations  # naming a type must not import it

import click

from toolkit.cli.main import COMPLETE, cli, example
from toolkit.cli.output import write


@cli.command(epilog=example("toolkit completion bash >> ~/.bashrc"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script by which a shell completes commands, options, profiles and runs."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "the choices are click's own"
    write(kind(cli, {}, "toolkit", COMPLETE).source() + "\n")
