"""What others have written costs work in proportion to its size, and bounded memory.

Each row of `READERS` is a reader with a hostile input of n records. The reader runs on n, 2n and 4n
of them, and three costs are counted; no time is measured:

- the lines of Python that were executed, once for each turn of a loop or comprehension;
- the bytes by which memory was at its highest above the end of the line before, which shows when C
  copies something that grows, as in `rows | more`, `rest + chunk` or `words[1:]`;
- the items of the lists that C has gone through, as in `rows.remove(row)`.

What a doubling adds may at most be `MOST` times what the doubling before has added: 2 is linear, 4
is quadratic. The patterns of the readers, which C matches, are in `test_linear_patterns.py`.
"""

import contextlib
import gc
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

import toolkit
from tests.support.told_run import run_at
from toolkit.cli.summary import goodput_lines, summary_lines, summary_of, top_lines, top_rows
from toolkit.kubernetes.client.connection import lines_of
from toolkit.kubernetes.failure import ContainerOutput
from toolkit.kubernetes.failure import first_failure as failure_of_pods
from toolkit.kubernetes.pods import last_words
from toolkit.runs.evidence import stacks
from toolkit.runs.evidence.progress import ProgressReader
from toolkit.runs.evidence.startup import waits_for
from toolkit.runs.records.log_reader import attempt_spans
from toolkit.runs.records.points import read_points
from toolkit.runs.records.registry import RunRecord
from toolkit.runs.records.run_directory import read_metrics
from toolkit.runs.records.scheduler_times import Scheduled
from toolkit.runs.run import ForeignRun, Run
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.views.curves import curves_and_starts
from toolkit.runs.views.forward import _Forwarder
from toolkit.runs.views.goodput import goodput_of
from toolkit.runs.views.trackers import _AppendingTracker
from toolkit.supervisor.evidence.torchrun_report import read_reports, report_texts
from toolkit.supervisor.evidence.traceback import last_trace

MOST = 2.4
"""By how much more a doubling may add than the one before; a table that grows adds a little."""

FLOOR = {"lines": 600, "allocated": 150_000, "items": 500}
"""What counts as nothing: caches, tables that grow by steps."""

COUNTS = 3
"""How often a reader is counted until it is linear. `tracemalloc` counts the whole process, so a
thread that another test has left behind adds to one count; a reader that is not linear fails each.
"""

PEAK_BASE, PEAK_EACH = 3 << 20, 60
"""Most bytes of memory: so many, and so many for each byte of the input."""

T = 1_700_000_000.0


# ---- Costs


class Cost(NamedTuple):
    """What an action has cost."""

    lines: int
    allocated: int
    items: int
    peak: int


_SCANS = {"remove", "index", "count", "insert"}


def cost_of(action: Callable[[], object]) -> Cost:
    """Run an action, and count."""
    executed = allocated = items = last = 0
    memory, forget_peak = tracemalloc.get_traced_memory, tracemalloc.reset_peak
    highest = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal executed, allocated, last, highest
        if event == "line":
            executed += 1
            now, peak = memory()
            allocated += peak - last
            last, highest = now, max(highest, peak)
            forget_peak()
        return trace

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal items
        if event == "c_call" and argument.__name__ in _SCANS:
            owner = argument.__self__
            items += len(owner) if isinstance(owner, list) else 0

    gc.collect()
    gc.disable()
    before = sys.gettrace(), sys.getprofile()
    tracemalloc.start()
    try:
        sys.setprofile(profile)
        sys.settrace(trace)
        action()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        peak = max(highest, memory()[1])
        tracemalloc.stop()
        gc.enable()
    return Cost(executed, allocated, items, peak)


# ---- Inputs

RANKS = "logs/attempt-0/node-0/r/attempt_0/{i}/stderr.log"


def lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def metrics(row: Callable[[int], Mapping[str, Any]]) -> "Input":
    return lambda n: {"metrics.jsonl": lines({"time": T + i, **row(i)} for i in range(n))}


def events(row: Callable[[int], Mapping[str, Any]]) -> "Input":
    def files(n: int) -> Mapping[str, str]:
        recorded = [{"time": T + i, "event": "start", "world_size": 1, **row(i)} for i in range(n)]
        own = ({k: v for k, v in row.items() if k != "event"} | {"step": 1} for row in recorded)
        return {"events.jsonl": lines(recorded), "metrics.jsonl": lines(own)}

    return files


def log(text: Callable[[int], str]) -> "Input":
    ended = {"logs/attempt-0/exit_status": "1\n", RANKS.format(i=0): ""}
    return lambda n: {**ended, "logs/attempt-0/node-0.log": "".join(map(text, range(n)))}


