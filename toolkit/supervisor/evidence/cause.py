"""The first failure, as a sentence, and whether another start would fail in the same way.

The best evidence counts: the error file, exception or signal of the rank that failed first; the
exception that ended torchrun itself; the error of srun, a container runtime or the shell.
"""

import json
import os
import re
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

from .echoes import is_echo
from .files import last_lines, read
from .first_error import MESSAGE_CHARS, Attempt, File, Look, loose
from .rank_end import STOPS, in_words, judge, kind_of, order
from .torchrun_report import Reported
from .traceback import last_trace

_MOST_REPORTED = 64
"""The number of reported ranks to examine, the earliest first."""

_ERROR_BYTES = 1 << 20


class Cause(NamedTuple):
    """The first failure."""

    text: str
    """A sentence with rank and node, if known."""

    hopeless: str = ""
    """Why another start would fail in the same way; empty if it may not."""

    echo: bool = False
    """Whether it only reports the loss of another rank."""


class RankFailure(NamedTuple):
    """How a rank has failed."""

    kind: str
    """See `rank_end.RankEnd`."""
    time: float
    rank: Optional[int]
    local_rank: int
    node: str
    message: str

    def __str__(self) -> str:
        """Describe the failure in one line."""
        return in_words(self.kind, self.rank, self.local_rank, self.node, self.message)


class Logs(NamedTuple):
    """The attempt's evidence outside the rank folders."""

    names: Sequence[str] = ()
    """Node names by node number, if the folders are named `node-NUMBER`."""
    nodes: int = 1
    """The number of nodes of the attempt."""
    reported: Sequence[Reported] = ()
    out_of_memory: Sequence[str] = ()
    """Names of nodes that ran out of memory."""
    lines: Sequence[str] = ()
    """The last output lines of torchrun and the programs around it."""
    few_gpus: str = ""
    """A phrase about nodes with fewer GPUs than ranks; see few_gpus()."""
    one_machine: bool = False
    """Whether the nodes are processes of one machine, which reach each other at 127.0.0.1."""


def cause_of(attempt: Attempt, folder: str, logs: Logs) -> Optional[Cause]:
    """Return the first failure in the last start of an attempt; None without evidence."""
    look = Look(attempt, folder, all_ended=True)
    failures = _Ranks(look, logs).failures()
    first = min(failures, key=lambda one: order(one.kind, one.time), default=None)
    text = str(first) if first else ""
    if first is None or first.kind == "echo":  # torchrun may know more
        own = own_error(logs.lines)
        text = f"torchrun: {own}" if own else text or program_error(logs.lines)
    if not text:
        return None
    hopeless = _hopeless(text, failures, look, logs)
    if first and hopeless == LOOPBACK:  # no rank was lost
        text = str(first._replace(kind="exception"))
    return Cause(text[: 2 * MESSAGE_CHARS], hopeless, is_echo(text))


# ---- Ranks


class _Ranks:
    """The ranks of the last start of all nodes."""

    def __init__(self, look: Look, logs: Logs) -> None:
        self.logs = logs
        self.files = list(look.last())
        self.base: Dict[str, int] = {}
        """The first rank of a node, by its name."""
        for one in logs.reported:
            if one.rank >= 0:
                self.base.setdefault(_short(one.host), one.rank - one.local_rank)

    def failures(self) -> List[RankFailure]:
        """Return the failures of ranks: the reported ones, and others that raised an error."""
        folders = {os.path.join(*file.rank.split("/")[-3:]): file for file in self.files}
        alone: Dict[int, File] = {}
        for file in self.files if len({file.node for file in self.files}) == 1 else ():
            alone[_number(os.path.basename(file.rank))] = file  # under any name of the node
        by_name = {(self._host(file), os.path.basename(file.rank)): file for file in self.files}
        reported = sorted(self.logs.reported, key=lambda one: one.time)
        seen, found = set(), []
        for one in [one for one in reported if -one.exitcode not in STOPS][:_MOST_REPORTED]:
            path = os.path.dirname(one.error_file)
            own = folders.get(os.path.join(*path.split("/")[-3:])) if path else None
            own = (
                own
                or by_name.get((_short(one.host), str(one.local_rank)))
                or alone.get(one.local_rank)
            )
            seen.add(own.rank if own else "")
            failure = self._failure(own, one)
            found += [failure] if failure else []
        for file in self.files:
            if file.rank not in seen:
                seen.add(file.rank)
                failure = self._failure(file, None)
                found += [failure] if failure else []
        return found

    def _host(self, file: File) -> str:
        return _short(self._name(file))

    def _name(self, file: File) -> str:
        key = os.path.basename(file.node)
        number = key[len("node-") :] if key.startswith("node-") else ""
        known = number.isdigit() and int(number) < len(self.logs.names)
        return self.logs.names[int(number)] if known else key

    def _failure(self, file: Optional[File], reported: Optional[Reported]) -> Optional[RankFailure]:
        error, stderr = None, []
        if file is not None:
            error, stderr = _error_in(file.rank), last_lines(file.rank + "/stderr.log")
        node = self._name(file) if file else reported.host if reported else ""
        end = judge(
            reported.exitcode if reported else None,
            error=(error, ()) if error else None,
            stderr=stderr,
            out_of_memory=node in self.logs.out_of_memory,
        )
        trace = last_trace(stderr)
        kind, message = (end.kind, end.message) if end else ("", "")
        if end is None and reported is None and trace and trace.at_end:
            kind, message = kind_of(trace.message), trace.message
        if not message or message.startswith("stopped by "):
            return None
        local = reported.local_rank if reported else 0
        if file:
            local = _number(os.path.basename(file.rank))
        rank = reported.rank if reported and reported.rank >= 0 else trace.rank if trace else None
        if rank is None:
            base = self.base.get(_short(node), 0 if self.logs.nodes == 1 else -1)
            rank = base + local if base >= 0 else None
        time = reported.time if reported else 0.0
        if file and (end is None or end.source != "report"):
            time = _changed_s(file.path)
        return RankFailure(kind, time, rank, local, node, _line(message))


