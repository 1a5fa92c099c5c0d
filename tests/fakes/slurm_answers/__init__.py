"""Recorded answers of real Slurms: the text that the toolkit reads, and the JSON of the same
moment.

`python -m tests.fakes.slurm_answers` on the login node of a sandbox with accounting records anew:

    slurm/sandbox/sandbox fetch forky .cache/slurm-forky
    slurm/sandbox/sandbox up --nodes 2 --accounting --slurm .cache/slurm-forky
    eval "$(slurm/sandbox/sandbox env)"; .venv/bin/python -m tests.fakes.slurm_answers
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

__all__ = ["FOLDER", "RecordedJob", "Recording", "job_of_sacct", "job_of_squeue"]

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class RecordedJob:
    """A job as in Slurm's JSON, in one form for all versions."""

    job_id: str
    """`1234`, or `1234_7`."""

    words: frozenset[str]
    """Its states: one, and from 23.02 on flags such as COMPLETING beside it."""

    reason: str
    """Why the job waits or has ended; empty for none."""

    start: str
    """The actual or expected start, in the time zone of this machine; empty if unknown."""

    status: tuple[int, int] = (0, 0)
    """Exit status and signal; only from the accounting."""


class Recording:
    """The answers of one Slurm, by command."""

    def __init__(self, path: Path) -> None:
        self._recording: Mapping[str, Any] = json.loads(path.read_text())
        self.version = path.stem

    @property
    def jobs(self) -> Mapping[str, str]:
        """The id of each job, by its fate."""
        return dict(self._recording["jobs"])

    @property
    def queue(self) -> list[RecordedJob]:
        """The jobs of squeue's JSON."""
        return [job_of_squeue(job) for job in self._recording["squeue"]]

    @property
    def accounting(self) -> list[RecordedJob]:
        """The jobs of sacct's JSON."""
        return [job_of_sacct(job) for job in self._recording["sacct"]]

    def command(self, argv: Sequence[str]) -> "CompletedProcess[str]":
        """Answer as that Slurm did.

        Raises:
            LookupError: no answer to this command was recorded; record again.
        """
        asked = " ".join(argv)
        for question, answer in self._recording["answers"]:
            if question == asked:
                return CompletedProcess(list(argv), 0, answer, "")
        raise LookupError(f"no answer of Slurm {self.version} to `{asked}`; {__doc__}")


def job_of_squeue(job: Mapping[str, Any]) -> RecordedJob:
    """Read a job of `squeue --json` of any version."""
    reason = job["state_reason"]
    return RecordedJob(
        job_id=_job_id(_number(job["job_id"]), job["array_job_id"], job["array_task_id"]),
        words=_words(job["job_state"]),
        reason="" if reason == "None" else reason,
        start=_time(_number(job["start_time"])),
    )


def job_of_sacct(job: Mapping[str, Any]) -> RecordedJob:
    """Read a job of `sacct --json` of any version."""
    array, ended = job["array"], job["exit_code"]
    signal = ended.get("signal") or {}  # 22.05 has none where no signal came
    number = _number(signal.get("id", signal.get("signal_id", 0)))
    return RecordedJob(
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
    return datetime.fromtimestamp(epoch).astimezone().isoformat() if epoch else ""
