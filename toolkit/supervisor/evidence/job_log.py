"""The output of srun, slurmstepd and torchrun in the log of a Slurm job."""

import os
import re
from typing import Iterable, List, Optional

from .files import TAIL_BYTES, last_lines, open_regular
from .torchrun_report import LINE

_MOST_LINES = 30000
"""Maximum number of relevant lines: enough for the reports of some thousand ranks."""

_BEGINNINGS = (b"slurmstepd", b"srun: ", b"Root Cause", b" ")
_ANYWHERE = re.compile(rb"oom[-_]kill event|Step[^ ]* exceeded memory limit \([0-9]+ > [0-9]+\)")
_RANK_FAILED = b"failed (exitcode: "


class JobLog:
    """The relevant lines of one attempt. Each byte is read once."""

    def __init__(self, path: str, begin: int, end: Optional[int] = None) -> None:
        self.path, self.begin, self.end = path, begin, end
        self.lines: List[str] = []
        self.failed_starts = 0
        """How often a torchrun has logged that its ranks failed."""
        self._next = begin

    def read_on(self) -> List[str]:
        """Read new lines; return all relevant lines. The last line may be unfinished."""
        unfinished = ""
        try:
            with open_regular(self.path) as file:
                file.seek(self._next)
                for line in iter(lambda: file.readline(TAIL_BYTES), b""):
                    if self.end is not None and self._next >= self.end:
                        break
                    if line[-1:] != b"\n" and len(line) < TAIL_BYTES:
                        unfinished = _text(line) if _counts(line) else ""
                        break
                    self._next += len(line)
                    self.failed_starts += _RANK_FAILED in line
                    if _counts(line):
                        self._keep(_text(line))
        except OSError:
            pass
        return [*self.lines, unfinished] if unfinished else self.lines

    def tail(self) -> List[str]:
        """Return the last lines of the attempt, relevant or not."""
        size = os.path.getsize(self.path) if os.path.isfile(self.path) else 0
        end = size if self.end is None else min(size, self.end)
        return last_lines(self.path, min(TAIL_BYTES, max(end - self.begin, 0)), end)

    def _keep(self, line: str) -> None:
        if len(self.lines) >= _MOST_LINES:
            del self.lines[_MOST_LINES // 2]  # the first and the last lines matter most
        self.lines.append(line)


def _counts(line: bytes) -> bool:
    if line.startswith(_BEGINNINGS) and (line[:1] != b" " or LINE.match(line)):
        return True
    rare = b"oom" in line or b"exceeded" in line
    return rare and _ANYWHERE.search(line) is not None


def _text(line: bytes) -> str:
    return line.decode("latin-1").rstrip("\r\n")


# ---- Information in the lines


def _found(pattern: str, lines: Iterable[str]) -> List[str]:
    matches = (re.search(pattern, line) for line in lines)
    return [next(filter(None, match.groups()), "") for match in matches if match]


def cause_of_end(lines: Iterable[str]) -> str:
    """Return why Slurm has ended the job: `JOB` (a requeue), `NODE`, `PREEMPTION`, `TIME` or "".

    slurmstepd logs the reason. If the job got a signal earlier, slurmstepd also logged that.
    """
    pattern = (
        r"^slurmstepd[^ ]*: error: \*\*\* "
        r"(?:JOB .* DUE TO ([A-Z]+)|STEP .* DUE TO (JOB|PREEMPTION))"
    )
    return (_found(pattern, lines) or [""])[-1]


def failed_nodes(lines: Iterable[str]) -> List[str]:
    """Return the nodes that Slurm has lost; srun reports each one."""
    return sorted(set(_found("^srun: error: Node failure on ([^ ]+)$", lines)))


def nodes_without_launch(lines: Iterable[str]) -> List[str]:
    """Return the nodes on which srun could not start a task, if srun names them."""
    return _found("Task launch for .* failed on node ([^ :]+):", lines)


def credential_expired(lines: Iterable[str]) -> bool:
    """Whether a node refused a request to start a task: too old, or too soon after another.

    For `cred_expire` seconds, a node refuses the job id of a step that ended there.
    """
    return bool(_found("^srun: .*(Job credential) (?:expired|revoked)", lines))


def step_was_stopped(lines: Iterable[str]) -> bool:
    """Whether the step got a signal before a task ended, by the order of the lines."""
    stopped = r"^slurmstepd[^ ]*: error: (\*\*\*) STEP .* CANCELLED AT "
    first = _found(stopped + "|^srun: error: [^ ]+: (tasks?) ", lines)[:1]
    return first == ["***"]


def memory_exceeded(lines: Iterable[str]) -> Optional[str]:
    """Return Slurm's out-of-memory message: with figures, or ""; None without one."""
    exceeded = _found(r"(Step[^ ]* exceeded memory limit \([0-9]+ > [0-9]+\))", lines)
    return exceeded[0] if exceeded else "" if _found("oom[-_]kill event()", lines) else None


def prolog_failed(lines: Iterable[str]) -> str:
    """Return the failed prolog of the site, and its node."""
    for line in lines:
        found = re.match("slurmstepd-?([^:]*): error: (TaskProlog failed.*)", line)
        if found:
            return f"{found.group(2)} on {found.group(1)}"
    return ""


def srun_error(lines: Iterable[str]) -> str:
    """Return the first error of srun."""
    return (_found("^srun: (?:error|fatal): (.*)", lines) or [""])[0]
