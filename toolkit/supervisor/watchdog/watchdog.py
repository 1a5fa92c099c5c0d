"""Diagnoses hanging ranks of one node: which rank, at which line, and the missing collective.

`python3 watchdog.py FOLDER SECONDS|learned`, started by start.sh, which then becomes torchrun. The
ranks leave files in FOLDER (sitecustomize.py).

Results go into the attempt's folder `watchdog` (docs/reference/run-directory.md). `toolkit stacks`
or another node's watchdog writes a request `ask-NAME` there; each watchdog answers it with a file
`answer-NAME-NODE-PID.json`. The watchdog of rank 0 detects a stall: no step for SECONDS, or no
output if the script records no steps. It queries all nodes and writes the ranks that block the
others to `stalls.jsonl`. If SECONDS is a number and no rank computes, it has these ranks killed.
Once a minute, at the same time, each node writes to the folder `arrivals` when its ranks began
their newest collectives. The watchdog of rank 0 writes each rank's waiting time to `ranks.jsonl`,
and a rank that is slower than the others to `stragglers.jsonl` (stragglers.py). If the job has a
`log_pattern`, the watchdog on the node of the rank that prints steps records the steps
(log_steps.py).

Many nodes share the attempt's folder. While nothing happens, a node opens one file a minute there,
for its arrivals, and lists nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import sys
import time
from array import array
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Dict, Sequence

import stragglers

Rank = Dict[str, Any]
"""The contents of a rank's file: `rank`, `pid`, `world` (the number of ranks), and more."""

Finding = Dict[str, Any]
"""The state of a rank: `rank`, `pid`, `state`, `stack`, `threads`, `collectives`."""

Stack = Sequence[Sequence[Any]]
"""(file, line, function) of each frame, the innermost first."""

POLL_S = 0.25
POLL_LEARNED_S = 2.0
POLL_LOG_S = 0.05
LEAD_S = 3.0
"""Seconds before a stall at which the ranks are first examined: comparing two examinations shows
whether they are at work."""

ANSWER_S = 2.0
"""Timeout for a rank's answer; a quarter of the limit, if that is less."""

MUTE_S = 0.3
"""Timeout for a rank that did not answer the last time."""

SUSPENDED_S = 5.0
"""A watchdog that has not looked for this long was suspended together with the ranks."""

ANSWERS_S = 40.0
"""How long other nodes may take to answer: by default, NFS shows a new file after up to 30 s."""

SAME_TIME_S = 3.0
"""Two changes of a folder this close may have the same time: some file systems store seconds."""

STRAGGLERS_S = 60.0
"""How often the ranks are compared; of more than 960 ranks, every world size / 16 seconds."""

LOOKS_FOR_ARRIVALS = 12
"""How often in that time the nodes' arrivals are looked for, until all are there."""

RECORDED = 100
"""How often that is recorded while a run becomes e times as old: files stay small."""

LEAST_LEARNED_S = 300.0
"""A learned limit is at least this long, and ten times the longest time between two steps."""

TIMES_LONGEST = 10
LEARNS_FROM = 20
"""How many steps are needed to learn a limit."""

KINDS = 5
"""How many of the newest collectives are compared by name and size."""

COMPUTES = 0.2
"""The processes of a rank that computes use at least this share of a core,"""

LONGEST_S, TIMES_LIMIT = 3600.0, 10
"""and may do so without a step for this long, or this many times the limit, if that is more."""

PAUSES = ("evaluation", "compilation")
"""Events in `events.jsonl` after which no step is expected, until another line follows."""

UNSEEN = (
    "the ranks cannot be looked into: their program is not Python, or their Python was started "
    "with -I, -E or -S, or forked by torchrun; a stall would not be noticed"
)
UNSEEN_S = 60.0
"""How long a rank may take, at least, until its Python has started."""

MOST_BYTES = 1 << 24

EXCHANGED = re.compile(r"ask-.*|end-.*\.json", re.DOTALL)
"""Names of questions, and of orders to end ranks."""

FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3[^/]*/|^<")
COMMUNICATION = re.compile(r"/torch/(?:distributed/|nn/parallel/|autograd/graph\.py$)")
"""Files with functions in which ranks wait for each other; DDP does so inside backward."""

LOCK = re.compile(
    r"/(?:threading|selectors|subprocess|(?:multiprocessing|concurrent/futures)/\w+)\.py$"
)
"""Files with functions in which a thread waits for other threads or processes."""

EQUAL = re.compile(r"all_reduce|_?(?:broadcast|reduce)(?:_oop)?$|_(all_gather|reduce_scatter)_base")
"""Names of collectives in which the tensors of all ranks have the same size."""


# ---- One rank


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if the file cannot be read."""
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file atomically."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value) + "\n", encoding="utf-8")
    draft.replace(path)


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def process_status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; none if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def is_alive(rank: Rank) -> bool:
    """Whether the process in a rank's file still exists and its pid was not reused."""
    began = rank.get("began")
    return began is not None and process_start(rank.get("pid", 0)) == began


def process_start(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks since boot; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]  # proc(5), field 22