def each(path: str, text: str = "") -> "Input":
    """Make n files, whose paths have `{i}` in them."""
    return lambda n: {path.format(i=i, n=n): text.format(i=i, n=n) for i in range(n)}


def both(*inputs: "Input") -> "Input":
    return lambda n: {name: text for one in inputs for name, text in one(n).items()}


def fixed(**files: str) -> "Input":
    return lambda n: {name.replace("__", "/"): text for name, text in files.items()}


Input = Callable[[int], Mapping[str, str]]
"""Returns the files of a run directory by the number of their hostile parts."""

REPORT = (
    "  time      : 2026-01-01_00:00:00\n  host      : n{i}\n  rank      : {i} (local_rank: {r})\n"
    "  exitcode  : 1 (pid: 1)\n  error_file: {file}\n"
)


def reports(of: Callable[[int], Mapping[str, object]]) -> Input:
    place = {"file": "<N/A>"}
    return log(lambda i: REPORT.format(**{"i": i, "r": 0, **place, **of(i)}))


FILE = "/x/logs/attempt-0/node-0/r/attempt_0/{}/error.json"
EXCEPTION = "Traceback (most recent call last):\n  x\nValueError: {i}\n"

ALTERNATE = metrics(lambda i: {"step": i, "restart": i % 2, "loss": 1.0})
EACH_RESTARTS = metrics(lambda i: {"step": i, "restart": i, "loss": 1.0})
AGAIN = metrics(lambda i: {"step": 1, "loss": 1.0})
DOWN = metrics(lambda i: {"step": 10**9 - i, "loss": 1.0})
ZIGZAG = metrics(lambda i: {"step": i % 7, "loss": 1.0})
NEW_NAMES = metrics(lambda i: {"step": 1, f"name{i}": 1.0})
UP = metrics(lambda i: {"step": i, "loss": 1.0})
BACK_IN_TIME = metrics(lambda i: {"step": i, "restart": i, "time": T - i})

STARTS = events(lambda i: {})
STARTS_BACK = events(lambda i: {"time": T - i})
READY = events(lambda i: {"event": "ready", "restart": i, "began": T, "phases": {"setup": 1}})

