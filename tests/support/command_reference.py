"""The reference page of the command line, written from the commands' own help."""

import inspect
import re

import click

import toolkit
from toolkit.cli import cli, exit_status

EXIT_STATUSES = {
    exit_status.DONE: (
        "done; the runs that were waited for have succeeded, or `check` has found nothing"
    ),
    exit_status.FAILED: (
        "a run has not succeeded, or cannot do what you ask of it; a check has found something; "
        "`supervisor` shows one of another version; the scheduler refused or did not answer"
    ),
    exit_status.UNUSABLE: (
        "a file, an option or the name of a run cannot be used; errors in a file are shown together"
    ),
    exit_status.INTERRUPTED: (
        "Ctrl-C: `run` has stopped its run; a run that is followed continues (`top` ends with 0)"
    ),
}


def commands_page() -> str:
    """Return the page of `toolkit`: a section for each command, and the exit statuses."""
    parts = [
        "# The command line",
        "Written by `make golden` from the commands; `toolkit COMMAND --help` prints the same.",
        _prose(cli),
    ]
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        parts += _section(f"toolkit {name}", command)
    return "\n\n".join([*parts, *_exit_statuses()]) + "\n"


def _section(name: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"## {name}", _prose(command), f"```\n{usage}\n```"]
    rows = [_row(option, context) for option in command.params if isinstance(option, click.Option)]
    if rows:
        parts.append("\n".join(["| option | | default |", "|---|---|---|", *rows]))
    if command.epilog:
        lines = command.epilog.removeprefix("\b\nExample:\n")
        parts += ["Example:", f"```\n{inspect.cleandoc(lines)}\n```"]
    return parts


def _prose(command: click.Command) -> str:
    """Return the help of a command as paragraphs."""
    text = inspect.cleandoc(command.help or "")
    return "\n\n".join(re.sub(r"\s*\n", " ", part) for part in text.split("\n\n"))


def _row(option: click.Option, context: click.Context) -> str:
    takes = "" if option.is_flag else f" {option.make_metavar(context)}"
    names = ", ".join(f"`{name}{takes}`" for name in sorted(option.opts, key=len, reverse=True))
    extra = option.get_help_extra(context)
    limits = f" {_limits(option)}." if "range" in extra else ""
    default = f"`{extra['default']}`" if "default" in extra else ""
    cells = (names, f"{option.help}{limits}", default)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _limits(option: click.Option) -> str:
    kind = option.type
    assert isinstance(kind, click.IntRange) and not (kind.min_open or kind.max_open)
    return f"At least {kind.min}" if kind.max is None else f"{kind.min} to {kind.max}"


def _exit_statuses() -> list[str]:
    rows = [
        f"| {status} | {meaning} | {', '.join(f'`{name}`' for name in _classes(status))} |"
        for status, meaning in EXIT_STATUSES.items()
    ]
    return [
        "## Exit statuses",
        "A command that no signal ends exits with one of these. The Python API raises exceptions "
        "for the same errors: `ToolkitError` is the base class of all errors that you can fix.",
        "\n".join(["| status | means | raised from Python |", "|---|---|---|", *rows]),
        "`python -m train` and the rendered scripts use [other exit "
        "statuses](run-directory.md#exit-status).",
    ]


def _classes(status: int) -> list[str]:
    """Return the public errors below the root that carry a status."""
    public = (getattr(toolkit, name) for name in toolkit.__all__)
    return [
        error.__name__
        for error in public
        if isinstance(error, type) and issubclass(error, toolkit.ToolkitError)
        if error is not toolkit.ToolkitError and error.exit_status == status
    ]
