"""Notifications of a run's end that its script could not send.

A script sends its notifications itself (toolkit/supervisor/notify.py). If the script was killed,
for example with its node, `wait` sends the last one. The file `notified-end.json` in the attempt's
folder can be created only once: the process that creates it sends the notification.
"""

import contextlib
import errno
import json
from pathlib import Path
from typing import Any

from toolkit.job.spec import Notify
from toolkit.runs.evidence.restarts import in_words, restarts_in
from toolkit.runs.records.log_reader import attempt_folders
from toolkit.runs.records.registry import RunRecord
from toolkit.runs.records.run_secrets import mask_of
from toolkit.runs.state import RunState, RunStatus
from toolkit.supervisor.notify import Receivers, printable, send
from toolkit.text import untrusted

_TRIES = 3


def tell_end(record: RunRecord, status: RunStatus) -> None:
    """Send the notification of a run's end, unless it was sent according to the file.

    Without a run directory on this machine, nothing is sent. A recipient that fails or hangs costs
    its time-out and a line on standard error.
    """
    asked = record.profile.get("notify")
    if not (record.believed and asked and status.state.final and record.run_dir):
        return
    with contextlib.suppress(ValueError):  # of another version of the toolkit
        notify = Notify.model_validate(asked)
        failed = status.state is RunState.FAILED
        wanted = "end" in notify.events or (failed and "failure" in notify.events)
        if wanted and (attempts := attempt_folders(record.run_dir)):
            content = _content(record, attempts[-1], status, failed=failed)
            if not record.remote_dir and _claim(attempts[-1], content):
                _send(notify, content)


def _content(
    record: RunRecord, attempt: Path, status: RunStatus, *, failed: bool
) -> dict[str, Any]:
    number = int(attempt.name.rpartition("-")[2])
    mask, after = mask_of(record.run_dir), ""
    if status.state is RunState.SUCCEEDED and record.run_dir:
        after = in_words(restarts_in(record.run_dir))
    reason = mask.hide(status.reason or status.state.lower())
    text = f"{record.name}: attempt {number} ended: {reason}"
    text += f", after {mask.hide(after)}" if after else ""
    text = printable(text)
    return {
        "event": "end",
        "failed": failed,
        "job": record.job,
        "run_dir": str(record.run_dir),
        "attempt": number,
        "text": text,
        "content": text,
    }


def _claim(attempt: Path, content: dict[str, Any]) -> bool:
    """Create the notification's file; return whether this process has created it."""
    text = f"{json.dumps(content)}\n"
    try:
        untrusted.write_bytes(attempt / "notified-end.json", text.encode(), anew=True)
    except OSError as error:
        return error.errno == errno.ENOSPC  # the file is made, and empty
    return True


def _send(notify: Notify, content: dict[str, Any]) -> None:
    receivers = Receivers(
        webhook=str(notify.webhook or ""),
        webhook_file=notify.webhook_file or "",
        variable=notify.variable or "",
        command=notify.command or "",
    )
    send(receivers, content, tries=_TRIES)
