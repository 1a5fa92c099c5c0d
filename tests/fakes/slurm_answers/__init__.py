"""What real Slurms said, in two tongues: the text that the toolkit reads, and their own JSON.

`python -m tests.fakes.slurm_answers` on the login node of a sandbox with accounting records anew:

    slurm/sandbox/sandbox fetch forky .cache/slurm-forky
    slurm/sandbox/sandbox up --nodes 2 --accounting --slurm .cache/slurm-forky
    eval "$(slurm/sandbox/sandbox env)"; .venv/bin/python -m tests.fakes.slurm_answers
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

__all__ = ["FOLDER", "Recording", "Said", "said_by_accounting", "said_by_queue"]

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Said:
    """What the JSON of a Slurm says of a job, without its version's accent."""

    job_id: str
    """`1234`, or `1234_7`."""

    words: frozenset[str]
    """Its states: one, and from 23.02 on flags such as COMPLETING beside it."""

    reason: str
    """Why it waits or has ended; empty for none."""

    start: str
    """When it has started or is expected to, in UTC; empty for unknown."""

    status: tuple[int, int] = (0, 0)
    """Exit status and signal; of the accounting only."""


class Recording:
    """The answers of one Slurm, by what it was asked."""

    def __init__(self, path: Path) -> None:
        self._known: Mapping[str, Any] = json.loads(path.read_text())
        self.version = path.stem

    @property
    def jobs(self) -> Mapping[str, str]:
        """The id of each job, by what happened to it."""
        return dict(self._known["jobs"])

    @property
    def queue(self) -> list[Said]:
        """What squeue's JSON says."""
        return [said_by_queue(job) for job in self._known["squeue"]]

    @property
    def accounting(self) -> list[Said]:
        """What sacct's JSON says."""
        return [said_by_accounting(job) for job in self._known["sacct"]]

    def command(self, argv: Sequence[str]) -> "CompletedProcess[str]":
        """Answer as that Slurm did.

        Raises:
            LookupError: it was not asked this; record again.
        """
        asked = " ".join(argv)
        for question, answer in self._known["answers"]:
            if question == asked:
                return CompletedProcess(list(argv), 0, answer, "")
        raise LookupError(f"nobody has asked Slurm {self.version} `{asked}`; {__doc__}")


def said_by_queue(job: Mapping[str, Any]) -> Said:
    """Read a job of `squeue --json`, of whatever version."""
    reason = job["state_reason"]
    return Said(
        job_id=_job_id(_number(job["job_id"]), job["array_job_id"], job["array_task_id"]),
        words=_words(job["job_state"]),
        reason="" if reason == "None" else reason,
        start=_time(_number(job["start_time"])),
    )


def said_by_accounting(job: Mapping[str, Any]) -> Said:
    """Read a job of `sacct --json`, of whatever version."""
    array, ended = job["array"], job["exit_code"]
    signal = ended.get("signal") or {}  # 22.05 has none where no signal came
    number = _number(signal.get("id", signal.get("signal_id", 0)))
    return Said(
        job_id=_job_id(
            _number(job["job_id"]), array["job_id"], array.get("task_id", array.get("task"))
        ),
        words=_words(job["state"]["current"]),
        reason="",
        start=_time(_number(job["time"]["start"])),
        status=(_number(ended["return_code"]) or 0, number or 0),
    )


def _job_id(own: int | None, array: Any, task: Any) -> str:
    whole, part = _number(array), _number(task)
    return f"{whole}_{part}" if whole and part is not None else str(own)


def _number(value: Any) -> int | None:
    """Read a number, which is plain before 23.02 and `{set, infinite, number}` from then on."""
    if isinstance(value, Mapping):
        return int(value["number"]) if value["set"] else None
    return None if value is None else int(value)


def _words(value: Any) -> frozenset[str]:
    return frozenset([value] if isinstance(value, str) else value)


def _time(epoch: int | None) -> str:
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%S") if epoch else ""