def processes() -> dict[int, tuple[int, float, float]]:
    """Return the parent of each process, its CPU seconds, and those of its ended children.

    The CPU seconds include the time in which its first thread waited for a CPU.
    """
    tick_s, found = 1 / os.sysconf("SC_CLK_TCK"), {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            numbers = [int(field) for field in stat.rpartition(")")[2].split()[1:15]]  # proc(5)
            own_s, lost_s = sum(numbers[10:12]) * tick_s, sum(numbers[12:14]) * tick_s
            found[int(folder.name)] = numbers[0], own_s, lost_s
            waited_ns = int((folder / "schedstat").read_text(encoding="utf-8").split()[1])
            found[int(folder.name)] = numbers[0], own_s + waited_ns / 1e9, lost_s
    return found


def cpu_seconds(pids: Iterable[int]) -> dict[int, tuple[float, float]]:
    """Return the CPU time of processes, and the CPU time of all their descendants."""
    every = processes()
    used = {pid: every.get(pid, (0, 0.0, 0.0))[1:] for pid in pids}
    for pid, (parent, *seconds) in every.items():
        while parent not in used and parent in every:
            parent = every[parent][0]
        if parent in used and pid not in used:
            used[parent] = used[parent][0], used[parent][1] + sum(seconds)
    return used


def stack_by_signal(rank: Rank, folder: Path) -> list[list[Any]]:
    """Return the stack of the thread that handles the signal: the main one, as a rule.

    The signal would kill a process that does not handle it.
    """
    path = folder / f"{rank['rank']}.stacks"
    handled = int(process_status(rank["pid"]).get("SigCgt", "0"), 16)
    if not handled >> (rank["signal"] - 1) & 1:
        return []
    os.truncate(path, 0)
    os.kill(rank["pid"], rank["signal"])
    size, deadline = 0, time.monotonic() + 2
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, size = size, size_of(path)
        if size and size == before:  # it is written whole
            break
    with path.open(encoding="utf-8", errors="replace") as file:
        matches = map(FRAME.fullmatch, file.read(MOST_BYTES).splitlines())
        return [[m[1], int(m[2]) if m[2].isdigit() else 0, m[3]] for m in matches if m]


def answer_of(
    rank: Rank, timeout_s: float = ANSWER_S
) -> tuple[dict[str, Any], list[dict[str, Any]] | None] | None:
    """Return the answer of a rank's thread: the stacks of all threads, and the entries of torch.

    None if the thread does not answer; no entries if torch has none or the record is incomplete.
    """
    content = b""
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(timeout_s)
            server.connect(rank["socket"])
            while len(content) < MOST_BYTES and (part := server.recv(1 << 16)):
                content += part
        head, _, rest = content.partition(b"\n")
        answer = json.loads(head)
        threads, sizes = answer["threads"], answer["records"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    entries, begin = [], 0
    try:
        for size in sizes:
            # An empty record has no entries, such as the record of gloo if only NCCL is used.
            entries += json.loads(rest[begin : begin + size]).get("entries", [])
            begin += size
    except (ValueError, AttributeError, TypeError):
        return threads, None
    return threads, entries if sizes else None


def collectives_of(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the last collective of a rank in each process group.

    It has a `number`, a `name`, and whether the rank still waits in it. On a GPU, ranks queue
    collectives: `open` is the first unfinished one, and `started` is whether the GPU has begun it,
    which torch knows if TORCH_NCCL_ENABLE_TIMING is set. The backends of a group number their
    collectives separately. `kinds` are the numbers and kinds of the newest ones, up to `open`.
    """
    last: dict[str, dict[str, Any]] = {}
    for entry in entries:
        number, group = entry["collective_seq_id"], entry["process_group"][0]
        backend, _, name = entry["profiling_name"].rpartition(":")
        key = group if backend == "gloo" else f"{group} ({backend})"
        before = last.get(key, {"number": 0, "open": None, "started": False, "kinds": []})
        if entry["is_p2p"] or number < before["number"]:
            continue
        last[key] = {**before, "number": number, "name": name, "waits": False}
        if before["open"] is None:
            last[key]["kinds"] = [*before["kinds"][1 - KINDS :], [number, kind_of(entry, name)]]
        if not entry.get("retired") and entry.get("state") != "completed":
            last[key]["waits"] = True
            if before["open"] is None:
                last[key].update(open=number, started=entry.get("state") == "started")
    return last


def kind_of(entry: Mapping[str, Any], name: str) -> str:
    """Return the part that must match on all ranks: a collective's name, and often its size."""
    if not EQUAL.match(name):
        return name
    size = sum(map(math.prod, entry.get("input_sizes", ())))
    return " ".join([name, "of", str(size), *sorted(set(entry.get("input_dtypes", ())))])


def waits_in(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a rank is in an operation of torch.distributed that has not ended.

    On a GPU, an operation has not begun while earlier kernels run, as far as torch knows the times.
    """
    newest = {entry["process_group"][0]: entry for entry in entries}
    timed = any(entry.get("duration_ms") is not None for entry in entries)
    for entry in entries:
        state = entry.get("state")
        if not entry.get("retired") and state != "completed":
            is_newest = entry is newest[entry["process_group"][0]]
            on_cpu = entry["profiling_name"].startswith("gloo:")
            if on_cpu or (state == "started" if timed else is_newest):
                return True
    return False


def examine(rank: Rank, folder: Path, timeout_s: float = ANSWER_S) -> Finding:
    """Return the state of a rank now; for a stopped process, nothing else."""
    state = process_status(rank["pid"]).get("State", "")[:1]
    found: Finding = {"rank": rank["rank"], "pid": rank["pid"], "state": state}
    found.update(stack=[], threads=[], collectives=None, waits=False)
    if state in ("T", "t", "Z"):
        return found
    if (answer := answer_of(rank, timeout_s)) is None:  # a thread holds the GIL
        return {**found, "stack": stack_by_signal(rank, folder)}
    threads, entries = answer
    found.update(stack=threads.pop(f"{rank['thread']:x}", []), threads=[*threads.values()])
    with contextlib.suppress(KeyError, TypeError, IndexError, AttributeError):
        found["collectives"] = None if entries is None else collectives_of(entries)
        found["waits"] = waits_in(entries or ())
    return found


def arrivals(rank: Rank, folder: Path) -> Finding:
    """Return when a rank began its newest collectives; None if that is unknown."""
    begun = None
    if process_status(rank["pid"]).get("State", "")[:1] in ("T", "t", "Z"):
        return {"rank": rank["rank"], "arrivals": None}
    _, entries = answer_of(rank, timeout_s=0.5) or ({}, None)
    with contextlib.suppress(KeyError, TypeError, IndexError, AttributeError):
        begun = stragglers.arrivals_of(entries or (), rank["world"])
        if rank["rank"]:  # the kinds are the same on all; for the times of GPUs, rank 0's do
            begun = begun._replace(kinds=(), times=() if begun.took else begun.times)
    if begun is None:
        return {"rank": rank["rank"], "arrivals": None}
    newest = [begun.first, [*begun.times], begun.kinds, [*begun.took]]
    return {"rank": rank["rank"], "arrivals": newest}


def begun_in(report: Mapping[str, Any]) -> dict[int, tuple[stragglers.Arrivals, str]]:
    """Return when the ranks in a node's answer began their collectives, and the node."""
    begun = {}
    with contextlib.suppress(KeyError, TypeError, ValueError):
        for each in report["ranks"]:
            first, times, kinds, took = each["arrivals"]
            times, took = array("d", times), array("d", took)
            own = stragglers.Arrivals(int(first), times, [*map(int, kinds)], took)
            begun[int(each["rank"])] = own, str(report["node"])
    return begun


# ---- Ranks that block the others


def culprits_of(found: Iterable[Finding]) -> dict[int, str]:
    """Return the ranks that block the others, and why; none if no rank differs.

    These are, in this order: stopped processes; none if ranks are in different collectives; ranks
    that have not begun a collective as other ranks of the process group have; ranks with a GPU
    that has not begun a collective as other GPUs have; ranks outside torch.distributed, if others
    are inside.
    """
    ranks = {each["rank"]: each for each in found}
    stopped = [rank for rank, each in ranks.items() if each["state"] in ("T", "t")]
    if stopped:
        return dict.fromkeys(stopped, "is stopped (by SIGSTOP or a debugger)")
    if mismatch_of(ranks.values()):
        return {}
    behind: dict[int, str] = {}
    # A rank without an answer may have joined all; a rank without collectives lacks the first.
    known = {
        rank: each["collectives"] for rank, each in ranks.items() if each["collectives"] is not None
    }
    nothing = {"number": 0, "name": "", "waits": False}
    for group in sorted({group for each in known.values() for group in each}):
        last = {
            rank: each.get(group, nothing)
            for rank, each in known.items()
            if group in each or group.partition(" ")[0] == "0"  # the default group has all ranks
        }
        furthest = max(last.values(), key=lambda collective: int(collective["number"]))
        lacks = f"has not joined {furthest['name']} {furthest['number']} of process group {group}"
        for rank, collective in last.items():
            # On a GPU, a rank may lack a later collective because it waits in an earlier one.
            if collective["number"] < furthest["number"] and not collective["waits"]:
                behind.setdefault(rank, lacks)
    if behind and len(behind) < len(ranks):
        return behind
    if on_gpu := before_what_others_started(known):
        return on_gpu
    elsewhere = [
        rank
        for rank, each in ranks.items()
        if each["stack"] and not each["waits"]
        if not any(COMMUNICATION.search(frame[0]) for frame in each["stack"])
    ]
    if elsewhere and len(elsewhere) < len(ranks):
        return dict.fromkeys(elsewhere, "is not in torch.distributed, as the others are")
    return {}


def mismatch_of(found: Iterable[Finding]) -> tuple[str, dict[str, list[int]]] | None:
    """Return the first collective that differs between ranks, and the ranks of each kind."""
    calls: dict[tuple[str, int], dict[str, list[int]]] = {}
    for each in found:
        for group, last in (each["collectives"] or {}).items():
            for number, kind in dict(last.get("kinds", ())).items():
                calls.setdefault((group, number), {}).setdefault(kind, []).append(each["rank"])
    for (group, number), kinds in sorted(calls.items()):
        if len(kinds) > 1:
            return f"number {number} of process group {group}", kinds
    return None


def at_work(found: Iterable[Finding]) -> list[int]:
    """Return the ranks that compute: in no collective, with processes that use a CPU.

    If all threads of a rank wait for a lock or a process, only its other processes count.
    """
    ranks = []
    for each in found:
        own, others = each.get("cores", (0.0, 0.0))
        stacks = [each["stack"], *each["threads"]]
        if all(stack and LOCK.search(stack[0][0]) for stack in stacks):
            own = 0.0
        if own + others >= COMPUTES and not each["waits"] and each["state"] not in ("T", "t", "Z"):
            ranks.append(int(each["rank"]))
    return sorted(ranks)


def before_what_others_started(
    known: Mapping[int, Mapping[str, Mapping[str, Any]]],
) -> dict[int, str]:
    """Return the ranks with a GPU that is behind the other GPUs, and the collective."""
    found: dict[int, str] = {}
    for group in sorted({group for each in known.values() for group in each}):
        waiting = {rank: each[group] for rank, each in known.items() if group in each}
        waiting = {rank: last for rank, last in waiting.items() if last["open"] is not None}
        started = {last["open"] for last in waiting.values() if last["started"]}
        for rank, last in waiting.items():
            if not last["started"] and last["open"] in started:
                what = f"collective {last['open']} of process group {group}"
                found.setdefault(rank, f"has queued {what}, which its GPU has not begun")
    return found


def is_busy(before: Iterable[Finding], now: Iterable[Finding], culprits: Collection[int]) -> bool:
    """Whether the ranks are at work, by comparison of two examinations.

    They are if a rank has begun another collective. They also are if the stack of a rank outside
    any collective has changed, and either no rank differs or the rank that differs imports modules.
    """
    first = {each["rank"]: each for each in before}
    pairs = [(first[each["rank"]], each) for each in now if each["rank"] in first]
    if any(old["collectives"] != new["collectives"] for old, new in pairs):
        return True
    imports = any(
        "importlib" in frame[0]
        for _, new in pairs
        if new["rank"] in culprits
        for frame in new["stack"]
    )
    moved = any(old["stack"] != new["stack"] and not new["waits"] for old, new in pairs)
    return moved and (not culprits or imports)


def place_of(stack: Stack) -> str:
    """Return the location of a stack: its innermost line outside libraries."""
    own = [frame for frame in stack if not LIBRARY.search(frame[0])] or stack
    if not own:
        return ""
    file, line, function = own[0]
    loads = any("/torch/utils/data/" in frame[0] for frame in stack)
    return f"{file}:{line} in {function}" + (", waiting for a data loader" if loads else "")


def places_of(
    numbers: Sequence[int], ranks: Mapping[int, Finding], nodes: Mapping[int, str]
) -> str:
    """Return a phrase that names ranks and their source lines."""
    shown = ", ".join(map(str, numbers[:8]))
    shown += f", … ({len(numbers)} in all)" if len(numbers) > 8 else ""
    who = f"ranks {shown}" if len(numbers) > 1 else f"rank {shown} on {nodes[numbers[0]]}"
    places = sorted({place_of(ranks[number]["stack"]) for number in numbers} - {""})
    return f"{who} ({' and '.join(places[:3])})" if places else who


def in_words(
    culprits: Mapping[int, str], found: Iterable[Finding], nodes: Mapping[int, str], world: int
) -> str:
    """Return one sentence about a stall: the rank, its node, the reason and the source line."""
    ranks = {each["rank"]: each for each in found}
    parts = []
    if not culprits and (mismatch := mismatch_of(ranks.values())):
        what, kinds = mismatch
        calls = [f"{kind} on {places_of(own, ranks, nodes)}" for kind, own in kinds.items()]
        parts.append(f"collective mismatch: {what} is {' and '.join(calls)}")
    for rank, why in sorted(culprits.items()):
        place = place_of(ranks[rank]["stack"])
        where = f"; it stands at {place}" if place else ""
        parts.append(f"rank {rank} on {nodes[rank]} {why}{where}")
    if not parts:
        places = sorted({place_of(each["stack"]) for each in ranks.values()} - {""})
        shown = " and ".join(places[:3]) or "an unknown place"
        parts.append(f"no rank differs from the others; they stand at {shown}")
    absent = sorted(set(range(world)) - set(ranks))
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (", …" if len(absent) > 8 else "")
        parts.append(f"no answer from rank {shown}")
    return "; ".join(parts)


# ---- Signs of life


class Signs:
    """The time of the run's last sign of life, and how long the run may be silent.

    A sign of life is a new line in `metrics.jsonl`; before the first line, any rank's output.
    """

    def __init__(self, run_dir: Path, logs: Path, limit_s: float | None) -> None:
        self.run_dir, self.logs, self.limit_s = run_dir, logs, limit_s
        self.begin((), now=time.monotonic())

    def begin(self, ranks: Iterable[Rank], *, now: float) -> None:
        """Reset for a new start of the ranks."""
        self.outputs = [
            Path(rank["error_file"]).with_name(name)
            for rank in ranks
            if rank["error_file"]
            for name in ("stdout.log", "stderr.log")
        ]
        self.last = self.since = self.looked_elsewhere = now
        self.steps, self.longest_s = 0, 0.0
        self.metrics = size_of(self.run_dir / "metrics.jsonl")
        self.output, self.elsewhere = sum(map(size_of, self.outputs)), -1

    def look(self, now: float) -> None:
        """Take note of the signs of life since the last look."""
        if (metrics := size_of(self.run_dir / "metrics.jsonl")) != self.metrics:
            if self.steps:
                self.longest_s = max(self.longest_s, now - self.last)
            self.metrics, self.last, self.steps = metrics, now, self.steps + 1
        elif self.steps or self.limit_s is None:
            return
        elif (output := sum(map(size_of, self.outputs))) != self.output:
            self.output, self.last = output, now
        elif now - self.looked_elsewhere > max(0.5, (self.limit_s or 0) / 20):
            before, self.looked_elsewhere = self.elsewhere, now
            self.elsewhere = sum(map(size_of, self.logs.glob("*/*/attempt_*/*/std*.log")))
            if before not in (-1, self.elsewhere):
                self.last = now

    @property
    def timeout_s(self) -> float | None:
        """How long the run may be silent; None until this is learned."""
        if self.limit_s is not None:
            return self.limit_s
        if self.steps < LEARNS_FROM:
            return None
        return max(LEAST_LEARNED_S, TIMES_LONGEST * self.longest_s)

    @property
    def silent_since(self) -> float:
        """The last sign of life, or when ranks were seen at work without one."""
        return max(self.last, self.since)

    def silent_s(self, now: float, lead_s: float = 0.0) -> float | None:
        """Return the time since the last sign of life; None if it is within the limit.

        None also means that it stays within the limit for `lead_s` more seconds.
        """
        timeout_s = self.timeout_s
        if timeout_s is None or now + min(lead_s, timeout_s / 2) - self.silent_since < timeout_s:
            return None
        if self.pauses():
            self.last = now  # a step may take its whole time after the pause
            return None
        return now - self.last

    def pauses(self) -> bool:
        """Whether the last event is newer than the last step and announces a pause."""
        events, metrics = (self.run_dir / f"{name}.jsonl" for name in ("events", "metrics"))
        try:
            if metrics.exists() and events.stat().st_mtime_ns < metrics.stat().st_mtime_ns:
                return False
            with events.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                event = json.loads(file.read().splitlines()[-1])
            return event.get("event") in PAUSES
        except (OSError, ValueError, IndexError, AttributeError, RecursionError):
            return False


# ---- The watchdog of a node


class Watchdog:
    """Answers requests, detects stalls on the node of rank 0, and kills ranks on request."""

    def __init__(
        self,
        folder: Path,
        logs: Path,
        limit_s: float | None,
        torchrun: Ending,
        parent: int = 0,
    ) -> None:
        self.torchrun, self.looked = torchrun, time.monotonic()
        self.folder, self.exchange = folder, logs / "watchdog"
        self.exchange.mkdir(parents=True, exist_ok=True)
        environ = os.environ  # of Slurm's nodes; of pods
        self.node = (
            environ.get("SLURMD_NODENAME") or environ.get("HOSTNAME") or socket.gethostname()
        )
        self.signs = Signs(logs.parent.parent, logs, limit_s)
        self.kills = limit_s is not None
        # Existing requests are old: in pods, a new rank may have the pid of an earlier rank.
        self.done = {path.name for path in self.exchange.iterdir()}
        self.changed_ns, self.changed = 0, 0.0  # the exchange's time, and when it was seen first
        self.began: float | None = time.monotonic()  # None once there are ranks
        self.parent = parent
        self.unseen: set[int] = set()  # children of torchrun while no rank has left a file
        self.watched: list[int] = []
        self.named = 0.0  # when the current stall was reported; 0 without a stall
        self.over = False  # whether the verdict on it is final
        self.used: list[tuple[float, dict[int, tuple[float, float]]]] = [(self.looked, {})] * 2
        self.mute: set[int] = set()  # pids of ranks that did not answer the last time
        self.before: list[Finding] = []  # the first look at a run that seems to stall,
        self.silent_since = 0.0  # and its last sign of life before that
        self.period: int | None = None  # in which the ranks were compared last
        self.judge_s: float | None = None  # when the arrivals are looked for next
        self.begun: dict[int, tuple[stragglers.Arrivals, str]] = {}
        self.taken: set[str] = set()  # names of the files of these arrivals
        self.slow_rank, self.since, self.compared = -1, time.monotonic(), float("-inf")
        self.log_steps: Any = None
        if pattern := environ.get("TRAIN_LOG_PATTERN"):
            import log_steps  # a file that only such a job has

            run_dir, rank = logs.parent.parent, environ.get("TRAIN_LOG_RANK", "first")
            self.log_steps = log_steps.LogSteps(run_dir, pattern, rank)
        self.trainer_status: Any = None
        program = Path(sys.argv[0]).with_name("trainer_status.py")
        if "KUBEFLOW_TRAINER_SERVER_URL" in environ and program.exists():  # in a TrainJob
            import trainer_status

            self.trainer_status = trainer_status.TrainerStatus(logs.parent.parent, environ)

    def newest_ranks(self) -> list[Rank]:
        """Return the newest ranks of this node, including those that have ended."""
        return [*filter(None, map(read_json, self.folder.glob("*.json")))]

    def ranks(self) -> list[Rank]:
        """Return the ranks that run on this node, sorted by rank."""
        return sorted(filter(is_alive, self.newest_ranks()), key=lambda rank: int(rank["rank"]))

    def new_files(self) -> list[str]:
        """Return the names of new requests in the exchange.

        All nodes share that folder: the watchdog lists it only after a change.
        """
        now = time.monotonic()
        try:
            changed_ns = self.exchange.stat().st_mtime_ns
            if changed_ns != self.changed_ns:
                self.changed_ns, self.changed = changed_ns, now
            elif now - self.changed > SAME_TIME_S:
                return []
            found = set(filter(EXCHANGED.fullmatch, os.listdir(self.exchange))) - self.done
        except OSError:  # the run directory was removed
            return []
        self.done |= found
        return sorted(found)

    def answer(self, name: str) -> None:
        """Write the state of this node's ranks to an answer file."""
        ranks = self.ranks()
        found = [self.examined(rank, self.folder) for rank in ranks]
        if self.kills:
            pids, (before, used_s) = [rank["pid"] for rank in ranks], self.used[0]
            passed_s, now_s = time.monotonic() - before, cpu_seconds(pids)
            for each in found:
                pairs = zip(now_s[each["pid"]], used_s.get(each["pid"], (0.0, 0.0)))
                each["cores"] = [max(0.0, round((now - old) / passed_s, 2)) for now, old in pairs]
        report = {
            "version": 1,
            "time": time.time(),
            "node": self.node,
            "world": max((rank["world"] for rank in ranks), default=0),
            "ranks": found,
        }
        write_json(self.exchange / f"answer-{name}-{self.node}-{os.getpid()}.json", report)

    def examined(self, rank: Rank, folder: Path) -> Finding:
        """Return the state of a rank; if it did not answer last time, use a short timeout."""
        limit_s = self.signs.limit_s  # the first look must be over before it
        patience_s = ANSWER_S if limit_s is None else max(MUTE_S, min(ANSWER_S, limit_s / 4))
        found = examine(rank, folder, MUTE_S if rank["pid"] in self.mute else patience_s)
        answered = found["threads"] or found["collectives"] is not None
        (self.mute.discard if answered else self.mute.add)(rank["pid"])
        return found

    def withdraw(self, name: str) -> None:
        """Remove a request that is no longer needed, and its answers."""
        for path in self.exchange.glob(f"a*-{name}*"):
            path.unlink(missing_ok=True)

    def ask_all(self, name: str, world: int) -> tuple[list[Finding], dict[int, str]]:
        """Return what all nodes answer in time: the state of each rank, and its node."""
        (self.exchange / f"ask-{name}").touch()
        self.done.add(f"ask-{name}")
        self.answer(name)
        deadline = time.monotonic() + ANSWERS_S
        while True:
            reports = [*filter(None, map(read_json, self.exchange.glob(f"answer-{name}-*.json")))]
            found = [each for report in reports for each in report["ranks"]]
            if len(found) >= world or time.monotonic() > deadline or self.torchrun.poll(100):
                nodes = {each["rank"]: one["node"] for one in reports for each in one["ranks"]}
                return found, nodes

    def name_stall(self, silent_s: float, world: int) -> bool:
        """Find the ranks that block the run, record them, and have them killed.

        Returns whether the run is stalled: it is not while ranks are at work. A rank that computes
        for longer than the limit is only reported.
        """
        name, before = f"stall-{time.time_ns()}", self.before
        found, nodes = self.ask_all(name, world)
        earlier, culprits = culprits_of(before), culprits_of(found)
        if is_busy(before, found, culprits) or earlier.keys() != culprits.keys():
            self.signs.since = time.monotonic()
            self.withdraw(name)
            return False
        silence = f"no {'step' if self.signs.steps else 'output'} for {silent_s:.0f} s"
        longest_s = max(LONGEST_S, TIMES_LIMIT * (self.signs.limit_s or 0))
        if self.kills and silent_s < longest_s and (working := at_work(found)):
            self.signs.since = time.monotonic()
            if not self.named:
                who = places_of(working, {each["rank"]: each for each in found}, nodes)
                do = "compute" if len(working) > 1 else "computes"
                why = f"{silence}: {who} {do}; no rank is killed before {longest_s:.0f} s"
                self.record("stalls", stalled=True, ranks=working, why=why, kills=False, asked=name)
                print(f"watchdog: {why}", file=sys.stderr, flush=True)
                self.named = self.signs.since
            else:
                self.withdraw(name)
            return False
        why = f"{silence}: {in_words(culprits, found, nodes, world)}"
        line = {"stalled": True, "ranks": sorted(culprits), "why": why, "kills": self.kills}
        self.record("stalls", **line, asked=name)
        print(f"watchdog: {why}", file=sys.stderr, flush=True)
        self.tell(why)
        if self.kills:
            pids = {each["rank"]: each["pid"] for each in found}
            end = {"why": why, "pids": {rank: pids.get(rank) for rank in culprits or [0]}}
            write_json(self.exchange / f"end-{time.time_ns()}.json", end)
        return True

    def look_for_straggler(self, now: float, ranks: Sequence[Rank]) -> None:
        """Record this node's arrivals once per period; on the node of rank 0, compare all nodes.

        The comparison does not wait for late nodes. Periods begin at the same time on all nodes, as
        far as their clocks agree.
        """
        world, folder = ranks[0]["world"], self.exchange / "arrivals"
        period_s = max(STRAGGLERS_S, world / 16)
        period = int(time.time() // period_s)
        if self.period is None:  # the ranks have just started
            self.period = period
        elif period != self.period:
            self.period, self.begun, self.taken = period, {}, set()
            self.judge_s = now + period_s / LOOKS_FOR_ARRIVALS  # the other nodes also write now
            folder.mkdir(exist_ok=True)
            found = [arrivals(rank, self.folder) for rank in ranks]
            report = {"version": 1, "period": period, "node": self.node, "ranks": found}
            write_json(folder / f"{self.node}-{os.getpid()}.json", report)
        if ranks[0]["rank"] != 0 or self.judge_s is None or now < self.judge_s:
            return
        self.judge_s = now + period_s / LOOKS_FOR_ARRIVALS
        for file in folder.glob("*.json"):
            if file.name not in self.taken and (report := read_json(file)).get("period") == period:
                self.taken.add(file.name)
                self.begun.update(begun_in(report))
        if len(self.begun) >= world:
            self.judge(self.begun)
            self.judge_s, self.begun = None, {}

    def judge(self, answers: Mapping[int, tuple[stragglers.Arrivals, str]]) -> None:
        """Record how long ranks wait, and the slowest rank if it has changed."""
        begun = {rank: each for rank, (each, _) in answers.items()}
        nodes = {rank: node for rank, (_, node) in answers.items()}
        compared = stragglers.compare(begun, nodes)
        slow = compared and compared.straggler
        now = time.monotonic()
        if compared and now - self.compared >= (now - self.since) / RECORDED:
            self.compared = now
            waits = [[rank, round(compared.waits[rank], 4), nodes[rank]] for rank in sorted(nodes)]
            self.record("ranks", waits=waits)
        if (-1 if slow is None else slow.rank) == self.slow_rank:
            return
        self.slow_rank = -1 if slow is None else slow.rank
        if slow is None:
            self.record("stragglers", rank=None)
            return
        faster = f"about {100 * slow.faster:.0f} % faster"
        if slow.at_most != slow.faster:
            faster = (
                "faster" if slow.at_most is None else f"up to {100 * slow.at_most:.0f} % faster"
            )
            if slow.faster >= 0.01:
                faster = f"at least about {100 * slow.faster:.0f} % faster"
        why = (
            f"rank {slow.rank} on {nodes[slow.rank]} is slower than the others, which wait for it; "
            f"without it, this run would be {faster}"
        )
        shares = {"faster": slow.faster, "at_most": slow.at_most}
        self.record("stragglers", rank=slow.rank, **shares, why=why)
        print(f"watchdog: {why}", file=sys.stderr, flush=True)

    def record(self, name: str, **fields: object) -> None:
        """Append a line to `stalls.jsonl`, `stragglers.jsonl` or `ranks.jsonl`."""
        line = json.dumps({"version": 1, "time": time.time(), **fields})
        with (self.exchange / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def tell(self, why: str) -> None:
        """Write a file with one sentence, which the job's script sends as a notification."""
        count = len([*self.exchange.glob("stall-*")])
        draft = self.exchange / f".stall.{os.getpid()}"
        draft.write_text(f"{why}\n", encoding="utf-8")
        draft.replace(self.exchange / f"stall-{count + 1}")

    def end(self, name: str) -> None:
        """Kill the ranks of this node that a file lists; torchrun's report gives the reason."""
        order = read_json(self.exchange / name)
        for rank in self.ranks():
            if order.get("pids", {}).get(str(rank["rank"])) == rank["pid"]:
                extra = {"timestamp": str(int(time.time())), "py_callstack": ""}
                error = {"message": f"StallError: {order.get('why')}", "extraInfo": extra}
                if rank["error_file"] and not Path(rank["error_file"]).exists():
                    write_json(Path(rank["error_file"]), {"message": error})
                os.kill(rank["pid"], signal.SIGKILL)

    def pause(self, seconds: float) -> bool:
        """Wait, and record printed steps meanwhile; return whether torchrun has ended.

        The last step is read before torchrun ends: torchrun polls its ranks ten times a second.
        """
        if not self.log_steps:
            return self.torchrun.poll(seconds * 1000)
        until, has_ended = time.monotonic() + seconds, False
        while time.monotonic() < until and not has_ended:
            has_ended = self.torchrun.poll(POLL_LOG_S * 1000)
            self.log_steps.look(self.newest_ranks())
        if has_ended:
            self.log_steps.finish()
        return has_ended

    def look(self) -> None:
        """Run all checks that are due."""
        for name in self.new_files():
            if name.startswith("ask-"):
                self.answer(name[len("ask-") :])
            else:
                self.end(name)
        now, ranks = time.monotonic(), self.ranks()
        if (
            now - self.looked > SUSPENDED_S
        ):  # all processes of the node were suspended, for example by scontrol suspend
            suspended_s = now - self.looked
            self.signs.last += suspended_s
            self.signs.since += suspended_s
            self.used = [(at + suspended_s, used) for at, used in self.used]
        limit_s, pids = self.signs.limit_s, [rank["pid"] for rank in ranks]
        if ranks:
            self.began = None
            if limit_s is not None and now - self.used[1][0] > limit_s / 2:
                self.used = [self.used[1], (now, cpu_seconds(pids))]
        elif self.began and limit_s is not None and now - self.began > max(limit_s, UNSEEN_S):
            children = {pid for pid, each in processes().items() if each[0] == self.parent}
            self.began = now
            if self.unseen & children:
                self.began = None
                print(f"watchdog: {UNSEEN}", file=sys.stderr, flush=True)
            self.unseen = children
        is_new = pids != self.watched
        if is_new:  # arrivals may be those of the earlier ranks
            self.watched, self.period, self.judge_s = pids, None, None
        if ranks and ranks[0]["world"] > 1:
            with contextlib.suppress(OSError):  # on a full disk; stalls count more
                self.look_for_straggler(now, ranks)
        if not ranks or ranks[0]["rank"] != 0:
            return
        if is_new:
            self.signs.begin(ranks, now=now)
        else:
            self.signs.look(now)
        if self.trainer_status:
            self.trainer_status.look(now)
        if self.named and self.signs.last > self.named:
            self.record("stalls", stalled=False)
            self.named, self.over = 0.0, False
        if self.over:
            return
        since = self.signs.silent_since
        if self.silent_since != since and self.signs.silent_s(now, LEAD_S) is not None:
            self.silent_since = since
            self.withdraw("stall-*-before")
            self.before, _ = self.ask_all(f"stall-{time.time_ns()}-before", ranks[0]["world"])
            return  # there may be a new sign of life
        silent_s = self.signs.silent_s(now)
        if silent_s is not None and self.name_stall(silent_s, ranks[0]["world"]):
            self.named, self.over = time.monotonic(), True


class Ending:
    """Detects the end of a process, by a pidfd if Python (3.9) and Linux (5.3) support it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.began = pid, process_start(pid)
        self.descriptor = select.poll()
        self.has_descriptor = False
        with contextlib.suppress(AttributeError, OSError):
            self.descriptor.register(os.pidfd_open(pid), select.POLLIN)  # novm
            self.has_descriptor = True

    def poll(self, limit_ms: float) -> bool:
        """Wait at most this long for the end; return whether the process has ended."""
        if self.has_descriptor:
            return bool(self.descriptor.poll(limit_ms))
        until = time.monotonic() + limit_ms / 1000
        while self.began is not None and process_start(self.pid) == self.began:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(0.1, left_s))
        return True


def main(folder: str, limit: str) -> None:
    """Watch, in the background, until the parent ends: the shell that becomes torchrun."""
    parent = os.getppid()
    torchrun = Ending(parent)
    if os.environ.get("TRAIN_LOG_PATTERN"):  # a torchrun that ends soon takes this folder with it
        importlib.import_module("log_steps")
    if os.fork():  # torchrun's only children must be the ranks
        return
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
    ):  # Slurm sends these signals to every process; the watchdog ends with torchrun
        signal.signal(number, signal.SIG_IGN)
    attempt = os.environ.get("TRAIN_ATTEMPT", "0")
    logs = Path(os.environ["TRAIN_RUN_DIR"]) / "logs" / f"attempt-{attempt}"
    limit_s = None if limit == "learned" else float(limit)
    try:
        watchdog = Watchdog(Path(folder), logs, limit_s, torchrun, parent)
        poll_s = POLL_LEARNED_S if limit_s is None else POLL_S
        while True:
            try:
                if watchdog.pause(poll_s):
                    break
                watchdog.look()
            except Exception as error:  # such as a full disk; the next look may succeed
                print(f"watchdog: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                torchrun.poll(10_000)
            watchdog.looked = time.monotonic()
        if watchdog.trainer_status and any(rank["rank"] == 0 for rank in watchdog.newest_ranks()):
            watchdog.trainer_status.finish()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
