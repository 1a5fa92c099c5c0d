"""The state folder of the user, closed to all other users.

Its files decide which runs are submitted, cancelled and read in the user's name.
"""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from toolkit.errors import LauncherError
from toolkit.text.own_files import user_folder

_PRIVATE = 0o700


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder; create it if it is missing, and remove other users' access.

    If the folder cannot be created, the following write reports it.

    Raises:
        LauncherError: it belongs to another user.
    """
    folder = user_folder("STATE", environ)
    try:
        info = folder.stat()
    except OSError:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=_PRIVATE, parents=True)
        return folder
    if info.st_uid not in (os.getuid(), 0):
        raise LauncherError(
            f"{folder} belongs to the user with the id {info.st_uid}, who could submit and cancel "
            "runs in your name; set XDG_STATE_HOME to your own folder"
        )
    if stat.S_IMODE(info.st_mode) & ~_PRIVATE:
        with contextlib.suppress(OSError):
            folder.chmod(_PRIVATE)
    return folder


def append(path: Path, line: str) -> None:
    """Append a line to a file with one write: concurrent processes leave two whole lines.

    A line that a full disk has truncated is ended first: the new line must not become part of it.
    """
    with path.open("ab+") as file:
        torn = file.seek(0, os.SEEK_END) > 0
        if torn:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + line.encode() + b"\n")


def lock_file(file: IO[Any] | int, *, wait_s: float | None = 0.0) -> bool:
    """Lock a file until it is closed; False if another process still has it after `wait_s`.

    None waits without limit. On a file system without locks, the lock always succeeds.
    """
    mode = fcntl.LOCK_EX if wait_s is None else fcntl.LOCK_EX | fcntl.LOCK_NB
    until_s = time.monotonic() + (wait_s or 0.0)
    while True:
        try:
            fcntl.flock(file, mode)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.02)
        except OSError:
            return True
        else:
            return True
