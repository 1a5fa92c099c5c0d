"""The first error of a start, and whether two starts failed in the same way.

A rank may have written an error file (torchrun's `record`), or an exception on stderr. Most errors
of the other ranks are then echoes: these ranks have lost the first one.
"""

import os
import re
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from .echoes import is_echo
from .files import last_lines, read
from .rank_end import STOPS
from .torchrun_report import Reported
from .traceback import without_dumps

MESSAGE_CHARS = 300
_LONGEST_MESSAGE = 2000
"""The number of characters of a message that are compared."""


class Failure(NamedTuple):
    """How a start of the ranks failed."""

    kind: str
    """`error`: raised by a rank; `fault`: an exception that usually is a bug in the code; `bare`:
    a signal, an exit status or a lost peer, at a known step; `unsure`: the step is unknown."""

    step: str
    """`N`; `N+` for N or later; `after NAME` for the newest checkpoint; `-` if unknown."""

    message: str
    """The error, without parts that differ between starts: paths, numbers, times, hosts."""

    def line(self) -> str:
        """Return the failure as a line of the attempt's file `first_error`."""
        return "\t".join(self)


def from_line(line: str) -> Optional[Failure]:
    """Return the failure in a file `first_error`; None if it does not contain exactly one."""
    fields = line.rstrip("\n").split("\t")
    return Failure(*fields) if len(fields) == 3 and "\n" not in line.rstrip("\n") else None


# ---- Whether two failures are the same


def alike(before: Optional[Failure], now: Failure, *, in_a_row: bool) -> bool:
    """Whether a failure repeats an earlier one, so a third start would fail in the same way.

    A fault is the same at any step. Other errors are the same at the same known step, or if two
    consecutive starts have identical messages.
    """
    if before is None or before.kind != now.kind or before.kind == "unsure":
        return False
    if before.kind == "fault" and before.message == now.message:
        return True
    if before.step[:1].isdigit() and before.step == now.step:
        return loose(before.message) == loose(now.message)
    return in_a_row and before == now


def loose(text: str) -> str:
    """Return a message without numbers and paths."""
    return re.sub("[0-9]+", "#", re.sub('/[^ ,;"]+', "/*", text))


# ---- Errors raised by ranks

_FAULT = re.compile(
    "(?:Assertion|Attribute|Import|Index|Key|ModuleNotFound|Name|NotImplemented|Recursion|Syntax"
    "|Type|UnboundLocal|Value|ZeroDivision)Error(?::|$)"
)

ANOTHER_ONE = "ranks have lost another one"

LOST_NODE = "NodeLost: "
"""Error of a rank that elastic.py has killed: the start did not fail, the next has other nodes."""

_AFTER_MOST = 50
"""With more lines than this after an exception, the rank continued."""


def _printed(path: str) -> str:
    """Return the last exception in the stderr of a rank without an error file."""
    text, expected, after, ignored = "", False, 0, False
    for full in without_dumps(last_lines(path)):
        line = re.sub(r"^\[rank[0-9]+\]: ?", "", full)
        if line.startswith("Exception ignored"):  # by Python, usually at exit
            ignored = True
        elif line.startswith("Traceback (most recent call last):"):
            expected, after, ignored = not ignored, 0, False
        elif re.match(r" *what\(\): ", line):
            text = re.sub(r"^ *what\(\): *", "", line)
            expected, after = False, 0
        elif line.startswith("Fatal Python error: "):
            if not text or after > 2:
                text = line
            expected, after = False, 0
        elif not line or line[0] in " \t":
            continue
        elif expected:
            text, expected = line, False
        else:
            after += 1
    return "" if after > _AFTER_MOST else text


def _member(text: str, name: str) -> str:
    """Return the value of a name in a possibly cut line of JSON; for a text, its first line."""
    found = re.search(rf'"{name}" *: *(["0-9a-z].*)', text, re.DOTALL)
    if found is None:
        return ""
    value = found.group(1)
    if value[0] != '"':
        return re.sub("[^0-9a-z].*", "", value, flags=re.DOTALL)
    value = value[1:1001].replace("\\\\", "\1").replace('\\"', "\2")
    value = re.sub(r'(?:\\n|").*', "", value, flags=re.DOTALL)
    return value.replace("\2", '"').replace("\1", "\\")


# ---- Parts that differ between starts

_NUMBERED = re.compile(
    "(?:[Pp][Ii][Dd]|[Pp]rocess|[Tt]hread|[Aa]ttempt|[Rr]estart|[Pp]ort|[Rr]ank|GPU|cuda)"
    "[ =:_-]*[0-9]+"
)
_DURATION = re.compile(
    "(?<![0-9.])[0-9.]*[0-9] ?(?:milliseconds|seconds|minutes|ms|us|s)(?![A-Za-z0-9])"
)
_MASKS = [
    (re.compile("0x[0-9A-Fa-f]+"), "0x*"),
    (re.compile('attempt[-_][0-9]+/[^ "]*'), "attempt-*"),
    (re.compile("/tmp[A-Za-z0-9_]+"), "/tmp*"),
    (re.compile("(?<![0-9])[0-9]+-[0-9][0-9]-[0-9][0-9]"), "*"),
    (re.compile("(?<![0-9])[0-9]+:[0-9][0-9]:[0-9][0-9](?:[.,][0-9]+)?"), "*"),
    (re.compile(r"(?<![0-9])[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+"), "*"),
    (re.compile(":[0-9]{4,}"), ":*"),
    (re.compile(r"[0-9]{10,}(?:\.[0-9]+)?"), "*"),
]


