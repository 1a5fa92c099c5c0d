"""The commands for the shell: completion, man."""

from __future__ import annotations  # naming a type must not import it

import re
from collections.abc import Iterator

import click

import toolkit
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


@cli.command(epilog=example("toolkit man > ~/.local/share/man/man1/toolkit.1"))
def man() -> None:
    """Print the manual page: all commands with their options."""
    write("\n".join(_page()) + "\n")


def _page() -> Iterator[str]:
    """Yield the lines of the manual page, in roff's macros (man(7))."""
    root = click.Context(cli, info_name="toolkit")
    yield f'.TH TOOLKIT 1 "" "torch-deploy-toolkit {toolkit.__version__}"'
    yield ".SH NAME"
    yield f"toolkit \\- {_roff(cli.get_short_help_str(200))}"
    yield ".SH SYNOPSIS"
    yield ".B toolkit\nCOMMAND [OPTIONS] [ARGUMENTS]"
    yield ".SH DESCRIPTION"
    yield from _paragraphs(cli.help or "")
    yield ".SH COMMANDS"
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        context = click.Context(command, parent=root, info_name=name)
        yield f".SS toolkit {name} {_roff(' '.join(command.collect_usage_pieces(context)))}"
        yield from _paragraphs(command.help or "")
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record and record[1]:  # the usage lists arguments
                yield ".TP"
                yield f".B {_roff(record[0])}"
                yield _roff(record[1])
    yield ".SH EXIT STATUS"
    yield "0: done. 1: a run has failed, a check has found something, or the scheduler refused."
    yield "2: the input or the command line cannot be used. 130: Ctrl\\-C."


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text)):
        if number:
            yield ".PP"
        yield _roff(" ".join(paragraph.replace("\b", "").split()))


def _roff(text: str) -> str:
    r"""Return text without a meaning to roff.

    >>> print(_roff("--set a\\b"), _roff(".x"))
    \-\-set a\\b \&.x
    """
    text = text.replace("\\", "\\\\").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text
