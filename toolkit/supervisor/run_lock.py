"""The lock of a run on this machine, held while the run is active.

On Linux it is a write lock of the open file (fcntl(2), "open file description locks"). As with
flock(2), each process that has inherited the file holds the lock. Unlike with flock, users with
read access only cannot take the lock, and a query does not take it either. Systems without such
locks (macOS, gVisor) use flock.
"""

import errno
import fcntl
import os
import struct
from typing import IO

NAME = "running.lock"
"""The name of the lock file in the run directory."""

SCRIPT_LOCK = 9
"""The file descriptor with which the script holds the lock; its torchruns close it."""

NO_PID = "0" * 10
"""The file's content until the supervisor's process id is known."""

_SET, _ASK = (getattr(fcntl, name, -1) for name in ("F_OFD_SETLK", "F_OFD_GETLK"))
_FLOCK = "@hhqqi4x"  # struct flock: type, whence, start, length, pid; 0 bytes are the whole file


def hold(run_dir: str, again: bool = False) -> IO[bytes]:
    """Create the lock of a new run, and hold it until all processes have closed the file.

    On return, the bytes for a process id are on disk, because later steps must not fail.

    Args:
        run_dir: The run directory.
        again: Whether the run may already have a lock file.

    Raises:
        OSError: the file already exists, is locked, or cannot be written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if again else os.O_EXCL)
    file = os.fdopen(os.open(os.path.join(run_dir, NAME), flags, 0o644), "wb+", buffering=0)
    try:
        fcntl.fcntl(file, _SET, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.pwrite(file.fileno(), NO_PID.encode(), 0)
    return file


def note_pid(file: IO[bytes], pid: int) -> None:
    """Record the process that supervises the run."""
    os.pwrite(file.fileno(), f"{pid:0{len(NO_PID)}}".encode(), 0)


def is_held(file: IO[bytes]) -> bool:
    """Whether a process that may write the file holds the lock."""
    try:
        answer = fcntl.fcntl(file, _ASK, struct.pack(_FLOCK, fcntl.F_RDLCK, 0, 0, 0, 0))
        kind: int = struct.unpack(_FLOCK, answer)[0]
        return kind != fcntl.F_UNLCK
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
