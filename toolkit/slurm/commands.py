"""Runs Slurm's commands, and parses the rows of squeue and sacct.

squeue shows the jobs that the controller knows; sacct, at sites with accounting, also the jobs that
the controller has forgotten. The module parses text, since Slurm's JSON differs between versions.
It requests tables with their header: a site's wrapper may print text and exit with 0 without an
answer.
"""

import contextlib
import math
import os
import re
import selectors
import shutil
import subprocess
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.job.environment import of_slurm_command
from toolkit.slurm.status import WAITS_FOR_TURN, JobRow, Place
from toolkit.text.answers import (
    SEPARATOR,
    error_line,
    first_line,
    plain,
    row_format,
    settings,
    table,
)

ANSWER_BYTES = 64 << 20
"""Maximum output of a command: squeue's rows of a hundred thousand jobs."""

ANSWER_S = 90.0
"""Timeout of a query; squeue itself gives up on its controller sooner."""

ACTION_S = 600.0
"""Timeout of a command that changes something on a login node, like an sbatch that waits for its
controller."""

TRANSFER_S = 3600.0
"""Timeout of a file transfer to or from a login node."""

_CHUNK = 1 << 16
_LOOK_S = 0.05
"""Poll interval for the exit of a command that has closed its stdout, in seconds."""

Command = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
"""Runs a command of Slurm and returns its output; tests pass their own."""

_CHECKOUT = Path(__file__).parents[2]
"""The checkout with the sandbox, unless the toolkit was installed from a wheel."""

_UNREACHABLE = re.compile(
    "Unable to contact|Could not establish a configuration|Unable to process configuration"
    "|is down; start it with"
)
"""Messages of Slurm's commands (and the sandbox's) when no cluster is reachable."""

_BUSY = re.compile(
    "Socket timed out|Rate limit exceeded|[Tt]emporarily un|Slurm is busy|Zero Bytes"
    r"|\((receive|send) failure\)"
)
"""Messages of Slurm's commands when the controller is overloaded (Slurm, slurm_errno.c)."""

_SQUEUE = {"%i": "JOBID", "%T": "STATE", "%S": "START_TIME", "%r": "REASON", "%o": "COMMAND"}
_PLACES = {"%A": "JOBID", "%Q": "PRIORITY", "%P": "PARTITION", "%r": "REASON"}
"""Fields of squeue's format, each with its header."""

_SACCT = ("JobID", "State", "ExitCode", "SubmitLine")

_JOB_ID = re.compile(r"\d{1,18}[\w,%\[\].+-]{0,4000}")
_STATE = re.compile(r"([A-Z_]+)(?: .*)?")
"""`CANCELLED by 0` is CANCELLED."""

_NUMBER = re.compile(r"\d{1,18}")

_NO_ACCOUNTING = re.compile(
    "accounting storage is disabled|not running a supported accounting_storage"
)
_IDS_PER_QUERY = 5000
"""The kernel takes no argument above 128 KiB."""


class TooLong(LauncherError):
    """The answer of a command did not end; the command was killed."""


