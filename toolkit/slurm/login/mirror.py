"""Local mirrors of run directories on a login node, read like any run directory.

A mirror contains the run's own files: logs, metrics, outcome. Its code, checkpoints and other big
files stay on the login node.
"""

import contextlib
import os
import stat
import threading
import time
import weakref
from collections import defaultdict
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.runs.records.state_dir import lock_file
from toolkit.runs.run import Run
from toolkit.slurm.login.ssh import SshConnection
from toolkit.text.answers import error_line

_FRESH_S = 2.0
"""Maximum age of a mirror when a file is read, in seconds."""

_TRY_AGAIN_S = 10.0
"""Retry interval for an unreachable host, in seconds."""

_BIG = 16 * 2**20
"""Size in bytes from which only logs are copied, and only their appended part."""

_STAYS = ("--exclude=/*/code/", "--exclude=checkpoints/", "--exclude=/*/profile/")

_FILES = ("-rt", "--no-links", "--no-devices", "--no-specials")
"""The files to copy: files and folders. A link would lead here to a file of this machine."""

_OURS = tuple(
    f"--exclude=/*/{name}" for name in ("launch.json", "job.yaml", "*.sbatch", "points.jsonl")
)
"""Files written by this machine, which uses them to open and resubmit the run: write access on the
login node must not decide which secrets, paths and commands leave this machine."""

_GROWING = ("--include=*/", "--include=*.log", "--include=*.jsonl", "--exclude=*")

_WITHOUT_LINKS = ".without-links"
"""The marker file beside the mirrors once they contain no links."""

_PARTIAL = (0, 23, 24)
"""Exit statuses of rsync: complete, or some files vanished or could not be read."""


class Mirrors:
    """The mirrors of one host's run directories."""

    def __init__(self, ssh: SshConnection, folder: Path) -> None:
        self.folder = folder
        """The folder of the mirrors; each has the name of its run."""
        self._ssh = ssh
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._as_of = float("-inf")
        self._turn = threading.Lock()

    def watch(self, run: Run) -> None:
        """Also copy this run, as long as a process has it open."""
        self._runs.add(run)
        self._as_of = float("-inf")

    def fetch(self, since: float) -> None:
        """Copy the files of the open runs, unless they were copied after `since`.

        Raises:
            LauncherError: the files cannot be copied.
        """
        with self._turn:
            if self._as_of >= since:
                return
            began = time.time()
            names_by_parent: dict[str, list[str]] = defaultdict(list)
            for run in list(self._runs):
                if run.record.remote_dir is not None:
                    parent, _, name = run.record.remote_dir.rpartition("/")
                    names_by_parent[parent].append(name)
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / ".lock").open("w", encoding="utf-8") as lock:
                # One process at a time: rsync also deletes another's unfinished files.
                lock_file(lock, wait_s=None)
                self._remove_links()
                for parent, names in names_by_parent.items():
                    self._bring(parent, names)
            self._as_of = began

    def refresh(self) -> None:
        """Refresh mirrors that are a few seconds old, if the host is reachable."""
        now = time.time()
        if now > self._ssh.lost + _TRY_AGAIN_S:
            with contextlib.suppress(LauncherError):  # a caller that needs it queries the host
                self.fetch(now - _FRESH_S)

    def _remove_links(self) -> None:
        """Remove links, pipes and devices copied by an older version; once for all mirrors.

        rsync keeps them as long as the host has them: it neither copies nor deletes them.
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

    def _bring(self, parent: str, names: list[str]) -> None:
        listed = "".join(f"{name}\0" for name in dict.fromkeys(names)).encode()
        ends = (f"{self._ssh.name}:{parent}/", f"{self.folder}/")
        arguments = (*_FILES, *_OURS, "--from0", "--files-from=-", "--ignore-missing-args", *_STAYS)
        small = (*arguments, "--delete", f"--max-size={_BIG}")
        # Only the appended part of a big log is copied; a comparison would read all of it again.
        large = (*arguments, "--append", f"--min-size={_BIG + 1}", *_GROWING)
        for options in (small, large):
            done = self._ssh.rsync(*options, *ends, names=listed)
            if done.returncode not in _PARTIAL:
                raise LauncherError(
                    f"{self._ssh.name}: rsync brings no run directories from {parent}: "
                    f"{error_line(done.stderr)}"
                )
