"""The files of a call in its run directory: arguments in, results out. The same on every site.

docs/reference/run-directory.md describes them; worker.py reads and writes them on the ranks.
"""

import json
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
from submitit.core.utils import DelayedSubmission

from toolkit.errors import LauncherError
from toolkit.job.spec import JobSpec
from toolkit.job.types import IN_RUN_DIR
from toolkit.runs.records import run_directory
from toolkit.runs.records.log_reader import attempt_numbers, modified_at
from toolkit.supervisor.evidence.echoes import ECHOES, NO_ECHOES
from toolkit.text import untrusted

FOLDER = "function"
_VERSION = 1
_ERROR = re.compile(r"rank-[0-9]{1,9}\.error\.json", re.ASCII)

SCRIPT = f"{IN_RUN_DIR}{FOLDER}/worker.py"
"""The script that torchrun starts."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The failure of a rank."""

    rank: int
    host: str
    time: float
    """When it failed, in seconds since 1970."""

    echo: bool
    """Whether it only reports the loss of another rank, or a failed rendezvous."""

    trace: str


def files_of(job: JobSpec, call: DelayedSubmission) -> dict[str, bytes]:
    """Return the files that a run directory must hold before its job starts, by path."""
    need = job.resources
    facts = {
        "version": _VERSION,
        "ranks": need.max_nodes * need.nproc_per_node,
        "gpus_per_node": need.gpus_per_node,
        "restarts": job.retries.in_job,
        "python": "{}.{}".format(*sys.version_info),
        "echoes": ("|".join(ECHOES), NO_ECHOES),
    }
    return {
        f"{FOLDER}/call.json": json.dumps(facts).encode(),
        f"{FOLDER}/call.pkl": cloudpickle.dumps((call.function, call.args, call.kwargs)),
        SCRIPT.removeprefix(IN_RUN_DIR): Path(__file__).with_name("worker.py").read_bytes(),
    }


class SubmittedCall:
    """The files of a submitted call in its run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / FOLDER
        try:
            facts = untrusted.mapping(untrusted.read_json(self.folder / "call.json", below=run_dir))
        except (OSError, ValueError) as error:
            raise LauncherError(f"{self.folder / 'call.json'} cannot be read: {error}") from error
        ranks, restarts = (untrusted.whole(facts.get(key)) for key in ("ranks", "restarts"))
        if not ranks or restarts is None:
            raise LauncherError(f"{self.folder / 'call.json'} does not describe a call")
        self.ranks: int = ranks
        self._restarts: int = restarts

    @staticmethod
    def is_in(run_dir: Path | None) -> bool:
        """Whether a run directory belongs to a call."""
        return run_dir is not None and (run_dir / FOLDER / "call.json").is_file()

    @property
    def submitted(self) -> Path:
        """The function and its arguments, pickled."""
        return self.folder / "call.pkl"

    def parts(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function and its arguments.

        Raises:
            LauncherError: others may have written them.
        """
        self.require_own(self.submitted)
        function, args, kwargs = pickle.loads(
            untrusted.read_bytes(self.submitted, limit=sys.maxsize)
        )
        return function, args, kwargs

    def require_own(self, path: Path) -> None:
        """Make sure that only this user can have written a file that is unpickled, which runs code.

        Raises:
            LauncherError: the file, or a folder of the run above it, can be written by others.
        """
        base = self.run_dir
        for part in (path, *(above for above in path.parents if above.is_relative_to(base))):
            run_directory.require_own(part)

    @property
    def attempt(self) -> int:
        """The newest attempt; 0 before the first."""
        return max(attempt_numbers(self.run_dir), default=0)

    def outcome(self) -> str:
        """Return the final status of the newest attempt, `done` or `fatal`; else "".

        An outcome after which the run may continue is not final; only the scheduler knows its end.
        """
        outcome = run_directory.outcome(self.run_dir) or {}
        if outcome.get("attempt") != self.attempt or self._is_resubmitted():
            return ""
        status = outcome.get("status")
        restart = untrusted.whole(outcome.get("restart")) or 0
        if status == "fatal" and restart < self._restarts:
            return ""
        return str(status) if status in ("done", "fatal") else ""

    def _is_resubmitted(self) -> bool:
        """Whether a job was submitted after the outcome: `toolkit.resubmit`."""
        written = modified_at(self.run_dir / "outcome.json")
        lists = (folder / "jobs.jsonl" for folder in (self.run_dir, self.run_dir.parent))
        return any(modified_at(path) > written for path in lists)

    def result(self, rank: int) -> Path:
        """Return the path of a rank's result."""
        return self.folder / f"attempt-{self.attempt}" / f"rank-{rank}.pkl"

    def error(self, rank: int) -> Path:
        """Return the path of a rank's failure."""
        return self.result(rank).with_suffix(".error.json")

    def failures(self) -> list[RankFailure]:
        """Return the failures of ranks in the newest attempt, the cause first."""
        folder = self.folder / f"attempt-{self.attempt}"
        failures = []
        for entry in untrusted.entries(folder, below=self.run_dir):
            if not _ERROR.fullmatch(entry.name):
                continue
            try:
                content = untrusted.read_json(folder / entry.name, below=self.run_dir)
            except (OSError, ValueError):
                continue
            message = untrusted.mapping(untrusted.mapping(content).get("message"))
            extra = untrusted.mapping(message.get("extraInfo"))
            rank, time = untrusted.whole(extra.get("rank")), untrusted.finite(extra.get("time"))
            if rank is None or time is None:
                continue
            failures.append(
                RankFailure(
                    rank=rank,
                    host=str(extra.get("host") or ""),
                    time=time,
                    echo=extra.get("echo") is True,
                    trace=str(extra.get("py_callstack") or ""),
                )
            )
        return sorted(failures, key=lambda failure: (failure.echo, failure.time))

    def streams(self, rank: int, name: str) -> list[Path]:
        """Return the files of a rank's `stdout` or `stderr`, one for each attempt."""
        folders = [self.folder / f"attempt-{n}" / f"logs-{rank}" for n in range(self.attempt + 1)]
        files = (folder / f"{name}.log" for folder in folders)
        return [path for path in files if path.is_file()]
