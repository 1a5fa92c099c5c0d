"""Mirrors of run directories that lie on a login node, so that here they are read like any other.

It holds the run's own files: logs, metrics, outcome. Its code, checkpoints and other big
files stay where they are.
"""

import contextlib
import fcntl
import os
import stat
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.runs.registry import RunRecord
from toolkit.slurm.login.ssh import Host

__all__ = ["Mirrors"]

_FRESH_S = 2.0
"""How old a mirror may be when a file of it is read."""

_TRY_AGAIN_S = 10.0
"""How long a host is left alone that was not reached."""

_BIG = 16 * 2**20
"""Size in bytes from which only logs are copied, and of them only the appended part."""

_STAYS = ("--exclude=/*/code/", "--exclude=checkpoints/", "--exclude=/*/profile/")

_FILES = ("-rt", "--no-links", "--no-devices", "--no-specials")
"""The files to copy: files and folders. A link would lead here to a file of this machine."""

_OURS = tuple(
    f"--exclude=/*/{name}" for name in ("launch.json", "job.yaml", "*.sbatch", "points.jsonl")
)
"""What this machine has written, and by which it opens the run and submits it again: write access
on the login node must not decide which secrets, paths and commands leave this machine."""

_GROWING = ("--include=*/", "--include=*.log", "--include=*.jsonl", "--exclude=*")

_WITHOUT_LINKS = ".without-links"
"""Stands beside the mirrors once no link is left in them."""

_PARTIAL = (0, 23, 24)
"""Exit statuses of rsync: all is there, or files went away or could not be read meanwhile."""


class Mirrors:
    """The mirrors of one host's run directories."""

    def __init__(self, host: Host, folder: Path) -> None:
        """Prepare to bring.

        Args:
            host: Where the run directories are.
            folder: Where the mirrors are, by the names of the runs.
        """
        self.folder = folder
        self._host = host
        self._runs: weakref.WeakSet[object] = weakref.WeakSet()
        self._as_of = float("-inf")
        self._turn = threading.Lock()

    def watch(self, run: object) -> None:
        """Copy this run as well, as long as a process has it open."""
        self._runs.add(run)
        self._as_of = float("-inf")

    def fetch(self, since: float) -> None:
        """Bring what the open runs have written, unless that was done after `since`.

        Raises:
            LauncherError: it cannot be brought.
        """
        with self._turn:
            if self._as_of >= since:
                return
            began = time.time()
            with self._alone():
                self._remove_links()
                for parent, names in self._wanted().items():
                    self._bring(parent, names)
            self._as_of = began

    def refresh(self) -> None:
        """Copy runs whose local files are older than seconds, if the host can be reached."""
        now = time.time()
        if now > self._host.lost + _TRY_AGAIN_S:
            with contextlib.suppress(LauncherError):  # a caller that needs it queries the host
                self.fetch(now - _FRESH_S)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one process at a time write: rsync deletes what it does not know, unfinished too."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w", encoding="utf-8") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove_links(self) -> None:
        """Remove links, pipes and devices that an older version has brought; once for all mirrors.

        rsync leaves them where the host still has them: it neither brings nor deletes them.

        Raises:
            LauncherError: one of them cannot be removed.
        """
        mark = self.folder / _WITHOUT_LINKS
        if os.path.lexists(mark):
            return
        try:
            for folder, names, files in os.walk(self.folder):
                for path in (Path(folder, name) for name in (*names, *files)):
                    mode = path.lstat().st_mode
                    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                        path.unlink()
            mark.touch()
        except OSError as error:
            raise LauncherError(
                f"{error.filename}: a mirror holds a link that cannot be removed: "
                f"{error.strerror}; remove {self.folder}, which is brought again"
            ) from error

    def _wanted(self) -> dict[str, list[str]]:
        by_parent: dict[str, list[str]] = defaultdict(list)
        for record in self._records():
            if record.remote_dir is not None:
                parent, _, name = record.remote_dir.rpartition("/")
                by_parent[parent].append(name)
        return by_parent

    def _records(self) -> Iterator[RunRecord]:
        for run in list(self._runs):
            record = getattr(run, "record", None)
            if isinstance(record, RunRecord):
                yield record

    def _bring(self, parent: str, names: list[str]) -> None:
        listed = "".join(f"{name}\0" for name in dict.fromkeys(names)).encode()
        ends = (f"{self._host.name}:{parent}/", f"{self.folder}/")
        words = (*_FILES, *_OURS, "--from0", "--files-from=-", "--ignore-missing-args", *_STAYS)
        small = (*words, "--delete", f"--max-size={_BIG}")
        # Of a big log only the appended part is copied; comparing the rest would read it all again.
        large = (*words, "--append", f"--min-size={_BIG + 1}", *_GROWING)
        for options in (small, large):
            done = self._host.rsync(*options, *ends, names=listed)
            if done.returncode not in _PARTIAL:
                message = done.stderr.strip().partition("\n")[0]
                raise LauncherError(
                    f"{self._host.name}: rsync brings no run directories from {parent}: {message}"
                )
