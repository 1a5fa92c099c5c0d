"""Commands with limits: on the bytes of their output, and on the seconds of a query.

A scheduler that hangs, or a login node that prints without end, becomes an error. It fills no
memory and blocks no caller.
"""

import contextlib
import math
import os
import selectors
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

from toolkit.errors import LauncherError

ANSWER_BYTES = 64 << 20
"""How much a command may print: squeue's rows of a hundred thousand jobs."""

ANSWER_S = 90.0
"""How long a question may take; squeue itself gives up on its controller sooner."""

ACTION_S = 600.0
"""How long a login node may take for what changes something there, like an sbatch that waits for
its controller."""

TRANSFER_S = 3600.0
"""How long files may be on their way to a login node, or back."""

_CHUNK = 1 << 16


class TooLong(LauncherError):
    """A command gave no end of an answer: it was ended."""


def run(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    environ: Mapping[str, str] | None = None,
    limit_s: float = math.inf,
    limit_bytes: int = ANSWER_BYTES,
) -> "subprocess.CompletedProcess[str]":
    """Run a command and return its output; bytes that are not UTF-8 become U+FFFD.

    Raises:
        TooLong: it has taken longer than `limit_s`, or printed more than `limit_bytes`.
    """
    deadline = time.monotonic() + limit_s
    # stderr goes to a file: what ssh leaves in the background keeps it, and would keep a pipe open.
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environ
        ) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        writer = threading.Thread(target=_write, args=(process, stdin), daemon=True)
        writer.start()
        output = bytearray()
        try:
            while True:
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                if selector.select(min(1.0, left_s)):
                    if not (chunk := os.read(process.stdout.fileno(), _CHUNK)):
                        break
                    output += chunk
                if len(output) + os.fstat(errors.fileno()).st_size > limit_bytes:
                    raise TooLong(f"{argv[0]} prints more than {limit_bytes >> 20} MiB: ended")
            process.wait(None if math.isinf(deadline) else max(0.0, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            process.kill()
            raise TooLong(f"{argv[0]} gives no answer within {limit_s:g} s: ended") from None
        except BaseException:
            process.kill()
            raise
        finally:
            # The process may still be writing when its output is closed.
            writer.join(timeout=1.0)
        errors.seek(0)
        printed = (bytes(output), errors.read(limit_bytes))
    stdout, stderr = (text.decode(errors="replace") for text in printed)
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


def _write(process: "subprocess.Popen[bytes]", stdin: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # it may end before it has read all
        process.stdin.write(stdin)
    with contextlib.suppress(OSError):
        process.stdin.close()


def only_asks(argv: Sequence[str]) -> bool:
    """Whether a command changes nothing, so that it can be ended and run again.

    >>> only_asks(["squeue", "--me"]), only_asks(["sbatch", "x"]), only_asks(["scontrol", "hold"])
    (True, False, False)
    """
    questions = ("squeue", "sinfo", "sacct", "sacctmgr", "id")
    return argv[0] in questions or (argv[0] == "scontrol" and "show" in argv)
