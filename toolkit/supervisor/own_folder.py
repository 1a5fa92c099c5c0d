"""A folder of this process on the node's local disk, without a file server.

A killed process leaves its folder behind. Each folder contains a file that is locked while its
process lives, so the next process on the node detects and removes stale folders.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from typing import Dict, Mapping, Optional

PLACE = "/tmp"
LONGEST_TMPDIR = 107 - len("/torch-shm-dir-abcdef/manager.sock") - 8
"""In bytes. A socket path has at most 107 (unix(7)); the longest known ones in there are torch's,
for the tensors of the DataLoader; 8 bytes are spare."""

_PREFIX, _LOCK = "supervisor.", "lock"


class OwnFolder:
    """The folder, created on first use."""

    def __init__(self, place: str = PLACE) -> None:
        self._place, self._path = place, ""
        self._lock: Optional[int] = None

    @property
    def made(self) -> str:
        """The path of the folder; empty before the first use."""
        return self._path

    def path(self, *names: str) -> str:
        """Return a path in the folder.

        Raises:
            OSError: the folder cannot be created.
        """
        if not self._path:
            remove_left_folders(self._place)
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=self._place)
            self._lock = os.open(folder + "/new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # without locks, folders are never removed
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(folder + "/new", os.path.join(folder, _LOCK))
            self._path = folder
        return os.path.join(self._path, *names)

    def remove(self) -> None:
        """Remove the folder."""
        if self._path:
            shutil.rmtree(self._path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._path, self._lock = "", None


def remove_left_folders(place: str) -> None:
    """Remove the folders that ended processes of this user have left behind."""
    for folder in glob.glob(os.path.join(glob.escape(place), _PREFIX + "*")):
        try:
            if os.lstat(folder).st_uid != os.getuid():
                continue
            lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def short_tmpdir(environ: Mapping[str, str], folder: OwnFolder) -> Dict[str, str]:
    """Return a TMPDIR in which sockets can be created: a link, if the site's path is too long.

    With a longer path, DataLoader workers fail with "AF_UNIX path too long", and the rank waits
    for them without limit.
    """
    site = environ.get("TMPDIR", "")
    if len(os.fsencode(site)) <= LONGEST_TMPDIR:
        return {}
    try:
        link = folder.path("tmp")
        os.symlink(site, link)
    except OSError as error:
        print(f"TMPDIR is too long for sockets, and no link can be made: {error}", flush=True)
        return {}
    text = f"TMPDIR has {len(site)} characters, too many for sockets in it: ranks see it as {link}"
    print(text, flush=True)
    return {"TMPDIR": link}
