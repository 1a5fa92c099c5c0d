"""Who asks Slurm: one question for all runs, its answer shared for seconds by all processes here.

`watch -n1 toolkit list` in ten shells queries the controller no more often than in one. The answer
lies in the user's state folder, one file per Slurm cluster.
"""

import contextlib
import fcntl
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
from toolkit.runs.state_dir import state_folder
from toolkit.slurm.sacct import ask_accounting
from toolkit.slurm.squeue import Command, Row, ask_jobs, ask_mine, cluster_name, is_busy
from toolkit.text import untrusted

__all__ = ["Queue", "Snapshot", "place_of_answers"]

_VERSION = 1
_PAUSES_S = (2.0, 60.0)
"""First and longest time in which a busy controller is left alone."""
_OLDEST_S = 120.0
"""How old an answer may be that is shown while the controller is busy."""
_CLUSTER_S = 600.0
"""How long a cluster's name, and the lack of accounting, are believed."""
_ASK_AGAIN_S = 60.0
"""How long it is believed that the accounting does not know a job; it may be late."""
_TURN_S = 60.0
"""How long to wait for another process that is querying; squeue itself gives up sooner."""
_MOST_ENDED = 20_000
_FILE_BYTES = 256 << 20
_LAST = 32503680000.0
"""The year 3000: later times cannot be shown on every platform."""


def place_of_answers(environ: Mapping[str, str] = os.environ, *, host: str = "") -> Path:
    """Return the snapshot file of the Slurm cluster of this environment.

    Args:
        environ: The environment of the commands.
        host: The host that they run on, where it is not this one.
    """
    squeue = shutil.which("squeue", path=environ.get("PATH")) or ""
    here = [socket.gethostname(), squeue, environ.get("SLURM_CONF", ""), str(os.getuid())]
    digest = hashlib.sha256("\0".join([host] if host else here).encode()).hexdigest()[:16]
    return state_folder(environ) / "queues" / f"{digest}.json"


class Snapshot:
    """All jobs of the user at one moment."""

    def __init__(
        self, rows: Iterable[Row], *, asked: float, note: str = "", mine: bool = True
    ) -> None:
        self.asked = asked
        """When, in seconds since 1970; what happened later it does not know."""
        self.note = note
        """Why it is older than wanted, if it is."""
        self.mine = mine
        """Whether it holds jobs of this user alone."""
        self._by_job: dict[str, list[Row]] = defaultdict(list)
        self._by_script: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            self._by_job[row.whole].append(row)
            self._by_script[row.script].append(row)

    def rows(self, job_id: str, script: str) -> list[Row]:
        """Return the rows of a job, of its tasks, and of all jobs of this batch script."""
        rows = [*self._by_job.get(job_id, ()), *self._by_script.get(script, ())]
        return list(dict.fromkeys(rows)) if len(rows) > 1 else rows


@dataclass(kw_only=True)
class _Known:
    """The contents of the snapshot file of a Slurm cluster."""

    asked: float = 0.0
    rows: list[Row] = field(default_factory=list)
    cluster: str = ""
    cluster_asked: float = 0.0
    busy: str = ""
    busy_until: float = 0.0
    pause: float = 0.0
    no_accounting_until: float = 0.0
    ended: dict[str, tuple[float, list[Row]]] = field(default_factory=dict)
    """The accounting's rows of jobs, and the time of the query;
    no rows for those it does not know."""


