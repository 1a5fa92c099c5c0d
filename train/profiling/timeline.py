"""Time spent per activity in traced steps, computed from the events of a trace, without torch.

Each moment of a step counts once, for the first of these that holds at that moment:

compute        an operator works on some CPU thread, or a kernel on the GPU
communication  a collective, a message or a copy between GPUs is under way, waiting included
data           the loop waits for its next batch, or the batch is on its way to the GPU
idle           none of these: Python, launching, or waiting for something that is not traced

So communication hidden under compute costs nothing here; it is listed as `hidden`. The four
parts sum up to the wall time of the steps. With a GPU, only work of the GPU counts as compute: the
CPU operators that launch its kernels do not.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UsageError

Event = Mapping[str, Any]
Interval = tuple[float, float]
Kind = Literal["compute", "communication", "data", "other"]

STEP = "train step "
DATA = "data"

_BY_CPU = ("gloo:", "mpi:")
_COMMUNICATION = (*_BY_CPU, "nccl:", "c10d::", "_c10d_functional::", "record_param_comms")
_WRAPPERS = ("autograd::", "torch::autograd::", "torch::distributed::")
"""Operators that only call others; their remaining time is waiting or bookkeeping."""
_COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Which steps to trace, counted as in `metrics.jsonl`."""

    first: int
    """The first traced step, counted from 1."""
    last: int
    """The last traced step, inclusive."""

    @classmethod
    def parse(cls, text: str) -> "Profile":
        """Read `10:13`, or `10` for one step.

        Raises:
            UsageError: the text has another form, or the last step precedes the first.

        >>> Profile.parse("10:13")
        Profile(first=10, last=13)
        """
        match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text)
        if not match:
            raise UsageError(f"--profile {text!r}: write the first and the last step, as 10:13")
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1 or last < first:
            raise UsageError(f"--profile {text!r}: steps count from 1 and go up, as in 10:13")
        return cls(first=first, last=last)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One name in the list of what took longest."""

    name: str
    """Operator or kernel."""
    seconds: float
    """Its own time, without that of the operators it called, over all traced steps."""
    calls: int
    """How often."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Seconds over all traced steps; the first four sum up to `wall`."""

    compute: float
    """Time of computation."""
    communication: float
    """Time of communication without computation."""
    data: float
    """Time of data loading without either."""
    idle: float
    """Time of none of these."""
    hidden: float
    """Time of communication during computation; part of `compute`."""
    wall: float
    """The traced steps from start to end."""
    steps: int
    """How many steps were traced."""
    operations: tuple[Operation, ...]
    """By their own time, longest first."""