def _plain(text: str, hosts: Iterable[str]) -> str:
    """Mask the parts that differ between starts."""
    text = text.replace("\t", " ")[:_LONGEST_MESSAGE]
    for host in sorted(hosts, key=len, reverse=True):  # the longest first: names may overlap
        if host:
            text = re.sub(rf"(?<![A-Za-z0-9_]){re.escape(host)}(?![A-Za-z0-9_])", "*", text)
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    text = _DURATION.sub("* s", text)
    text = _NUMBERED.sub(lambda found: re.sub("[0-9]+$", "*", found.group()), text)
    text = re.sub("[0-9a-f]{8,}", lambda found: _without_id(found.group()), text)
    return text[:MESSAGE_CHARS]


def _without_id(word: str) -> str:
    return "*" if re.search("[0-9]", word) and re.search("[a-f]", word) else word


# ---- The files of ranks


class File(NamedTuple):
    """A file of a rank from one start: `NODE/RUN/attempt_N/RANK/NAME`."""

    path: str
    rank: str
    """The rank's folder."""
    number: str
    """The N of torchrun's folder `attempt_N`."""
    run: str
    """The folder of one torchrun."""
    node: str

    @property
    def is_error_file(self) -> bool:
        """Whether this is an error file, not stderr."""
        return self.path.endswith("/error.json")


def _rank_files(folder: str, newer_than_ns: Optional[int]) -> List[File]:
    """Return the ranks' error files and stderr below a folder, the oldest first."""
    found: List[Tuple[int, str]] = []
    for place, _, names in os.walk(folder):
        if "/attempt_" not in place + "/":
            continue
        for name in names:
            if name in ("error.json", "stderr.log"):
                path = place + "/" + name
                try:
                    changed_ns = os.lstat(path).st_mtime_ns
                except OSError:
                    continue
                if newer_than_ns is None or changed_ns > newer_than_ns:
                    found.append((changed_ns, path))
    found.sort(key=lambda one: one[1], reverse=True)
    found.sort(key=lambda one: one[0])
    files = []
    for _, path in found:
        rank = path.rpartition("/")[0]
        start = rank.rpartition("/")[0]
        run = start.rpartition("/")[0]
        digits = re.search("[0-9]+$", start)
        number = digits.group() if digits else start
        files.append(File(path, rank, number, run, run.rpartition("/")[0]))
    return files


def _number(text: str) -> int:
    found = re.match("[0-9]+", text)
    return int(found.group()) if found else 0


class Attempt(NamedTuple):
    """The location of the evidence from an attempt's ranks."""

    run_dir: str
    number: int
    nodes: Sequence[str] = ()
    """Names of the nodes, and of this machine, to mask in messages."""
    reports: Sequence[Reported] = ()
    """The ranks that torchrun reports."""
    newer_than_ns: Optional[int] = None
    """The start time, if an attempt has several starts (a pod); older files are ignored."""