class Queue:
    """Answers for many runs at once."""

    def __init__(
        self,
        command: Command,
        *,
        file: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare to ask.

        Args:
            command: How Slurm's commands are run.
            file: Where answers are shared; without one every call queries Slurm.
            clock: Seconds since 1970.
        """
        self._command = command
        self._file = file
        self._clock = clock
        self._memory = _Known()
        self._stamp: object = None
        self._known_as: tuple[float, Snapshot] | None = None

    @property
    def place(self) -> Hashable:
        """A key that is equal for the same Slurm cluster."""
        return self._file or self._command

    def look(
        self, *, max_age_s: float = 0.0, changed: float = 0.0, patient: bool = True
    ) -> Snapshot:
        """Return the user's jobs.

        Args:
            max_age_s: How old the answer may be.
            changed: When something happened that the answer must know.
            patient: Whether a busy controller is left alone; a command that changes something
            cannot wait.

        Raises:
            LauncherError: Slurm does not answer, or the controller is too busy.
        """
        begun = self._clock()
        oldest = max(begun - max_age_s, changed) if self._file else begun
        state = self._load()
        if state.asked < oldest:
            with self._turn():
                state = self._load()  # another process may have queried meanwhile
                if state.asked < oldest:
                    if patient and self._clock() < state.busy_until:
                        return self._older(state, changed)
                    state = self._ask(state, changed)
        return self._snapshot(state)

    def _ask(self, state: _Known, changed: float) -> _Known:
        asked = self._clock()  # before the question: what happens meanwhile is not in the answer
        try:
            rows = ask_mine(self._command)
        except LauncherError as error:
            if not is_busy(str(error)):
                raise
            first, longest = _PAUSES_S
            state.pause = min(max(state.pause * 2, first), longest)
            state.busy, state.busy_until = str(error), self._clock() + state.pause
            self._save(state)
            raise LauncherError(self._busy(state)) from error
        state.asked, state.rows = asked, rows
        state.busy, state.busy_until, state.pause = "", 0.0, 0.0
        self._save(state)
        return state

    def _older(self, state: _Known, changed: float) -> Snapshot:
        """Return the last answer, if it covers the query."""
        if state.asked < max(changed, self._clock() - _OLDEST_S):
            raise LauncherError(self._busy(state))
        at = time.strftime("%H:%M:%S", time.localtime(state.asked))
        return Snapshot(state.rows, asked=state.asked, note=f"as of {at}, {self._busy(state)}")

    @staticmethod
    def _busy(state: _Known) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(state.busy_until))
        return f"the controller is busy ({state.busy}) and is asked again at {at}"

    def _snapshot(self, state: _Known) -> Snapshot:
        if self._known_as is None or self._known_as[0] != state.asked:
            self._known_as = state.asked, Snapshot(state.rows, asked=state.asked)
        return self._known_as[1]

    def forget(self) -> None:
        """Invalidate the shared snapshot, so that the next query sees this change."""
        with self._turn():
            state = self._load()
            state.asked = 0.0
            self._save(state)

    def others(self, job_ids: Sequence[str]) -> Snapshot:
        """Return jobs of other users.

        Raises:
            LauncherError: nobody answers.
        """
        asked = self._clock()
        return Snapshot(ask_jobs(self._command, job_ids), asked=asked, mine=False)

    def require(self, cluster: str) -> None:
        """Make sure that it is this cluster which answers; another one knows nothing of its jobs.

        Raises:
            LauncherError: another one answers.
        """
        here = self._cluster()
        if here and here != cluster:
            raise LauncherError(
                f"it is of cluster {cluster!r}, and the Slurm that answers here is {here!r}; ask "
                f"on a login node of {cluster!r}, or set SLURM_CONF to its slurm.conf"
            )

    def _cluster(self) -> str:
        state = self._load()
        if not state.cluster or state.cluster_asked < self._clock() - _CLUSTER_S:
            shown = self._command(["scontrol", "show", "config"]).stdout
            name = cluster_name(shown)
            with self._turn():
                state = self._load()
                state.cluster, state.cluster_asked = name, self._clock()
                self._save(state)
        return state.cluster

    def ended(self, job_ids: Iterable[str]) -> dict[str, list[Row]] | None:
        """Return the accounting's rows of jobs that the controller has forgotten, by their id.

        One query for all of them; None at a site without accounting.

        Raises:
            LauncherError: there is one, and it does not answer.
        """
        state, now = self._load(), self._clock()
        if now < state.no_accounting_until:
            return None
        wanted = list(dict.fromkeys(job_ids))
        old = now - _ASK_AGAIN_S
        new = [i for i in wanted if i not in state.ended or not self._final(state.ended[i], old)]
        if new:
            rows = ask_accounting(self._command, new)
            with self._turn():
                state = self._load()
                if rows is None:
                    state.no_accounting_until = now + _CLUSTER_S
                else:
                    by_job: dict[str, list[Row]] = {job_id: [] for job_id in new}
                    for row in rows:
                        by_job.setdefault(row.whole, []).append(row)
                    state.ended |= {job_id: (now, rows) for job_id, rows in by_job.items()}
                    state.ended = dict(list(state.ended.items())[-_MOST_ENDED:])
                self._save(state)
            if rows is None:
                return None
        return {job_id: state.ended[job_id][1] for job_id in wanted if job_id in state.ended}

    @staticmethod
    def _final(answer: tuple[float, list[Row]], old: float) -> bool:
        asked, rows = answer
        return asked > old or (bool(rows) and all(row.state.final for row in rows))

    # ---- The file

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Let one process at a time query Slurm; without a lock all of them do."""
        if self._file is None:
            yield
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            lock = self._file.with_suffix(".lock").open("w", encoding="utf-8")
        except OSError:
            yield
            return
        with lock:
            until = time.monotonic() + _TURN_S
            while time.monotonic() < until:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.02)
                except OSError:
                    break  # a file system without locks
                else:
                    break
            yield

    def _load(self) -> _Known:
        """Read the file; a torn or strange one is none."""
        if self._file is not None:
            self._memory = self._read(self._file)
        # A clock that was set back must not make an answer last.
        return self._memory if self._memory.asked <= self._clock() + 1 else _Known()

    def _read(self, file: Path) -> _Known:
        try:
            if self._stamp == (stamp := _stamp(file)):
                return self._memory
            content = untrusted.mapping(untrusted.read_json(file, limit=_FILE_BYTES))
            if content.pop("version") != _VERSION or content.keys() != {
                f.name for f in fields(_Known)
            }:
                return _Known()
            content["rows"] = [_row(row) for row in content["rows"]]
            content["ended"] = {
                job_id: (_moment(asked), [_row(row) for row in rows])
                for job_id, (asked, rows) in content["ended"].items()
            }
            moments = {f.name: _moment(content[f.name]) for f in fields(_Known) if f.type is float}
            state = _Known(**content | moments)
            if not isinstance(state.cluster, str) or not isinstance(state.busy, str):
                return _Known()
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return _Known()
        self._stamp = stamp
        return state

    def _save(self, state: _Known) -> None:
        """Replace the file whole."""
        self._memory = state
        if self._file is None:
            return
        content = {"version": _VERSION, **vars(state)}
        content["rows"] = [_values(row) for row in state.rows]
        content["ended"] = {
            job_id: (asked, [_values(row) for row in rows])
            for job_id, (asked, rows) in state.ended.items()
        }
        part = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(content), encoding="utf-8")
            part.replace(self._file)
            self._stamp = _stamp(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            self._file = None  # nothing can be shared; from now on every question is asked


def _stamp(path: Path) -> object:
    """Return what changes when a file is replaced."""
    info = path.stat()
    return info.st_ino, info.st_mtime_ns, info.st_size


def _moment(value: Any) -> float:
    """Return seconds since 1970.

    Raises:
        ValueError: the value is none, or none that a clock shows.
    """
    if (seconds := untrusted.finite(value)) is None or not 0 <= seconds < _LAST:
        raise ValueError(value)
    return seconds


def _values(row: Row) -> list[str]:
    return [row.job_id, row.word, row.reason, row.command, row.start]


def _row(values: Sequence[str]) -> Row:
    job_id, word, reason, command, start = map(str, values)
    return Row(job_id=job_id, word=word, reason=reason, command=command, start=start)
