"""The shared cache of squeue's and sacct's answers: one query serves all runs and processes.

`watch -n1 toolkit list` in ten shells queries the controller no more often than in one. The cache
is in the user's state folder, one file per Slurm cluster.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from toolkit.errors import LauncherError
from toolkit.runs.records.state_dir import lock_file, state_folder
from toolkit.runs.state import RunState
from toolkit.slurm.commands import (
    Command,
    ask_accounting,
    ask_jobs,
    ask_mine,
    ask_places,
    cluster_name,
    is_busy,
)
from toolkit.slurm.status import WAITS_FOR_TURN, JobRow, Place
from toolkit.text import untrusted

_VERSION = 1
_PAUSES_S = (2.0, 60.0)
"""First and longest back-off from a busy controller, in seconds."""
_OLDEST_S = 120.0
"""Maximum age of an answer that is shown while the controller is busy, in seconds."""
_CLUSTER_S = 3600.0
"""How long a cluster's name is cached, in seconds."""
_ACCOUNTING_S = 600.0
"""How long the lack of accounting is cached, in seconds."""
_ASK_AGAIN_S = 60.0
"""How long the accounting's lack of a job is cached, in seconds: it may lag behind."""
_TURN_S = 60.0
"""How long to wait for the query of another process; squeue itself gives up sooner."""
_PLACES_S = 60.0
"""Maximum age of queue positions: the query fetches the pending jobs of all users."""
_MOST_ENDED = 20_000
_FILE_BYTES = 256 << 20


def snapshot_file(environ: Mapping[str, str] = os.environ, *, host: str = "") -> Path:
    """Return the cache file for this environment's Slurm cluster, or for that of a host."""
    squeue = shutil.which("squeue", path=environ.get("PATH")) or ""
    here = [socket.gethostname(), squeue, environ.get("SLURM_CONF", ""), str(os.getuid())]
    digest = hashlib.sha256("\0".join([host] if host else here).encode()).hexdigest()[:16]
    return state_folder(environ) / "queues" / f"{digest}.json"


class Snapshot:
    """All jobs of the user at one moment."""

    def __init__(
        self,
        rows: Iterable[JobRow],
        *,
        asked: float,
        note: str = "",
        mine: bool = True,
        places: Callable[[], Mapping[str, Place]] = dict,
    ) -> None:
        self.asked = asked
        """Time of the query, in seconds since 1970; later events are missing."""
        self.note = note
        """Why it is older than requested; empty if it is not."""
        self.mine = mine
        """Whether it contains only jobs of this user."""
        self._places = places
        self._by_job: dict[str, list[JobRow]] = defaultdict(list)
        self._by_script: dict[str, list[JobRow]] = defaultdict(list)
        for row in rows:
            self._by_job[row.whole].append(row)
            self._by_script[row.script].append(row)

    def place(self, row: JobRow) -> Place | None:
        """Return the queue position of a pending job, if it is known."""
        if row.state is not RunState.PENDING or not WAITS_FOR_TURN.fullmatch(row.reason):
            return None
        return self._places().get(row.whole)

    def rows(self, job_id: str, script: str) -> list[JobRow]:
        """Return the rows of a job, its tasks, and all jobs of this batch script."""
        rows = [*self._by_job.get(job_id, ()), *self._by_script.get(script, ())]
        return list(dict.fromkeys(rows)) if len(rows) > 1 else rows


@dataclass(kw_only=True)
class _Answers:
    """The contents of the snapshot file of a Slurm cluster."""

    asked: float = 0.0
    rows: list[JobRow] = field(default_factory=list)
    cluster: str = ""
    cluster_asked: float = 0.0
    busy: str = ""
    busy_until: float = 0.0
    pause: float = 0.0
    no_accounting_until: float = 0.0
    ended: dict[str, tuple[float, list[JobRow]]] = field(default_factory=dict)
    """Time of the query and the accounting's rows, by job; no rows for an unknown job."""
    places_asked: float = 0.0
    places: dict[str, Place] = field(default_factory=dict)


