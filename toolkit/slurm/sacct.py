"""Rows of sacct, for jobs that the controller has forgotten, at sites with accounting."""

import re
from collections.abc import Iterator, Sequence

from toolkit.errors import LauncherError
from toolkit.slurm.squeue import Command, Row, first_line

__all__ = ["ask_accounting"]

_FIELDS = "JobID,State,ExitCode,SubmitLine"
_ROW = re.compile(r"(\d{1,18}[\w,%\[\].+-]{0,4000})\|([A-Z_]+)[^|]*\|(\d+):(\d+)\|(.*)")
"""`CANCELLED by 0` is CANCELLED; what people write comes last, and may hold newlines."""

_NONE = re.compile("accounting storage is disabled|not running a supported accounting_storage")
_JOBS_PER_QUESTION = 5000
"""The kernel takes no argument above 128 KiB."""


def ask_accounting(command: Command, job_ids: Sequence[str]) -> list[Row] | None:
    """Return sacct's rows of these jobs, one for each task of an array; None without one.

    Raises:
        LauncherError: it does not answer now, but may later.
    """
    rows: list[Row] = []
    for start in range(0, len(job_ids), _JOBS_PER_QUESTION):
        wanted = ",".join(job_ids[start : start + _JOBS_PER_QUESTION])
        done = command(["sacct", "-n", "-P", "-X", "-j", wanted, "-o", _FIELDS])
        if done.returncode != 0:
            if _NONE.search(done.stderr + done.stdout):
                return None
            raise LauncherError(f"the accounting does not answer: {first_line(done.stderr)}")
        rows += _rows(done.stdout)
    return rows


def _rows(text: str) -> Iterator[Row]:
    for line in text.split("\n"):
        if match := _ROW.fullmatch(line):
            job_id, word, status, signal, argv = match.groups()
            # sacct before 26.05 keeps seven bits of a status: 0 says nothing of a failure.
            how = f", exit status {status}" * (status != "0")
            how += f", signal {signal}" * (signal != "0")
            reason = "" if word == "COMPLETED" else f"the accounting says {word}{how}"
            yield Row(job_id=job_id, word=word, reason=reason, command=argv)
