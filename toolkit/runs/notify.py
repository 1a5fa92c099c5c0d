"""Notifications of the ends that a run's own script could not send.

A script sends its notifications itself (templates/common/notify.sh.j2). For a script that was
killed, with its node for example, `wait` sends the last one. The file `notified-end.json` in the
attempt's folder can be made only once: the process that makes it sends the notification.
"""

import contextlib
import errno
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolkit.job.spec import Notify
from toolkit.runs.log_reader import attempt_folders
from toolkit.runs.registry import RunRecord
from toolkit.runs.restarts import in_words, restarts_in
from toolkit.runs.run_secrets import mask_of
from toolkit.runs.state import RunState, RunStatus
from toolkit.text import untrusted

_TRIES, _TIMEOUT_S, _COMMAND_TIMEOUT_S = 3, 5.0, 10.0
_TEXT = 1500
"""The most characters of the text, as in the scripts."""


def tell_end(record: RunRecord, status: RunStatus) -> None:
    """Send the notification of a run's end, unless the file says that it was sent.

    Without a run directory on this machine, nothing is sent. A receiver that fails or hangs costs
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
    text = "".join(c if " " <= c <= "~" else "?" for c in text)[:_TEXT]
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
    """Make the file of the notification; return whether this process has made it."""
    text = f"{json.dumps(content)}\n"
    try:
        untrusted.write_bytes(attempt / "notified-end.json", text.encode(), anew=True)
    except OSError as error:
        return error.errno == errno.ENOSPC  # the file is made, and empty
    return True


def _send(notify: Notify, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    if notify.webhook or notify.webhook_file:
        try:
            url = _address(notify)
        except (OSError, ValueError):
            url = ""
        answers: list[str] = []
        sender = threading.Thread(target=lambda: answers.append(_post(url, body)), daemon=True)
        sender.start()
        sender.join(_TRIES * (_TIMEOUT_S + 1))  # the time-out of urllib counts anew for each byte
        if why := answers[0] if answers else f"{_host(url)} gives no answer":
            _complain("webhook", why)
    if notify.command:
        environ = {**os.environ, "NOTIFY_TEXT": str(content["text"])}
        argv = ["sh", "-c", notify.command]
        try:
            subprocess.run(
                argv, input=body, env=environ, stdout=2, timeout=_COMMAND_TIMEOUT_S, check=True
            )
        except subprocess.TimeoutExpired:
            _complain("command", f"it takes more than {_COMMAND_TIMEOUT_S:g} s")
        except (OSError, subprocess.SubprocessError) as error:
            status = getattr(error, "returncode", None)
            _complain("command", f"exit status {status}" if status else "it cannot be started")


def _address(notify: Notify) -> str:
    if notify.webhook_file:
        return untrusted.read_text(Path(notify.webhook_file).expanduser()).strip()
    return os.environ.get(notify.variable, "") if notify.variable else str(notify.webhook)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows none: it would pass the request, without its body, to any other address."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, body: bytes) -> str:
    """Send the body and return why it was not delivered; empty if it was."""
    if not (host := _host(url)):
        return "it has no address that begins with http:// or https://"
    send = urllib.request.build_opener(_Redirects).open
    why = ""
    for _ in range(_TRIES):
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            send(request, timeout=_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            error.close()
            why = f"{host} answers {error.code}"
            if 300 <= error.code < 400:
                return f"{why}, a redirect, which is not followed; set the address it redirects to"
            if error.code < 500 and error.code != 429:
                return why
        except OSError:
            why = f"{host} gives no answer"
        except (ValueError, http.client.HTTPException):
            return f"{host} gives no answer of HTTP, or the address is malformed"
        else:
            return ""
        time.sleep(1)
    return why


def _host(url: str) -> str:
    """Return the host of an address, which may be shown: the path is often a secret.

    >>> _host("https://user:word@hooks.example.org/s3cret"), _host("s3cret")
    ('hooks.example.org', '')
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return ""
    return host if parts.scheme in ("http", "https") and host.isprintable() else ""


def _complain(who: str, why: str) -> None:
    print(f"the {who} of 'notify' has failed: {why}", file=sys.stderr)
