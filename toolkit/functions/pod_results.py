"""Prints each rank's result into the pod's log, because the client cannot read the pod's disk.

The executor puts this file beside worker.py, and the pod's supervisor runs it when torchrun has
ended. It imports nothing of the toolkit.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "@torch-deploy-toolkit"
CHUNK = 9_000
"""Bytes of a file in one line, 12,000 characters: container runtimes break lines at 16 KiB."""
LIMIT = 4 * 2**20
"""Bytes of the largest file."""
POD_LIMIT = 6 * 2**20
"""Bytes of all files of a pod, 8 MiB of characters: a node keeps 10 MiB of a container's log."""
LONGEST = 50_000
"""Maximum lengths in characters of an error message and of its traceback (the tail is kept)."""
ECHO_WAIT_S = 5
"""How long a pod waits whose ranks only report the loss of another rank: the first pod that fails
may end all others and their logs, and it should be the one with the cause."""


def lines_of(name: str, content: bytes, room: int = LIMIT, *, key: str) -> Iterator[str]:
    """Yield the lines that hold a file: its name, `PART/PARTS`, its digest, the bytes in base 64.

    For a file larger than LIMIT or `room`, one line holds its size. Each line ends with an
    HMAC-SHA256, which distinguishes it from the ranks' output.

    Args:
        name: The name of the file.
        content: Its bytes.
        room: How many bytes the log has room for.
        key: The key of the run in hexadecimal; call.json holds it.
    """
    if len(content) > min(LIMIT, room):
        yield _signed(f"{name} too-large {len(content)}", key)
        return
    digest = hashlib.sha256(content).hexdigest()
    chunks = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)] or [b""]
    for number, chunk in enumerate(chunks, 1):
        part = base64.b64encode(chunk).decode()
        yield _signed(f"{name} {number}/{len(chunks)} {digest} {part}", key)


def _signed(text: str, key: str) -> str:
    code = hmac.new(bytes.fromhex(key), text.encode(), hashlib.sha256).hexdigest()
    return f"{MARK} {text} {code}"


def left_here(run_dir: Path, host: str, attempt: int) -> Iterator[tuple[str, bytes]]:
    """Yield the files of the ranks whose logs are on this host."""
    folder = run_dir / "function" / f"attempt-{attempt}"
    ranks = [
        link.name.removeprefix("logs-")
        for link in sorted(folder.glob("logs-*"))
        if link.is_symlink() and host in link.readlink().parts
    ]
    # Failures first: there is always room for them.
    names = [f"rank-{rank}.{kind}" for kind in ("error.json", "pkl") for rank in ranks]
    for path in [run_dir / "outcome.json", *(folder / name for name in names)]:
        if path.is_file():
            content = path.read_bytes()
            error = path.name.endswith(".error.json")
            yield str(path.relative_to(run_dir)), shortened(content) if error else content


def shortened(content: bytes) -> bytes:
    """Return a rank's failure with the message and traceback cut to a length that people read."""
    failure = json.loads(content)
    message, extra = failure["message"], failure["message"]["extraInfo"]
    message["message"] = message["message"][:LONGEST]
    extra["py_callstack"] = extra["py_callstack"][-LONGEST:]
    return json.dumps(failure).encode()


def main() -> int:
    """Print the files, and then the failures again, since Kubernetes keeps the end of a log."""
    attempt = int(os.environ.get("TRAIN_ATTEMPT") or 0)
    run_dir, host = Path(os.environ["TRAIN_RUN_DIR"]), os.environ["HOSTNAME"]
    key = json.loads(Path(__file__).with_name("call.json").read_text(encoding="utf-8"))["key"]
    failures, room = [], POD_LIMIT
    for name, content in left_here(run_dir, host, attempt):
        for line in lines_of(name, content, room, key=key):
            print(line)
        room -= len(content) if len(content) <= min(LIMIT, room) else 0
        if name.endswith(".error.json"):
            failures.append(json.loads(content)["message"])
    for failure in failures:
        print(f"[rank {failure['extraInfo']['rank']}] {failure['message']}")
    sys.stdout.flush()
    if failures and all(failure["extraInfo"]["echo"] for failure in failures):
        time.sleep(ECHO_WAIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