def _short(host: str) -> str:
    return host.partition(".")[0]


def _line(message: str) -> str:
    return message.partition("\n")[0][:MESSAGE_CHARS]


def _error_in(folder: str) -> str:
    """Return the message of a rank's error file; empty without one."""
    text = read(folder + "/error.json", _ERROR_BYTES)
    try:
        return str(json.loads(text)["message"]["message"]) if text else ""
    except (ValueError, KeyError, TypeError):
        found = re.search(r'"message" *: *"((?:[^"\\]|\\.)*)', text)
        return found.group(1) if found else ""


def _changed_s(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


# ---- torchrun and the programs around it

_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: .*)?$")
_OF_RANKS = re.compile(r"\S*(?:ChildFailedError|SignalException)\b|.*[Ss]ee inner exception")
"""Errors of torchrun because of its ranks, and lines that only refer to an earlier exception."""

_USAGE = re.compile(r"(torchrun: error: .*)")


def own_error(lines: Iterable[str]) -> str:
    """Return the last exception that torchrun itself raised, or why it rejects its options.

    >>> own_error(["[rank 0] ValueError: x", "torch.DistNetworkError: taken", "x.SignalException"])
    'torch.DistNetworkError: taken'
    """
    own = (line for line in lines if not _OF_RANKS.match(line))
    found = [line for line in own if _RAISED.match(line) or _USAGE.match(line)]
    return found[-1] if found else ""


_OF_PROGRAMS = [
    re.compile(pattern)
    for pattern in (
        r"(?:slurmstepd.*: error: pyxis: +|enroot.*: *)?\[ERROR\] +(.*)",
        r"(?:.*\x1b\[\d*m)?FATAL: +(?:\x1b\[\d*m)?(.*)",
        r"Error: (.+)",
        r"(?:\S*/)?(?:slurm_script|\S+\.(?:sh|sbatch)|(?:ba|da)?sh): (?:line )?(?:\d+: )?(.+)",
        r"srun: (?:error|fatal): (?!\S+: tasks? [\d,-]+: |.*(?:aborted|[Tt]erminat))(.*)",
        r"slurmstepd.*: error: (pyxis: .*)",
    )
]
"""Errors of enroot, apptainer, podman, the shell, srun and pyxis, the most specific first."""


def program_error(lines: Sequence[str]) -> str:
    """Return the first error of a container runtime, the shell or srun.

    >>> program_error(["srun: error: n1: task 0: Exited with exit code 1", "FATAL:   no image"])
    'no image'
    """
    for pattern in _OF_PROGRAMS:
        for line in lines:
            found = pattern.match(line)
            if found:
                return found.group(1)[:MESSAGE_CHARS]
    return ""


# ---- Whether another start would fail in the same way

LOOPBACK = (
    "a node's own name leads to 127.0.0.1 or 127.0.1.1, where other nodes do not find it; set "
    "network_interface in the profile"
)
_LOOPBACK = re.compile(r"[Gg]loo.*remote=\[127\.")
"""Between ranks; a store of the first node may well be reached there by the ranks of that node."""

_NO_IMAGE = re.compile("manifest unknown|manifest for .* not found|name unknown|error code: 404")
"""Messages of a registry about a missing image."""

_NO_DEVICE = re.compile("invalid device ordinal")
_CODE = re.compile(
    r"(?:\S+: )?(?:(?:Syntax|Indentation|Tab|ModuleNotFound)Error\b"
    "|ImportError: cannot import name)"
)


def _hopeless(text: str, failures: Sequence[RankFailure], look: Look, logs: Logs) -> str:
    """Return why another start would fail in the same way; empty if the evidence is weak.

    A module that is missing on some nodes only may be a fault of these nodes. A step or
    checkpoint proves that the program can start.
    """
    messages = [one.message for one in failures]
    several = logs.nodes > 1 and not logs.one_machine
    if several and any(map(_LOOPBACK.search, [*messages, *logs.lines])):
        return LOOPBACK
    if not failures and no_image(text):
        return "the image does not exist"
    if logs.few_gpus and any(map(_NO_DEVICE.search, messages)):
        return logs.few_gpus
    code = [one for one in failures if _CODE.match(one.message)]
    same = {loose(one.message) for one in code}
    everywhere = len({one.node for one in code}) >= logs.nodes and len(same) == 1
    if everywhere and not look.made_progress():
        return "no node can start it"
    return ""


def no_image(text: str) -> bool:
    """Whether the image is missing in its registry."""
    return _NO_IMAGE.search(text) is not None


def few_gpus(command: Iterable[str], environ: Mapping[str, str], devices: str = "") -> str:
    """Return the ranks and GPUs per node in words, if a node has too few GPUs; else empty.

    `devices`: the numbers of a node's GPUs; overrides the environment.

    >>> few_gpus(["--nproc-per-node=4"], {"CUDA_VISIBLE_DEVICES": "0,1"})
    '4 ranks per node, and 2 GPUs'
    """
    ranks = [re.match(r"--nproc[-_]per[-_]node=(\d+)$", word) for word in command]
    wanted = next((int(found.group(1)) for found in ranks if found), 0)
    given = devices or environ.get("CUDA_VISIBLE_DEVICES", "")
    count = len(given.split(",")) if given else _number(environ.get("SLURM_GPUS_ON_NODE", ""))
    return f"{wanted} ranks per node, and {count} GPUs" if 0 < count < wanted else ""


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