def run_limited(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    environ: Mapping[str, str] | None = None,
    limit_s: float = math.inf,
    show: Callable[[bytes], object] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a command and return its output; bytes that are not UTF-8 become U+FFFD.

    `show` receives the parts of stdout as they arrive; they are then not kept.

    A scheduler that hangs, or a login node that prints without end, raises an error. Neither fills
    the memory nor blocks the caller.

    Raises:
        TooLong: the command took longer than `limit_s`, or printed more than `ANSWER_BYTES`.
    """

    def write(process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the process may exit without reading all
            process.stdin.write(stdin)
        with contextlib.suppress(OSError):
            process.stdin.close()

    deadline = time.monotonic() + limit_s
    stdout, stderr = bytearray(), bytearray()
    with (
        subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
        ) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None and process.stderr is not None
        selector.register(process.stdout, selectors.EVENT_READ, show or stdout.extend)
        selector.register(process.stderr, selectors.EVENT_READ, stderr.extend)
        writer = threading.Thread(target=write, args=(process,), daemon=True)
        writer.start()
        try:
            while pipes := selector.get_map():
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                # ssh's background process keeps stderr open, but prints no part of the
                # answer.
                only_stderr = process.stdout not in pipes
                ended = only_stderr and process.poll() is not None
                pause_s = 0.0 if ended else _LOOK_S if only_stderr else left_s
                ready = selector.select(min(pause_s, left_s, 1.0))
                for key, _ in ready:
                    if chunk := os.read(key.fd, _CHUNK):
                        key.data(chunk)
                    else:
                        selector.unregister(key.fileobj)
                if len(stdout) + len(stderr) > ANSWER_BYTES:
                    raise TooLong(f"{argv[0]} prints more than {ANSWER_BYTES >> 20} MiB: ended")
                if ended and not ready:
                    break
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
    texts = (bytes(printed).decode(errors="replace") for printed in (stdout, stderr))
    return subprocess.CompletedProcess(argv, process.returncode, *texts)


def only_asks(argv: Sequence[str]) -> bool:
    """Whether a command changes nothing, so that it can be killed and run again.

    >>> only_asks(["squeue", "--me"]), only_asks(["sbatch", "x"]), only_asks(["scontrol", "hold"])
    (True, False, False)
    """
    questions = ("squeue", "sinfo", "sacct", "sacctmgr", "id")
    return argv[0] in questions or (argv[0] == "scontrol" and "show" in argv)


def _way_out() -> str:
    """Return what to do without a cluster."""
    way = "call this on a login node, or name one by `via` in the profile"
    if (_CHECKOUT / "slurm/sandbox/sandbox").exists():
        way = (
            "`make sandbox-up` starts a cluster on this machine (then `make submit-slurm`, or "
            '`eval "$(slurm/sandbox/sandbox env)"` in this shell)'
        )
    return f"{way}; `--to` names another profile"


def run_command(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command of Slurm; queries have a time limit, sbatch and scancel have none.

    Raises:
        SchedulerMissing: the command is not installed here.
        TooLong: its answer does not end.
    """
    if shutil.which(argv[0]) is None:
        raise SchedulerMissing(f"no Slurm here: {argv[0]} is not in PATH. {_way_out()}")
    asks = only_asks(argv)
    environ = of_slurm_command(asks=asks)
    return run_limited(argv, environ=environ, limit_s=ANSWER_S if asks else math.inf)


def ask_mine(command: Command) -> list[JobRow]:
    """Return all jobs of this user that Slurm still knows, one row per array task.

    One cheap query serves any number of runs: for a list of job ids, squeue would fetch the jobs of
    all users.

    Raises:
        LauncherError: the controller does not answer.
    """
    return _squeue(command, "--me")


def ask_jobs(command: Command, job_ids: Iterable[str]) -> list[JobRow]:
    """Return the rows of these jobs that Slurm still knows, of any user.

    Raises:
        LauncherError: the controller does not answer.
    """
    return [row for ids in _batches(job_ids) for row in _squeue(command, "-j", ids)]


def _batches(job_ids: Iterable[str]) -> Iterator[str]:
    """Yield the ids in arguments within the kernel's length limit."""
    ids = list(dict.fromkeys(job_ids))
    for start in range(0, len(ids), _IDS_PER_QUERY):
        yield ",".join(ids[start : start + _IDS_PER_QUERY])


def _squeue(command: Command, *selection: str) -> list[JobRow]:
    # -a: also the jobs of hidden partitions.
    done = command(["squeue", "-a", "-r", "-t", "all", *selection, "-o", row_format(*_SQUEUE)])
    if done.returncode != 0 and "Invalid job id" in done.stderr:
        return []
    return [
        JobRow(
            job_id=job_id,
            word=word,
            start=_time(start),
            reason="" if reason == "None" else reason,
            command=argv,
        )
        for job_id, word, start, reason, argv in _rows(done, _SQUEUE.values())
        if _JOB_ID.fullmatch(job_id) and _STATE.fullmatch(word)
    ]


def _rows(
    done: "subprocess.CompletedProcess[str]", header: Iterable[str]
) -> Iterator[tuple[str, ...]]:
    """Return the rows of a table of jobs.

    Raises:
        LauncherError: the output contains no table.
    """
    program = done.args[0]
    if done.returncode != 0:
        raise LauncherError(error_line(done.stderr) or f"{program}: exit status {done.returncode}")
    rows = table(done.stdout, list(header), folds=True)
    if rows is None:
        shown = first_line(done.stderr) or first_line(done.stdout)
        raise LauncherError(f"{program} lists no jobs" + f", and prints {shown!r}" * bool(shown))
    return map(tuple, rows)


def _time(shown: str) -> str:
    """Return a time of squeue in ISO 8601; "" if there is none.

    >>> _time("N/A"), _time("2026-11-05T14:05:00")
    ('', '2026-11-05T14:05:00')
    """
    if re.fullmatch(r"\d{1,11}", shown):
        return datetime.fromtimestamp(int(shown)).astimezone().isoformat()
    return "" if shown == "N/A" else shown


def ask_places(command: Command, job_ids: Collection[str]) -> dict[str, Place]:
    """Return the queue positions of pending jobs in their partitions.

    Slurm itself does not report a queue position. The position counts the jobs of a partition that
    squeue shows and that only wait for their turn, in the order of Slurm's scheduler: by priority,
    then by id (backfill may start a small job sooner). For several partitions, the best position
    counts.

    The query fetches the pending jobs of all users, which is slow on a large cluster: use it
    rarely.

    Raises:
        LauncherError: the controller does not answer.
    """
    done = command(["squeue", "-a", "-t", "PENDING", "-o", row_format(*_PLACES)])
    queues: dict[str, list[tuple[int, int]]] = defaultdict(list)
    mine: dict[str, tuple[tuple[int, int], list[str]]] = {}
    for job_id, priority, names, reason in _rows(done, _PLACES.values()):
        if not (_NUMBER.fullmatch(job_id) and _NUMBER.fullmatch(priority)):
            continue
        if reason != "None" and not WAITS_FOR_TURN.fullmatch(reason):  # None: not considered yet
            continue
        rank = (-int(priority), int(job_id))
        partitions = names.split(",")
        for partition in partitions:
            queues[partition].append(rank)
        if job_id in job_ids:
            mine[job_id] = (rank, partitions)
    for queue in queues.values():
        queue.sort()
    return {
        job_id: min(
            Place(bisect_left(queues[name], rank) + 1, len(queues[name]), name) for name in names
        )
        for job_id, (rank, names) in mine.items()
    }


def ask_accounting(command: Command, job_ids: Iterable[str]) -> list[JobRow] | None:
    """Return sacct's rows of these jobs, one per array task; None without accounting.

    Raises:
        LauncherError: the accounting does not answer now; it may later.
    """
    rows: list[JobRow] = []
    for ids in _batches(job_ids):
        how = ["-X", "-p", f"--delimiter={SEPARATOR}", "-o", ",".join(("Cluster", *_SACCT))]
        done = command(["sacct", *how, "-j", ids])
        if done.returncode != 0 and _NO_ACCOUNTING.search(done.stderr + done.stdout):
            return None
        try:
            found = list(_rows(done, _SACCT))
        except LauncherError as error:
            raise LauncherError(f"the accounting does not answer: {error}") from None
        for job_id, words, ended, argv in found:
            state, codes = _STATE.fullmatch(words), re.fullmatch(r"(\d+):(\d+)", ended)
            if not (_JOB_ID.fullmatch(job_id) and state and codes):
                continue
            word, (status, signal) = state[1], codes.groups()
            # sacct before 26.05 keeps only seven bits of a status, so 0 may also be a failure.
            said = f", exit status {status}" * (status != "0")
            said += f", signal {signal}" * (signal != "0")
            reason = "" if word == "COMPLETED" else f"the accounting says {word}{said}"
            rows.append(JobRow(job_id=job_id, word=word, reason=reason, command=argv))
    return rows


def refused(program: str, answer: "subprocess.CompletedProcess[str]") -> LauncherError:
    """Return the error for a failed command of Slurm, with its message."""
    text = plain(answer.stderr + answer.stdout).strip()
    if _UNREACHABLE.search(text):
        return SchedulerMissing(f"no Slurm controller answers: {error_line(text)}. {_way_out()}")
    if "Invalid job array specification" in text:
        text += (
            "; a sweep has at most as many points as MaxArraySize of this site says: "
            "`scontrol show config | grep MaxArraySize`"
        )
    if answer.returncode == 0:
        return LauncherError(f"{program} gives no answer" + f", and prints: {text}" * bool(text))
    return LauncherError(f"{program} refused: {text or f'exit status {answer.returncode}'}")


def is_busy(text: str) -> bool:
    """Whether a controller reports overload, so that a retry would make it worse."""
    return bool(_BUSY.search(text))


def config_of(printed: str) -> dict[str, str]:
    """Parse the settings printed by `scontrol show config`."""
    return settings(printed, "Configuration data as of")


def cluster_name(printed: str) -> str:
    """Return the cluster's name from `scontrol show config`; empty if it is missing.

    Raises:
        LauncherError: the answer is not a valid name, and names become part of URIs.
    """
    name = config_of(printed).get("ClusterName", "")
    if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise LauncherError(f"Slurm says that its cluster is called {name[:80]!r}: no name")
    return name
