"""Which processes live, for tests that promise to leave none behind."""

import os
from pathlib import Path

BATCH_ROLE = " batch /"
"""What is in the command of the supervisor that a batch script becomes, and of nothing else."""


def with_environment(marker: str) -> set[int]:
    """Return the processes whose environment or arguments hold `marker`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marker.encode() in text and state != "Z":
            found.add(int(entry.name))
    return found


def is_torchrun(command: bytes) -> bool:
    """Whether a command line is torchrun's own, and not that of a program that starts it."""
    words = command.split(b"\0")
    return b"python" in words[0] and b"torchrun" in map(os.path.basename, words[:2])


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
