"""The program `toolkit`."""

from __future__ import annotations  # naming a type must not import it

import codecs
import errno
import io
import os
import sys
from pathlib import Path

import click

from toolkit.cli.options import cli
from toolkit.cli.output import say, stop_writing
from toolkit.errors import ToolkitError
from toolkit.text import secret_scan

__all__ = ["main"]


_AS_GIVEN = "toolkit.as_given"


def _as_given(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write the bytes of a file name back as they came, and half a surrogate pair as its number."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


codecs.register_error(_AS_GIVEN, _as_given)


def _has_folder() -> bool:
    """Whether the working folder is still there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def main() -> None:
    """Run the command line; what the user can mend is one message and an exit status."""
    # Scripts and manifests are UTF-8, whatever the locale.
    for stream, errors in ((sys.stdout, _AS_GIVEN), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
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
        from toolkit.text.masking import Mask

        message = Mask(secret_scan.values_of(os.environ)).hide(str(error))
        say(secret_scan.conceal(message), err=True)
        sys.exit(error.exit_status)
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            stop_writing()
            click.echo(f"the output cannot be written: {error.strerror}", err=True)
            sys.exit(1)
        if error.errno == errno.ENOENT and not _has_folder():
            click.echo("the folder that you are in is gone; change to another one", err=True)
            sys.exit(1)
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        stop_writing()  # the reader has seen enough (`| head`), or the terminal is closed
        sys.exit(0)
