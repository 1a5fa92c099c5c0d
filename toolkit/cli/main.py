"""The program `toolkit`: its commands, their shared options, and how errors are shown."""

from __future__ import annotations  # naming a type must not import it

import codecs
import errno
import functools
import importlib
import io
import os
import re
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import click

import toolkit
from toolkit.cli import exit_status
from toolkit.cli.output import first_of, say, stop_writing
from toolkit.errors import InputError, ToolkitError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from toolkit.text.secret_scan import Mask

# ---- The commands, their arguments and options

_MODULES = {
    **dict.fromkeys(("new", "init", "check"), "files"),
    **dict.fromkeys(("render", "submit", "resubmit", "run"), "submit"),
    **dict.fromkeys(("list", "status", "top", "cancel", "wait", "logs", "stacks"), "runs"),
    **dict.fromkeys(("goodput", "report", "forward", "show"), "runs"),
    **dict.fromkeys(("schema", "supervisor"), "files"),
    **dict.fromkeys(("completion", "man"), "shell"),
}
"""The commands in the order of `--help`, and the modules of this package that define them."""


class _Commands(click.Group):
    """A group that imports the module of a command at its first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # For an unknown name, click compares all commands and suggests the nearest one.
        for module in {_MODULES[cmd_name]} if cmd_name in _MODULES else set(_MODULES.values()):
            importlib.import_module(f"toolkit.cli.{module}")
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their first sentences, whole: click cuts them to one line."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, c.get_short_help_str(200)) for name, c in commands if c])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(toolkit.__version__, prog_name="toolkit")
def cli() -> None:
    """Run one PyTorch job file here, on Slurm, or on Kubernetes.

    JOB.yaml says what to run, a PROFILE where: `local`, `slurm`, `k8s`, a file in slurm/profiles,
    k8s/profiles or your own profiles, or another file. RUN is a run's URI, name, or run directory;
    without it, status, logs, report and goodput take the newest run.
    """


def example(command: str) -> str:
    """Return an epilog that click does not wrap."""
    return f"\b\nExample:\n  {command}"


def _or_default(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    if value is None:
        from toolkit.profile import require_default_profile

        return require_default_profile()
    return value


_PLAIN = re.compile(r"[\w.@%+,:-]+")
"""Words without a meaning to a shell."""


def _profiles(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the words that may end `--to`, for the shell: names of profiles, or a file."""
    from click.shell_completion import CompletionItem

    from toolkit.profile import profile_names

    # bash puts the word in as it is: another user's file may be called `$(rm -r x).yaml`.
    try:
        profiles = profile_names()
    except OSError:  # such as in a folder that was deleted
        profiles = []
    names = [n for n in profiles if n.startswith(incomplete) and _PLAIN.fullmatch(n)]
    return [CompletionItem(n) for n in names] or [CompletionItem(incomplete, type="file")]