class SnapshotCache:
    """Slurm's answers for many runs at once."""

    def __init__(
        self,
        command: Command,
        *,
        file: Path | None = None,
        clock: Callable[[], float] = time.time,
        fetch: Callable[[float], object] = lambda asked: None,
    ) -> None:
        """Prepare to query.

        Args:
            command: Runs Slurm's commands.
            file: The shared cache file; without one, every call queries Slurm.
            clock: Returns the seconds since 1970.
            fetch: Copies the files that jobs have written up to an answer's time.
        """
        self._command = command
        self._file = file
        self._clock = clock
        self._fetch = fetch
        self._memory = _Answers()
        self._stamp: object = None
        self._newest: Snapshot | None = None

    @property
    def batch_key(self) -> Hashable:
        """A key that identifies the Slurm cluster."""
        return self._file or self._command

    def look(
        self, *, max_age_s: float = 0.0, changed: float = 0.0, patient: bool = True
    ) -> Snapshot:
        """Return the user's jobs.

        Args:
            max_age_s: Maximum age of the answer.
            changed: Time of an event that the answer must include.
            patient: Whether to back off from a busy controller; a command that changes something
            cannot wait.

        Raises:
            LauncherError: Slurm does not answer, or the controller is too busy.
        """
        began, note = self._clock(), ""
        oldest = max(began - max_age_s, changed) if self._file else began
        answers = self._load()
        if answers.asked < oldest:
            with self._turn():
                answers = self._load()  # another process may have queried meanwhile
                if answers.asked >= oldest:
                    pass
                elif (patient and self._clock() < answers.busy_until) or not self._query(answers):
                    if not patient or answers.asked < max(changed, self._clock() - _OLDEST_S):
                        raise self._busy(answers)
                    note = f"as of {_clock_time(answers.asked)}, {self._busy(answers)}"
        newest = self._newest
        if newest is None or (newest.asked, newest.note) != (answers.asked, note):
            newest = self._newest = Snapshot(
                answers.rows, asked=answers.asked, note=note, places=self._places
            )
        self._fetch(newest.asked)
        return newest

    def _query(self, answers: _Answers) -> bool:
        """Ask the controller; return whether it was not too busy to answer."""
        asked = self._clock()  # before the query: the answer may miss events during it
        try:
            rows = ask_mine(self._command)
        except LauncherError as error:
            if not is_busy(str(error)):
                raise
            first_s, longest_s = _PAUSES_S
            answers.pause = min(max(answers.pause * 2, first_s), longest_s)
            answers.busy, answers.busy_until = str(error), self._clock() + answers.pause
            self._save(answers)
            return False
        answers.asked, answers.rows = asked, rows
        answers.busy, answers.busy_until, answers.pause = "", 0.0, 0.0
        self._save(answers)
        return True

    @staticmethod
    def _busy(answers: _Answers) -> LauncherError:
        again = _clock_time(answers.busy_until)
        return LauncherError(
            f"the controller is busy ({answers.busy}) and is asked again at {again}"
        )

    def forget(self) -> None:
        """Invalidate the shared snapshot, so that the next query sees this change."""
        with self._turn():
            answers = self._load()
            answers.asked = 0.0
            self._save(answers)

    def others(self, job_ids: Sequence[str]) -> Snapshot:
        """Return jobs of other users.

        Raises:
            LauncherError: the controller does not answer.
        """
        asked = self._clock()
        return Snapshot(ask_jobs(self._command, job_ids), asked=asked, mine=False)

    def cluster(self) -> str:
        """Return the name of the cluster, queried once an hour; "" if it does not answer."""
        answers = self._load()
        if not answers.cluster or answers.cluster_asked < self._clock() - _CLUSTER_S:
            done = self._command(["scontrol", "show", "config"])
            name = "" if done.returncode else cluster_name(done.stdout)
            with self._turn():
                answers = self._load()
                answers.cluster, answers.cluster_asked = name, self._clock()
                self._save(answers)
        return answers.cluster

    def require_cluster(self, cluster: str) -> None:
        """Require that the cluster of this name answers; another one does not know its jobs.

        Raises:
            LauncherError: another cluster answers.
        """
        if (here := self.cluster()) and here != cluster:
            raise LauncherError(
                f"it is of cluster {cluster!r}, and the Slurm that answers here is {here!r}; ask "
                f"on a login node of {cluster!r}, or set SLURM_CONF to its slurm.conf"
            )

    def ended(self, job_ids: Iterable[str]) -> dict[str, list[JobRow]]:
        """Return the accounting's rows of jobs that the controller has forgotten, by job id.

        One query serves all jobs; a site without accounting has no rows.

        Raises:
            LauncherError: the site's accounting does not answer.
        """
        answers, now = self._load(), self._clock()
        if now < answers.no_accounting_until:
            return {}
        ids = list(dict.fromkeys(job_ids))
        new = []
        for job_id in ids:
            asked, rows = answers.ended.get(job_id, (0.0, []))
            if asked <= now - _ASK_AGAIN_S and not (rows and all(row.state.final for row in rows)):
                new.append(job_id)
        if new:
            by_job: dict[str, list[JobRow]] = {job_id: [] for job_id in new}
            ended = ask_accounting(self._command, new)
            for row in ended or ():
                by_job.setdefault(row.whole, []).append(row)
            with self._turn():
                answers = self._load()
                if ended is None:
                    answers.no_accounting_until = now + _ACCOUNTING_S
                else:
                    answers.ended |= {job_id: (now, rows) for job_id, rows in by_job.items()}
                    answers.ended = dict(list(answers.ended.items())[-_MOST_ENDED:])
                self._save(answers)
            if ended is None:
                return {}
        return {job_id: answers.ended[job_id][1] for job_id in ids if job_id in answers.ended}

    def _places(self) -> Mapping[str, Place]:
        """Return the queue positions of the user's jobs; one process queries them once a minute."""

        def are_old(answers: _Answers) -> bool:
            return not 0 <= self._clock() - answers.places_asked < _PLACES_S

        answers = self._load()
        if are_old(answers):
            with self._turn():
                answers = self._load()
                if are_old(answers) and self._clock() >= answers.busy_until:
                    answers.places_asked, answers.places = self._clock(), {}
                    with contextlib.suppress(LauncherError):  # a status is complete without them
                        answers.places = ask_places(
                            self._command, {row.whole for row in answers.rows}
                        )
                    self._save(answers)
        return answers.places

    # ---- The file

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Let one process at a time query Slurm; without a lock file, all may query."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # the folder is not writable
                if self._file is not None:
                    self._file.parent.mkdir(parents=True, exist_ok=True)
                    path = self._file.with_suffix(".lock")
                    lock = stack.enter_context(path.open("w", encoding="utf-8"))
                    lock_file(lock, wait_s=_TURN_S)
            yield

    def _load(self) -> _Answers:
        """Read the file; a torn or invalid file contains no answers."""
        if self._file is not None:
            self._memory = self._read(self._file)
        # A clock that was set back must not extend the life of an answer.
        return self._memory if self._memory.asked <= self._clock() + 1 else _Answers()

    def _read(self, file: Path) -> _Answers:
        try:
            if self._stamp == (stamp := _stamp(file)):
                return self._memory
            content = untrusted.mapping(untrusted.read_json(file, limit=_FILE_BYTES))
            if content.pop("version") != _VERSION:
                return _Answers()
            content["rows"] = [JobRow(*map(str, row)) for row in content["rows"]]
            content["ended"] = {
                job_id: (_moment(asked), [JobRow(*map(str, row)) for row in rows])
                for job_id, (asked, rows) in content["ended"].items()
            }
            content["places"] = {
                job_id: Place(int(number), int(of), str(partition))
                for job_id, (number, of, partition) in content.get("places", {}).items()
            }
            content.setdefault("places_asked", 0.0)
            times = {f.name: _moment(content[f.name]) for f in fields(_Answers) if f.type is float}
            answers = _Answers(**content | times)
            if not isinstance(answers.cluster, str) or not isinstance(answers.busy, str):
                return _Answers()
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return _Answers()
        self._stamp = stamp
        return answers

    def _save(self, answers: _Answers) -> None:
        """Replace the file atomically."""
        self._memory = answers
        if self._file is None:
            return
        content = json.dumps({"version": _VERSION, **vars(answers)})
        part = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(content, encoding="utf-8")
            part.replace(self._file)
            self._stamp = _stamp(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            self._file = None  # no sharing possible; from now on every call queries Slurm


def _stamp(path: Path) -> object:
    """Return a value that changes when a file is replaced."""
    info = path.stat()
    return info.st_ino, info.st_mtime_ns, info.st_size


def _clock_time(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _moment(value: Any) -> float:
    """Return seconds since 1970; raise ValueError for any other value."""
    if (seconds := untrusted.moment(value)) is None:
        raise ValueError(value)
    return seconds