ONLY_TIMES = log(lambda i: "  time: 1\n")
TIMES_THEN_RANKS = both(
    lambda n: log(lambda i: "  time: 1\n" if i < n // 2 else "  rank: 1\n")(n),
)
LOOPS = log(lambda i: "  host: 1\n  time: 1\n  time: 1\n  host: 2\n")
TRACEBACKS = log(lambda i: "Traceback (most recent call last):\n  File\n\nDuring handling of\n")
HELD = log(lambda i: "Traceback (most recent call last):\n" if i == 0 else "  x\n")
MIXED = log(lambda i: f"[rank {i}] x\n\n[W1 x socket.cpp:1] [c10d] The\n[rank 1] a[rank 2] \n")


def stream(text: str) -> Callable[[int], list[str]]:
    return lambda n: (text * n).split("\n")


class _Nowhere(_AppendingTracker):
    """A tracker that keeps nothing."""

    place = ""

    def __init__(self) -> None:
        super().__init__(sent=-1)

    def send(self, row: Any) -> None: ...
    def flush(self) -> None: ...


# ---- Readers


def foreign(folder: Path) -> Run:
    return ForeignRun(
        RunRecord(uri="local://x", name="x", job="x", profile={}, created=T, run_dir=folder)
    )


RUNNING = RunStatus(state=RunState.RUNNING)
FAILED = RunStatus(state=RunState.FAILED)


def drain(values: Iterable[object]) -> None:
    for _ in values:
        pass


def read_status(folder: Path, status: RunStatus = FAILED) -> None:
    run = run_at(folder, created=T)
    run.told = status
    drain(summary_lines(summary_of(run, status)))


def read_running(folder: Path) -> None:
    read_status(folder, RUNNING)
    drain(top_lines(top_rows([(run_at(folder), RUNNING)], {})))


def read_page(folder: Path) -> None:
    run_at(folder)._repr_html_()


def read_report(folder: Path) -> None:
    run = run_at(folder, created=T)
    run.told = FAILED
    toolkit.report([run])


def compare(folder: Path) -> None:
    run = run_at(folder, created=T)
    run.told = FAILED
    toolkit.report([run, run])


def read_goodput(folder: Path) -> None:
    drain(goodput_lines("x", goodput_of(folder, submitted=T)))


def read_goodput_by_times(folder: Path) -> None:
    count = len(folder.joinpath("metrics.jsonl").read_bytes().split(b"\n"))
    goodput_of(folder, submitted=T, times=[Scheduled(T, T, T + i) for i in range(count)])


def read_logs(folder: Path) -> None:
    drain(foreign(folder).logs())


def read_foreign(folder: Path) -> None:
    foreign(folder).status()
    foreign(folder).failure()


def read_stacks(folder: Path) -> None:
    answers = stacks._answers_in(folder / "logs/attempt-0/watchdog", "answer-")
    found = stacks.read_answers(answers)
    drain(found.lines())


def forward(folder: Path) -> None:
    run: Any = SimpleNamespace(recorded=lambda name: contextlib.nullcontext(folder))
    _Forwarder(run, _Nowhere()).step()


Reader = Callable[[Path], object]
EVERY_METRICS: Mapping[str, Reader] = {
    "metrics()": read_metrics,
    "curves": curves_and_starts,
    "goodput": read_goodput,
    "notebook": read_page,
    "forward": forward,
}


@dataclass(frozen=True)
class Row:
    """A reader with an input."""

    files: Input
    reader: Reader
    size: int = 20
    limits: Mapping[str, int] = field(default_factory=dict)
    """Limits of modules that are lowered, so that a small input reaches them."""

    flat: bool = False
    """Whether memory does not grow with the input at all."""


def in_memory(make: Callable[[int], Any], read: Callable[[Any], object], size: int = 20) -> Row:
    """Return the row of a reader of values: the folder's name is the size."""
    return Row(lambda n: {}, lambda folder: read(make(int(folder.name))), size)


def attempts(text: str, name: str) -> Input:
    return each(f"logs/attempt-{{i}}/{name}", text)


def ranks_record(n: int) -> Mapping[str, str]:
    row = {"time": T, "waits": [[i, 0.5, "node"] for i in range(n)]}
    return {"logs/attempt-0/watchdog/ranks.jsonl": lines([row])}


def ranks_records(n: int) -> Mapping[str, str]:
    row = {"time": T, "waits": [[0, 0.5, "node"], [1, 0.1, "node"]]}
    return {"logs/attempt-0/watchdog/ranks.jsonl": lines([row] * n)}


def answer(n: int) -> Mapping[str, str]:
    ranks = [{"rank": i, "stack": [["f.py", i, "f"]], "collectives": {}} for i in range(n)]
    text = json.dumps({"world": n, "node": "a", "ranks": ranks})
    return {"logs/attempt-0/watchdog/answer-1-a.json": text}


def stalls(n: int) -> Mapping[str, str]:
    row = {"stalled": True, "why": "w", "asked": "1", "time": T}
    folder = "logs/attempt-0/watchdog"
    return {
        f"{folder}/stalls.jsonl": lines([row] * n),
        f"{folder}/stragglers.jsonl": lines([{"why": "w"}] * n),
    }


def pod_output(text: Callable[[int], str]) -> Callable[[int], list[ContainerOutput]]:
    def make(n: int) -> list[ContainerOutput]:
        printed = "".join(map(text, range(n))).split("\n")
        out = ContainerOutput(
            pod="node-0",
            attempt=0,
            exit_code=1,
            reason="",
            ended=T,
            lines=[(T, t) for t in printed],
        )
        return [out]

    return make


class Dribble:
    """A response that comes byte by byte."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def stream(self, amt: None, decode_content: bool) -> Iterator[bytes]:
        return (self.content[at : at + 1] for at in range(len(self.content)))


AGAIN_LINE = "E0101 00:00:00.0 7 t.py:9] failed (exitcode: 1) local_rank: 0 (pid: 1) of x\n"

READERS: dict[str, Row] = {
    **{
        f"{kind}: {name}": Row(files, reader)
        for kind, files in {
            "restarts alternate": ALTERNATE,
            "each record restarts": EACH_RESTARTS,
            "a step again and again": AGAIN,
            "steps go down": DOWN,
            "steps in zigzag": ZIGZAG,
            "new names at one step": NEW_NAMES,
        }.items()
        for name, reader in EVERY_METRICS.items()
    },
    "goodput: times go back": Row(BACK_IN_TIME, read_goodput),
    "goodput: starts alike": Row(STARTS, read_goodput),
    "goodput: starts alike, times go back": Row(STARTS_BACK, read_goodput),
    "goodput: ready, again and again": Row(READY, read_goodput, size=40),
    "goodput: as many times of the scheduler": Row(EACH_RESTARTS, read_goodput_by_times),
    "report: each record restarts": Row(
        EACH_RESTARTS, read_report, size=60, limits={"views.report._MOST_STARTS": 30}
    ),
    "report: words of a job file": Row(
        both(UP, lambda n: {"job.yaml": "args: [" + "a, " * n + "b]\n"}), compare
    ),
    "report: stalls": Row(stalls, read_report),
    "report: ranks": Row(ranks_record, read_report),
    "report: waits of ranks": Row(
        ranks_records, read_report, limits={"evidence.rank_waits._MOST_SHARES": 64}
    ),
    "running: stalls": Row(stalls, read_running),
    "running: ranks": Row(ranks_record, read_running),
    "running: waits of ranks": Row(ranks_records, read_running),
    "running: restarts": Row(ALTERNATE, read_running),
    "running: starts of torchrun": Row(
        each("logs/attempt-0/node-{i}/r/attempt_0/0/stderr.log"), read_running, size=10
    ),
    "progress: a step again and again": Row(
        AGAIN, lambda folder: ProgressReader(folder).progress()
    ),
    "waits for: nodes": Row(
        both(
            fixed(**{"job.yaml": "resources: {nnodes: 1000}\n"}),
            lambda n: {"logs/attempt-0/nodes": "\n".join(f"n{i}" for i in range(n))},
        ),
        lambda folder: waits_for(folder, None),
    ),
    "stacks: ranks": Row(answer, read_stacks),
    "stacks: answers": Row(
        each(
            "logs/attempt-0/watchdog/answer-{i}.json",
            '{{"world": {n}, "ranks": [{{"rank": {i}}}]}}',
        ),
        read_stacks,
    ),
    **{
        f"{name}: {kind}": Row(files, reader)
        for kind, files in {
            "times alone": ONLY_TIMES,
            "times, then ranks": TIMES_THEN_RANKS,
            "lines out of order": LOOPS,
            "reports of hosts": reports(lambda i: {}),
            "reports of a rank": reports(lambda i: {"i": 0}),
        }.items()
        for name, reader in {"status": read_status, "foreign": read_foreign}.items()
    },
    "status: reports and folders of ranks": Row(
        both(reports(lambda i: {"r": i}), each(RANKS, EXCEPTION)), read_status, size=10
    ),
    "status: reports with files and folders of ranks": Row(
        both(reports(lambda i: {"r": i, "file": FILE.format(i)}), each(RANKS, EXCEPTION)),
        read_status,
        size=10,
    ),
    "status: folders of restarts": Row(
        both(
            fixed(logs__attempt__=""),
            each("logs/attempt-0/node-0/r/attempt_{i}/0/stderr.log", EXCEPTION),
            lambda n: {"logs/attempt-0/exit_status": "1"},
        ),
        read_status,
        size=10,
    ),
    "status: folders of nodes": Row(
        both(
            each("logs/attempt-0/node-{i}/r/attempt_0/0/stderr.log", EXCEPTION),
            lambda n: {
                "logs/attempt-0/exit_status": "1",
                "logs/attempt-0/nodes": "\n".join(f"n{i}" + "x" * 1000 for i in range(n)),
            },
        ),
        read_status,
        size=10,
    ),
    "status: attempts that gave up": Row(attempts("gave_up: {i}", "reason"), read_status),
    "logs: attempts": Row(attempts("", "exit_status"), read_logs),
    "logs: attempts with notes": Row(attempts("{i} logs/job.log\n", "log"), read_logs, size=15),
    "logs: an attempt among many": Row(
        attempts("{i} logs/job.log\n", "log"), lambda folder: attempt_spans(folder, 0), size=15
    ),
    **{
        f"logs: {kind}": Row(
            files, read_logs, size, limits={"records.log_reader._CHUNK": 256, **limits}, flat=True
        )
        for kind, (files, limits, size) in {
            "a traceback that does not end": (HELD, {"records.log_reader._MOST_HELD": 20}, 200),
            "a traceback of long lines": (HELD, {"records.log_reader._HELD_CHARACTERS": 200}, 200),
            "tracebacks": (TRACEBACKS, {"records.log_reader._MOST_HELD": 20}, 60),
            "mixed lines": (MIXED, {}, 60),
        }.items()
    },
    "logs: a line that does not end": Row(
        log(lambda i: "x" * 400), read_logs, limits={"records.log_reader._CHUNK": 256}
    ),
    "reports: times, then ranks": in_memory(
        lambda n: ["  time: 1"] * n + ["  rank: 1"] * n, read_reports
    ),
    "reports: texts": in_memory(
        stream("  rank: 1\n  error_file: x\n  traceback : a\nb\n"), report_texts
    ),
    "tracebacks: chained": in_memory(
        stream(
            "Traceback (most recent call last):\n  a\nE: 1\n\nDuring handling of the above "
            "exception, another exception occurred:\n\n"
        ),
        last_trace,
    ),
    "tracebacks: syntax errors": in_memory(stream('  File "x", line 1\nx\n'), last_trace),
    "pods: starts of ranks": in_memory(
        pod_output(lambda i: f"{AGAIN_LINE}x\nx\n[rank 0] x\n[rank 0] y\n"), failure_of_pods
    ),
    "pods: one start": in_memory(
        pod_output(lambda i: AGAIN_LINE if i == 0 else "x\n[rank 0] x\n"), failure_of_pods, size=80
    ),
    "pods: reports of a rank": in_memory(
        pod_output(lambda i: REPORT.format(i=0, r=0, file="<N/A>") + "[rank 0] x\n"),
        failure_of_pods,
    ),
    "pods: tracebacks": in_memory(
        pod_output(lambda i: AGAIN_LINE + f"[rank {i}] Traceback (most recent call last):\n"),
        failure_of_pods,
    ),
    "pods: last words": in_memory(
        lambda n: "".join(f"[rank {i}] x\n  time: 1\n" for i in range(n)), last_words
    ),
    "pods: lines that dribble": in_memory(
        lambda n: Dribble(b"x" * 50 * n + b"\n"), lambda response: drain(lines_of(response))
    ),
    "sweep: points": Row(
        lambda n: {"points.jsonl": lines({"name": f"p{i}", "settings": {}} for i in range(n))},
        read_points,
    ),
}


def written(folder: Path, files: Mapping[str, str]) -> int:
    folder.mkdir(parents=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return sum(map(len, files.values())) + 100 * len(files)


@pytest.mark.parametrize("name", READERS)
def test_work_is_linear_and_memory_is_bounded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = READERS[name]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for limit, value in row.limits.items():
        monkeypatch.setattr(f"toolkit.runs.{limit}", value)
    folders: list[Path] = []
    size = 0
    for count in (row.size, 2 * row.size, 4 * row.size):
        folders.append(tmp_path / str(count))
        size = written(folders[-1], row.files(count))
    row.reader(folders[0])  # imports, caches
    for _ in range(COUNTS):
        costs = [cost_of(lambda folder=folder: row.reader(folder)) for folder in folders]  # type: ignore[misc]
        wrong = beyond_linear(costs)
        if not wrong:
            break
    assert not wrong, wrong
    if row.flat:
        assert costs[2].peak - costs[0].peak < 30_000
    assert costs[2].peak <= PEAK_BASE + PEAK_EACH * size


def beyond_linear(costs: list[Cost]) -> str:
    """Return which cost of n, 2n and 4n records grows by more than `MOST`; empty if none."""
    for kind, floor in FLOOR.items():
        first, second, third = (getattr(cost, kind) for cost in costs)
        if third - second > MOST * max(second - first, floor):
            return f"{kind}: {first}, {second}, {third}"
    return ""


def _merges(n: int) -> None:
    rows: dict[int, int] = {}
    for i in range(n):
        rows = rows | {i: i}


def _adds(n: int) -> None:
    rest = b""
    for _ in range(n):
        rest = rest + b"x" * 100


def _cuts(n: int) -> None:
    words = list(range(n))
    while words:
        words = words[1:]


def _compares(n: int) -> None:
    assert [sum(i == k for k in range(n)) for i in range(n)]


def _removes(n: int) -> None:
    rows = list(range(n))
    while rows:
        rows.remove(rows[-1])


def _walks(n: int) -> None:
    seen = [i for i in range(n) if all(k != i for k in range(i))]
    assert len(seen) == n


def _keeps(n: int) -> None:
    rows = [f"{i} " * 10 for i in range(n)]
    assert len([row for row in rows if row]) == n


@pytest.mark.parametrize(
    ("action", "kind", "size"),
    [
        (_merges, "allocated", 300), (_adds, "allocated", 300), (_cuts, "allocated", 300),
        (_compares, "lines", 40), (_walks, "lines", 40), (_removes, "items", 300),
        (_keeps, "", 300),
    ],
)  # fmt: skip
def test_what_is_not_linear_is_found(action: Callable[[int], None], kind: str, size: int) -> None:
    action(size)
    costs = [cost_of(lambda n=n: action(n)) for n in (size, 2 * size, 4 * size)]  # type: ignore[misc]
    assert beyond_linear(costs).partition(":")[0] == kind, costs
