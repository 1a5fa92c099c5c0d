"""Counts the files that this process opens below a folder, and the folders that it lists."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Operations:
    """What was done below a folder."""

    folder: str
    opened: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)

    def note(self, event: str, path: object) -> None:
        """Note an event of Python's audit, if its path is in the folder."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        name = os.path.normpath(Path.cwd() / os.fsdecode(path))
        if name.startswith(self.folder + "/"):
            (self.opened if event == "open" else self.listed).append(name)


_counted: list[Operations] = []


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _counted and event in ("open", "os.listdir", "os.scandir"):
        for operations in _counted:
            operations.note(event, arguments[0])


@contextlib.contextmanager
def operations_in(folder: Path) -> Iterator[Operations]:
    """Note what is opened and listed below a folder."""
    if not _hooked:
        sys.addaudithook(_audit)  # there is no way to remove it
        _hooked.append(True)
    _counted.append(Operations(str(folder)))
    try:
        yield _counted[-1]
    finally:
        _counted.pop()


_hooked: list[bool] = []