def split(events: Iterable[Event]) -> Split:
    """Split the steps of a trace.

    `events` are `traceEvents` of a Chrome trace by torch.profiler in which the loop has marked its
    steps (`STEP` and a number) and the fetching of data (`DATA`).
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = union(_interval(e) for e in spans if str(e["name"]).startswith(STEP) and _on_cpu(e))
    pieces = list(_device_pieces(spans))
    has_device = bool(pieces)
    for kind, name, piece in _cpu_pieces(spans):
        # With a GPU, the CPU's operators and NCCL calls only launch work.
        if not has_device or kind == "data" or name.startswith(_BY_CPU):
            pieces.append((kind, name, piece))
    busy: dict[Kind, list[Interval]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for kind, name, piece in pieces:
        busy[kind].append(piece)
        if name != DATA and not name.startswith(STEP):
            times[name].append(length(overlap([piece], steps)))
    # An asynchronous message lasts until its end, even during operators of the requesting thread.
    busy["communication"] += [
        _interval(e) for e in spans if str(e["name"]).startswith(_BY_CPU) and _on_cpu(e)
    ]
    compute = overlap(union(busy["compute"]), steps)
    talk = overlap(union(busy["communication"]), steps)
    fetch = overlap(union(busy["data"]), steps)
    hidden, wall = length(overlap(talk, compute)), length(steps)
    until_talk = length(union([*compute, *talk]))
    until_data = length(union([*compute, *talk, *fetch]))
    calls = Counter(
        str(e["name"]) for e in spans if any(start <= float(e["ts"]) < end for start, end in steps)
    )
    return Split(
        compute=length(compute) / 1e6,
        communication=(until_talk - length(compute)) / 1e6,
        data=(until_data - until_talk) / 1e6,
        idle=(wall - until_data) / 1e6,
        hidden=hidden / 1e6,
        wall=wall / 1e6,
        steps=sum(str(e["name"]).startswith(STEP) and _on_cpu(e) for e in spans),
        operations=tuple(
            Operation(name=name, seconds=sum(own) / 1e6, calls=calls[name])
            for name, own in sorted(times.items(), key=lambda item: -sum(item[1]))
            if calls[name]
        ),
    )


def _on_cpu(event: Event) -> bool:
    return event.get("cat") in ("cpu_op", "user_annotation")


def _interval(event: Event) -> Interval:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _device_pieces(spans: Sequence[Event]) -> Iterator[tuple[Kind, str, Interval]]:
    """Yield the intervals of a GPU's work. Its events are not nested: each keeps its whole time."""
    fetches = union(_interval(e) for e in spans if e["name"] == DATA and _on_cpu(e))
    # Copies to the GPU outside of these intervals carry something else than a batch: parameters
    # from host memory, or numbers to exchange.
    fetched = {
        _correlation(e): overlap([_interval(e)], fetches)
        for e in spans
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    for event in spans:
        name, category = str(event["name"]), event.get("cat")
        if category == "kernel":
            # ncclDevKernel_… since NCCL 2.19, ncclKernel_… before; ncclSymkDevKernel_… on windows.
            kind: Kind = "communication" if name.startswith("nccl") else "compute"
            yield kind, name, _interval(event)
        elif category in ("gpu_memcpy", "gpu_memset"):
            kind = "compute"
            if "PtoP" in name:
                kind = "communication"
            elif "HtoD" in name and fetched.get(_correlation(event), True):
                kind = "data"
            yield kind, name, _interval(event)


def _correlation(event: Event) -> object:
    return event.get("args", {}).get("correlation")


def _cpu_pieces(spans: Iterable[Event]) -> Iterator[tuple[Kind, str, Interval]]:
    """Give each event of a CPU thread the pieces of time in which no event inside it runs."""
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in filter(_on_cpu, spans):
        threads[event["pid"], event["tid"]].append(event)
    open_events: list[tuple[float, Kind, str]] = []
    now = 0.0

    def advance(until: float) -> Iterator[tuple[Kind, str, Interval]]:
        nonlocal now
        while open_events:
            end, kind, name = open_events[-1]
            if min(end, until) > now:
                yield kind, name, (now, min(end, until))
                now = min(end, until)
            if end > until:
                return
            open_events.pop()

    for thread in threads.values():
        for event in sorted(thread, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
            start, end = _interval(event)
            yield from advance(start)
            now = start
            # Threads that fetch the data count as data loading.
            fetching = bool(open_events) and open_events[-1][1] == "data"
            open_events.append((end, "data" if fetching else _kind(event), str(event["name"])))
        yield from advance(float("inf"))


def _kind(event: Event) -> Kind:
    """Return what an event of a CPU thread does while no event inside it runs."""
    name = str(event["name"])
    if name == DATA:
        return "data"
    if name.startswith(_COMMUNICATION):
        return "communication"
    if name.startswith(_COMPILED):
        return "compute"
    # Names without a namespace are nodes of autograd: their work is in the operators they call.
    computes = event.get("cat") == "cpu_op" and "::" in name and not name.startswith(_WRAPPERS)
    return "compute" if computes else "other"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that touch; the result is sorted.

    >>> union([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the moments that two unions share.

    >>> overlap([(0, 2), (3, 9)], [(1, 4), (8, 10)])
    [(1, 2), (3, 4), (8, 9)]
    """
    shared, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            shared.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length(intervals: Iterable[Interval]) -> float:
    """Add up a union."""
    return sum(end - start for start, end in intervals)