def _runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the runs that a word may end as, for the shell: the names of your list."""
    from click.shell_completion import CompletionItem

    from toolkit.runs.records import registry

    names = {record.name: None for record in registry.records()}
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _or_newest(
    ctx: click.Context, param: click.Parameter, value: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """Return the runs that were named, else the newest one of your list."""
    if value or ctx.resilient_parsing:
        return value
    from toolkit.runs.records import registry

    newest = deque(registry.records(), maxlen=1)
    if not newest:
        raise InputError("no runs yet; `toolkit submit JOB.yaml --to PROFILE` starts one")
    say(f"the newest run: {newest[0].name}", err=True)
    return newest[0].uri if param.nargs == 1 else (newest[0].uri,)


JOB = click.argument("job", metavar="JOB.yaml", type=click.Path(path_type=Path))
RUN = click.argument("run", metavar="RUN", shell_complete=_runs)
RUNS = click.argument("names", metavar="RUN...", nargs=-1, required=True, shell_complete=_runs)
RUN_OR_NEWEST = click.argument(
    "run", metavar="[RUN]", required=False, callback=_or_newest, shell_complete=_runs
)
RUNS_OR_NEWEST = click.argument(
    "names", metavar="[RUN]...", nargs=-1, callback=_or_newest, shell_complete=_runs
)
SET = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Set a key of the job file, like resources.nnodes=4. May be repeated.",
)
TO = click.option(
    "--to",
    metavar="PROFILE",
    callback=_or_default,
    shell_complete=_profiles,
    help="A profile's name or file; without it, the default profile, which `toolkit init` writes.",
)
FOLLOW = click.option("--follow", "-f", is_flag=True, help="Show the log until the run has ended.")
CHAIN = click.option(
    "--chain",
    type=click.IntRange(1, 1000),
    default=1,
    metavar="N",
    help="A chain of N jobs, each continuing where the one before ended (Slurm).",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
TRUST = click.option(
    "--trust",
    is_flag=True,
    help="Trust a run directory that is not in your list of runs: act on the jobs, hosts and "
    "clusters in its records.",
)

# ---- The program

COMPLETE = "_TOOLKIT_COMPLETE"
"""The variable by which a shell asks for completions (`toolkit completion`)."""

_AS_GIVEN = "toolkit.as_given"


def _as_given(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write the bytes of a file name back as they came, and half a surrogate pair as its number."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


codecs.register_error(_AS_GIVEN, _as_given)


def _is_close(error: click.NoSuchOption) -> bool:
    """Whether a proposed option is one letter or an ending away: `--lr` is not `--help`."""
    from toolkit.errors import nearest

    return nearest(error.option_name, error.possibilities or (), cutoff=0.75) is not None


def _instead(option: str) -> str:
    """Return what to write in place of an option that no command has."""
    word = option.lstrip("-").replace("-", "_")
    if word in ("o", "out", "output"):
        return "The text goes to stdout: add >FILE"
    if word in ("profile", "target", "backend"):
        return "--to names the profile"
    from toolkit.job.spec import Resources

    if word in Resources.model_fields:
        return f"A key of the job file: --set resources.{word}=…"
    return f"Put the options of the script into the job file: args: [{option}, …]"


def main() -> None:
    """Run the command line; errors of the user end with one message and an exit status."""
    # Scripts and manifests are UTF-8 in every locale.
    for stream, errors in ((sys.stdout, _AS_GIVEN), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    if instruction := os.environ.get(COMPLETE):
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(cli, {}, "toolkit", COMPLETE, instruction))
    at_terminal = sys.stdout.isatty()  # a closed terminal is none any more
    try:
        # Not cli.main(), which would report a closed pipe as a failure.
        with cli.make_context("toolkit", sys.argv[1:]) as context:
            cli.invoke(context)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(exit_status.INTERRUPTED)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        usage, mark, message = shown.getvalue().partition("Error: ")
        for line in [*usage.splitlines(), f"{mark}{message.rstrip()}"]:
            say(line, err=True)  # the message may quote a file's name
        if isinstance(error, click.NoSuchOption):
            name = error.ctx.command.name if error.ctx else None
            if name in ("run", "submit", "render") and not _is_close(error):
                say(_instead(error.option_name), err=True)
        sys.exit(exit_status.UNUSABLE)
    except InputError as error:
        for problem in first_of(error.problems, "problems"):
            say(without_secrets(str(problem)), err=True)
        sys.exit(error.exit_status)
    except ToolkitError as error:
        say(without_secrets(str(error)), err=True)
        sys.exit(error.exit_status)
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            stop_writing()
            say(f"the output cannot be written: {error.strerror}", err=True)
            sys.exit(exit_status.FAILED)
        if error.errno == errno.ENOENT and not _working_folder_exists():
            say("the current folder no longer exists; change to another one", err=True)
            sys.exit(exit_status.FAILED)
        # At a terminal, EIO means that it is closed; elsewhere, that a disk fails.
        if error.errno != errno.EPIPE and not (error.errno == errno.EIO and at_terminal):
            raise
        stop_writing()  # the reader has seen enough (`| head`), or the terminal is closed
        sys.exit(exit_status.DONE)


def without_secrets(text: str) -> str:
    """Return a message without values of secrets, from the environment or by their shape."""
    from toolkit.text import secret_scan

    return secret_scan.conceal(_mask(tuple(os.environ.items())).hide(text))


@functools.lru_cache(maxsize=1)  # a file may have thousands of problems
def _mask(variables: tuple[tuple[str, str], ...]) -> Mask:
    from toolkit.text import secret_scan

    return secret_scan.Mask(secret_scan.values_of(dict(variables)))


def _working_folder_exists() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True
