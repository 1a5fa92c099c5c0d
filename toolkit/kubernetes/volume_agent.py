"""Writes, reads or removes a file of the claim, in a pod; so it imports no toolkit module.

`write PATH SIZE SHA256` takes SIZE bytes from stdin: the end of stdin cannot be signalled.
`read PATH` prints the size on a line, the bytes and their SHA-256, or `-` if the file does not
exist.
"""

import hashlib
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

CHUNK = 1 << 20
DRAFT = ".{}.part-"


def write(path: Path, size: str, wanted: str) -> None:
    """Write a file from stdin atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(DRAFT.format(path.name) + os.urandom(4).hex())
    digest, left = hashlib.sha256(), int(size)
    try:
        with draft.open("xb") as file:
            while left and (chunk := os.read(0, min(left, CHUNK))):
                file.write(chunk)
                digest.update(chunk)
                left -= len(chunk)
            file.flush()
            os.fsync(file.fileno())
        if left or digest.hexdigest() != wanted:
            sys.exit(f"{path} has come here damaged: {left} of {size} bytes are missing")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read(path: Path) -> None:
    """Print a file."""
    out, digest = sys.stdout.buffer, hashlib.sha256()
    if not path.is_file():
        out.write(b"-\n")
        return
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size  # its writer may append meanwhile
        out.write(b"%d\n" % left)
        while left and (chunk := file.read(min(left, CHUNK))):
            out.write(chunk)
            digest.update(chunk)
            left -= len(chunk)
    out.write(digest.hexdigest().encode())
    out.flush()


def end_writes(path: Path) -> None:
    """Kill the writer of the file: a command in a container survives a lost connection."""
    wanted = [b"write", os.fsencode(path)]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            while (process / "cmdline").read_bytes().split(b"\0")[-5:-3] == wanted:
                os.kill(int(process.name), signal.SIGKILL)
                time.sleep(0.01)


def remove(path: Path, top: str) -> None:
    """Remove a file, its drafts, and the folders below `top` that become empty."""
    end_writes(path)
    with suppress(FileNotFoundError):
        path.unlink()
    with suppress(OSError):
        for draft in path.parent.iterdir():
            if draft.name.startswith(DRAFT.format(path.name)):
                draft.unlink()
        while str(path := path.parent) != top:
            path.rmdir()


try:
    name, place, *more = sys.argv[1:]
    {"write": write, "read": read, "remove": remove}[name](Path(place), *more)  # type: ignore[operator]
except OSError as error:
    sys.exit(str(error))
