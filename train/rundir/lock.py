"""The lock of a run directory: two processes of one attempt would overwrite each other's files.

Rank 0 keeps `holder.json` open, locked and fresh while it is alive. On one machine the lock shows
whether rank 0 is alive. Between machines the lock may not work, or a machine that has lost power
may hold it forever. There the modification time is the heartbeat: rank 0 sets it every few seconds.
Libraries such as filelock provide a lock, but no such heartbeat for network file systems.
"""

import errno
import fcntl
import math
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from ..runtime.rank import RankInfo
from . import untrusted
from .console import Console
from .files import VERSION, draft_of
from .jsonl import dump

NAME = "holder.json"
BEAT_S = 3.0
PATIENCE_S = 15.0
"""Heartbeat interval, and the time for which a silent holder counts as alive, in seconds."""
LOOK_S = 0.5
"""Poll interval while waiting for the lock, in seconds."""

Verdict = Literal["mine", "taken", "wait"]
Lock = Literal["ours", "theirs", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The contents of `holder.json`."""

    host: str
    """The machine on which rank 0 runs."""
    boot: str
    """Boot ID of its kernel: containers may share a kernel, and its locks."""
    pid: int
    """Rank 0's process ID there."""
    attempt: int
    """The scheduler's attempt."""
    restart: int
    """torchrun's restart within the attempt."""
    launch: str | None
    """torchrun's rendezvous ID; nodes of one rendezvous never run two groups of workers on
    purpose."""
    since: float
    """When rank 0 took the directory."""

    @classmethod
    def here(cls, rank_info: RankInfo) -> "Holder":
        """Describe this process."""
        host = socket.gethostname()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        except OSError:
            boot = host
        return cls(
            host=host,
            boot=boot,
            pid=os.getpid(),
            attempt=rank_info.attempt,
            restart=rank_info.restart,
            launch=rank_info.launch,
            since=time.time(),
        )

    def describe(self) -> str:
        """Name the process, so that a user can end it."""
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S")
        host = untrusted.printable(self.host)
        return f"rank 0 of attempt {self.attempt} is process {self.pid} on {host} since {since} UTC"


class Hold:
    """A held directory: kept fresh while this process is alive, and released when it ends."""

    def __init__(self, handle: int) -> None:
        """Keep `holder.json` open, and locked if the file system can lock."""
        self._handle = handle
        self._lost = False
        # Some file systems do not count links.
        self._counts = os.fstat(handle).st_nlink > 0
        self._ended = threading.Event()
        threading.Thread(target=self._keep, name="holder", daemon=True).start()

    def lost(self) -> bool:
        """Whether another process has replaced our file."""
        self._beat()
        return self._lost

    def close(self) -> None:
        """Release the directory; the end of the process also releases it."""
        self._ended.set()
        os.close(self._handle)

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._beat()

    def _beat(self) -> None:
        try:
            os.utime(self._handle)
            replaced = self._counts and os.fstat(self._handle).st_nlink == 0
        except OSError as error:
            # NFS returns this error for a file that another machine has replaced.
            replaced = error.errno == errno.ESTALE
        self._lost |= replaced


class Contender:
    """A process that wants to hold a directory, and looks repeatedly until it knows the verdict."""

    def __init__(self, path: Path, rank_info: RankInfo, console: Console) -> None:
        self.path, self.rank_info, self.console = path, rank_info, console
        self.me = Holder.here(rank_info)
        self.hold: Hold | None = None
        # The holder at the last look, the time of its file, and when we saw it first.
        self.holder: Holder | None = None
        self._stamp: int | None = None
        self._first_seen = 0.0

    def look(self, *, ended: tuple[int, int] | None) -> Verdict:
        """Take the directory if it is free; `wait`: look again soon.

        Args:
            ended: attempt and restart that are known to have ended, on whatever machine.

        Raises:
            OSError: the file cannot be read or written.
        """
        handle = untrusted.open_file(self.path, os.O_RDWR | os.O_CREAT)
        try:
            # The lock lasts until the end of this call: other processes of this machine wait.
            lock, holder, status = _lock(handle), _read(handle), os.fstat(handle)
            if not os.path.samestat(status, self.path.stat()):
                return "wait"  # another process was faster
            verdict = self._weigh(holder, lock, status.st_mtime_ns, ended)
            if verdict == "mine":
                self.hold = self._take()
            return verdict
        except FileNotFoundError:
            return "wait"
        finally:
            os.close(handle)

    def _weigh(
        self, holder: Holder | None, lock: Lock, stamp: int, ended: tuple[int, int] | None
    ) -> Verdict:
        if holder is None and lock != "theirs":
            return "mine"
        alive_here = False
        if holder is not None:
            # On its own machine, a living process holds a lock that is held.
            here = (holder.host, holder.boot) == (self.me.host, self.me.boot)
            alive_here = lock == "theirs" and here
            if holder.attempt < self.rank_info.attempt:
                return "mine"  # alive or not: it is fenced
            if lock == "ours" and holder.boot == self.me.boot:
                return "mine"
            launch = holder.launch if holder.attempt == self.rank_info.attempt else None
            if not alive_here and launch and launch == self.me.launch:
                return "mine"  # torchrun has given up the node on which it ran
            if not alive_here and (holder.attempt, holder.restart) == ended:
                return "mine"
        now = time.monotonic()
        if self._stamp is None or self.holder != holder:
            self.holder, self._stamp, self._first_seen = holder, stamp, now
            if holder is not None and not alive_here:
                self.console.say(
                    f"{holder.describe()}; waiting {PATIENCE_S:g} s for a sign of its life"
                )
            # A holder that is alive on this machine may be about to end, or to be replaced.
            return "wait"
        if alive_here or stamp != self._stamp:
            return "taken"
        return "mine" if now - self._first_seen > PATIENCE_S else "wait"

    def _take(self) -> Hold:
        """Replace the old file by a new one, as a dead machine may hold the old one's lock."""
        draft = draft_of(self.path)
        handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if _lock(handle) != "ours":
                self.console.complain(
                    f"warning: {self.path.parent} knows no file locks; a second start of this "
                    f"attempt is noticed by the time of {NAME} only"
                )
            record = {"version": VERSION, **asdict(self.me)}
            os.write(handle, f"{dump(record, indent=2)}\n".encode())
            os.fsync(handle)
            draft.replace(self.path)
        except BaseException:
            os.close(handle)
            draft.unlink(missing_ok=True)
            raise
        return Hold(handle)


def _lock(handle: int) -> Lock:
    """Lock a file as long as this process has it open.

    Not with flock(): a forked worker that outlives us would keep that lock. A lockf() lock is lost
    when any handle on the file is closed: nothing else in this process may open the file.
    """
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return "theirs" if error.errno in (errno.EACCES, errno.EAGAIN) else "unknown"
    return "ours"


def _read(handle: int) -> Holder | None:
    try:
        record = untrusted.json_object(os.pread(handle, 1 << 16, 0))
        launch, since = record["launch"], untrusted.number(record["since"])
        return Holder(
            host=untrusted.text(record["host"]),
            boot=untrusted.text(record["boot"]),
            pid=untrusted.whole(record["pid"]),
            attempt=untrusted.whole(record["attempt"]),
            restart=untrusted.whole(record["restart"]),
            launch=None if launch is None else untrusted.text(launch),
            # Limit the date to what a calendar can show: until the year 9999.
            since=min(max(since, 0.0), 2.5e11) if math.isfinite(since) else 0.0,
        )
    except (ValueError, KeyError):
        return None
