"""Notifications of a run's ends, failures and stalls (`notify` in the job file or the profile).

Each is sent once: the file `notified-EVENT.json` in the attempt's folder can be created only once.
A receiver that fails or hangs costs its timeout and a line on stderr.
"""

import json
import os
import subprocess
import sys
import threading
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

from .evidence.files import open_regular

COMMAND_TIMEOUT_S = 10.0
MOST_TEXT = 1500
"""The maximum size of a text, in bytes."""

_HARMLESS = frozenset(("done", "preempted", "requeued", "walltime", "cancelled", "terminated"))


class Receivers(NamedTuple):
    """The recipients of notifications, and the events that they get."""

    events: Sequence[str] = ()
    """Some of `end`, `requeue`, `failure` and `stall`."""
    webhook: str = ""
    webhook_file: str = ""
    """A file that contains the webhook address."""
    variable: str = ""
    """The environment variable that contains the webhook address."""
    command: str = ""
    """A shell command that gets the message on stdin and its text in NOTIFY_TEXT."""
    secrets: Sequence[str] = ()
    """Environment variables with values that must be masked in every text."""

    @property
    def has_webhook(self) -> bool:
        """Whether messages are posted to a webhook."""
        return bool(self.webhook or self.webhook_file or self.variable)


class Event(NamedTuple):
    """An event to report."""

    name: str
    """`end`, `requeue` or `stall`."""
    word: str
    """The status word of the attempt; empty for a stall."""
    text: str
    attempt: int
    tries: int = 3


class Notifier:
    """Sends the notifications of one run."""

    def __init__(self, receivers: Receivers, job: str, run_dir: str) -> None:
        self.receivers, self.job, self.run_dir = receivers, job, run_dir
        if receivers.has_webhook:
            from . import webhook  # noqa: F401  # later, this program's file may be gone

    def tell(self, claim: str, event: Event) -> None:
        """Send an event, if a recipient wants it and nobody has sent it yet.

        `claim` is the path prefix of the file that can be created only once.
        """
        failed = event.name != "stall" and event.word not in _HARMLESS
        wanted = {event.name, "failure"} if failed else {event.name}
        path = f"{claim}-{event.name}.json"
        if not wanted & set(self.receivers.events) or event.word == "fenced" or not _claimed(path):
            return
        about = f"{os.path.basename(self.run_dir)}: attempt {event.attempt} {event.text}"
        text = printable(masked(about, self.receivers.secrets, os.environ))
        content: Dict[str, Any] = {
            "event": event.name,
            "failed": failed,
            "job": self.job,
            "run_dir": printable(self.run_dir),
            "attempt": event.attempt,
            "text": text,
            "content": text,
        }
        try:
            with open(path, "w", encoding="ascii") as file:
                file.write(json.dumps(content) + "\n")
        except OSError:
            pass  # the disk may be full
        send(self.receivers, content, event.tries, said_by=f"{self.job}: ")


def _claimed(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError:
        return False
    return True


def printable(text: str) -> str:
    """Return a text in printable ASCII, which every receiver accepts, cut to the maximum size."""
    data = text.encode("utf-8", "surrogateescape")
    return "".join(chr(byte) if 32 <= byte <= 126 else "?" for byte in data)[:MOST_TEXT]


def masked(text: str, secrets: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return a text with the values of secrets replaced by ***NAME***."""
    for name in secrets:
        value = environ.get(name, "")
        if len(value) > 3:
            text = text.replace(value, f"***{name}***")
    return text


# ---- The receivers


def send(receivers: Receivers, content: Mapping[str, Any], tries: int, said_by: str = "") -> None:
    """Send a message to the webhook and to the command."""
    body = json.dumps(content).encode()
    if receivers.has_webhook:
        from . import webhook  # its modules load slower than all others

        address = _address(receivers)
        answers: List[str] = []
        sender = threading.Thread(
            target=lambda: answers.append(webhook.post(address, body, tries)), daemon=True
        )
        sender.start()
        sender.join(
            tries * (webhook.TIMEOUT_S + 1)
        )  # the timeout of urllib restarts with each byte
        why = answers[0] if answers else f"{webhook.host_of(address)} gives no answer"
        if why:
            _complain(said_by, "webhook", why)
    if receivers.command:
        environ = {**os.environ, "NOTIFY_TEXT": str(content["text"])}
        why = _call(receivers.command, body + b"\n", environ)
        if why:
            _complain(said_by, "command", why)


def _call(command: str, body: bytes, environ: Mapping[str, str]) -> str:
    try:
        subprocess.run(
            ["sh", "-c", command],
            input=body,
            env=dict(environ),
            stdout=2,
            timeout=COMMAND_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {COMMAND_TIMEOUT_S:g} s"
    except (OSError, subprocess.SubprocessError) as error:
        status = getattr(error, "returncode", None)
        return f"exit status {status}" if status else "it cannot be started"
    return ""


def _address(receivers: Receivers) -> str:
    if receivers.webhook_file:
        try:
            with open_regular(os.path.expanduser(receivers.webhook_file)) as file:
                return file.read(4096).decode("utf-8").strip()
        except (OSError, ValueError):
            return ""
    return os.environ.get(receivers.variable, "") if receivers.variable else receivers.webhook


def _complain(said_by: str, who: str, why: str) -> None:
    print(f"{said_by}the {who} of 'notify' has failed: {why}", file=sys.stderr, flush=True)