class Look:
    """A snapshot of an attempt's files."""

    def __init__(self, attempt: Attempt, folder: str, *, all_ended: bool) -> None:
        self.attempt, self.all_ended = attempt, all_ended
        self.hosts = dict.fromkeys(attempt.nodes)
        self.died = self._read_reports()
        self.files = _rank_files(folder, attempt.newer_than_ns)
        self.error_files = {file.rank for file in self.files if file.is_error_file}
        self.most: Dict[str, str] = {}
        self.newest: Dict[str, str] = {}
        for file in self.files:
            known = self.most.get(file.run)
            if known is None or _number(file.number) > _number(known):
                self.most[file.run] = file.number
            self.newest[file.node] = file.run
        self.fewest = min((_number(self.most[run]) for run in self.newest.values()), default=0)

    def _read_reports(self) -> str:
        """Return how the first rank died, by torchrun's reports."""
        reports = self.attempt.reports
        self.hosts.update(dict.fromkeys(one.host for one in reports))
        died = [one for one in reports if -one.exitcode not in STOPS]
        first = min(died, key=lambda one: (one.time, str(one.exitcode)), default=None)
        if first is None:
            return ""
        code = first.exitcode
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def at(self, start: Optional[str]) -> Optional[Failure]:
        """Return how a start failed; without a number, the last start of each node."""
        bare = self.died
        for file in self.files:
            last = file.number == self.most[file.run]
            if not self._is_last(file) if start is None else file.number != start:
                continue
            if file.is_error_file:
                text = _member(read(file.path).split("\n", 1)[0], "message")
            elif file.rank in self.error_files or (not self.all_ended and last):
                continue
            else:
                text = _printed(file.path)
            if text.startswith(LOST_NODE):
                return None
            if not text or text.startswith("stopped by "):
                continue
            if not is_echo(text):
                kind = "fault" if _FAULT.match(text) else "error"
                return Failure(kind, self._step(start), _plain(text, self.hosts))
            if not bare.startswith("signal"):
                bare = ANOTHER_ONE
        if not bare:
            return None
        step = self._step(start)
        return Failure("bare" if step.isdigit() else "unsure", step, bare)

    def last(self) -> Iterator[File]:
        """Yield the files of the last start of each node, the oldest first."""
        return filter(self._is_last, self.files)

    def _is_last(self, file: File) -> bool:
        return file.number == self.most[file.run] and file.run == self.newest[file.node]

    def made_progress(self) -> bool:
        """Whether a step or checkpoint is known: the program has run, now or earlier."""
        return self._step(None) != "-"

    def _is_of(self, record: str, start: Optional[str]) -> bool:
        """Whether a record belongs to this attempt and this start."""
        attempt, restart = _member(record, "attempt"), _member(record, "restart")
        if attempt and attempt != str(self.attempt.number):
            return False
        if start is None:
            return not restart or _number(restart) >= self.fewest
        return not restart or restart == start

    def _records(self, name: str, start: Optional[str]) -> Iterator[str]:
        path = f"{self.attempt.run_dir}/{name}"
        return (line for line in last_lines(path) if self._is_of(line, start))

    def _outcome(self) -> str:
        path = self.attempt.run_dir + "/outcome.json"
        mark = self.attempt.newer_than_ns
        try:
            if mark is not None and os.stat(path).st_mtime_ns <= mark:
                return ""
        except OSError:
            return ""
        lines = read(path).split("\n")
        return "".join(" " + line for line in (lines if lines[-1] else lines[:-1]))

    def _step(self, start: Optional[str]) -> str:
        outcome, made = self._outcome(), ""
        if _member(outcome, "attempt") == str(self.attempt.number):
            made = _member(outcome, "step")
        if made:
            failed = re.search("retryable|fatal", _member(outcome, "status"))
            if failed and self._is_of(outcome, start):
                return made
            made += "+"
        if start is not None:
            steps = [
                _member(line, "step")
                for line in self._records("events.jsonl", start)
                if re.search('"event": *"error"', line)
            ]
            if steps and steps[-1][:1].isdigit():
                return steps[-1]
        for line in self._records("metrics.jsonl", start):
            if _member(line, "step"):
                made = _member(line, "step") + "+"
        if made:
            return made
        newest = newest_checkpoint(self.attempt.run_dir)
        return "after " + newest if newest else "-"

    def starts(self) -> int:
        """Return how often one torchrun has started the ranks."""
        return _number(self.most[self.files[0].run]) + 1 if self.files else 0


def newest_checkpoint(run_dir: str) -> str:
    """Return the name of a run's newest checkpoint; empty without one.

    `train` has a folder for each attempt, `attempt-N/step-M`.
    """
    times = _times(run_dir + "/checkpoints")
    for _, name in list(times):
        if re.match("attempt-[0-9]+$", name):
            inside = _times(f"{run_dir}/checkpoints/{name}")
            times = [one for one in times if one[1] != name]
            times += [(time, f"{name}/{one}") for time, one in inside]
    return min(times)[1] if times else ""


def _times(folder: str) -> List[Tuple[int, str]]:
    """Return the names in a checkpoint folder, each with its negative mtime."""
    try:
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
        names = [name for name in names if not name.endswith(".tmp")]
        return [(-os.stat(f"{folder}/{name}").st_mtime_ns, name) for name in names]
    except OSError:
        return []


def last_failure(attempt: Attempt, folder: str) -> Optional[Failure]:
    """Return how the last start of all nodes failed, once all have ended."""
    return Look(attempt, folder, all_ended=True).at(None)


def repeated_failure(attempt: Attempt, folder: str, *, all_ended: bool) -> Optional[Failure]:
    """Return the failure that two starts by the torchrun of a folder share; None without one.

    `all_ended`: the ranks of the last start have also ended, so their stderr is complete.
    """
    look = Look(attempt._replace(reports=()), folder, all_ended=all_ended)
    seen: List[Optional[Failure]] = []
    for number in range(look.starts()):
        now = look.at(str(number))
        if now is not None and any(
            alike(before, now, in_a_row=place == number - 1) for place, before in enumerate(seen)
        ):
            return now
        seen.append(now)
    return None


def in_words(failure: Failure) -> str:
    """Return a sentence about a failure of two starts."""
    step = failure.step
    at = ""
    if re.match("[0-9]+$", step):
        at = " at step " + step
    elif re.match(r"[0-9]+\+$", step):
        at = f" at step {int(step[:-1])} or later"
    elif step.startswith("after "):
        at = " with no checkpoint " + step
    return f"the same failure twice{at}: {failure.message}"
