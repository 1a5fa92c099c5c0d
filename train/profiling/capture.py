"""`--profile 10:13`: trace these steps, and print the time spent per activity.

Every rank writes `profile/attempt-N/rank-R.json` into the run directory, a Chrome trace. `timeline`
defines how time is split. Tracing makes short operators look slower than they are: compare the
parts with each other, and with the untraced steps' speed in `metrics.jsonl`.
"""

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from ..rundir.console import Console
from ..rundir.files import RunDirectory
from .timeline import DATA, STEP, Profile, Split, split

MOST_OPERATIONS = 8
_OFF = nullcontext()


class Profiler:
    """Traces the steps of a profile; without one it does nothing, in about a microsecond."""

    def __init__(self, profile: Profile | None, directory: RunDirectory, console: Console) -> None:
        self.profile, self.rank_info, self.console = profile, directory.rank_info, console
        self.folder = directory.path / "profile" / f"attempt-{self.rank_info.attempt}"
        self._trace: torch.profiler.profile | None = None

    def step(self, number: int) -> AbstractContextManager[None]:
        """Surround a step: trace it if requested, and write the traces after the last of them."""
        profile = self.profile
        if profile is None or not profile.first <= number <= profile.last:
            return _OFF
        return self._traced(number, profile.last)

    def data(self) -> AbstractContextManager[object]:
        """Surround the fetching of a batch."""
        return record_function(DATA) if self._trace else _OFF

    @contextmanager
    def _traced(self, number: int, last: int) -> Iterator[None]:
        if self._trace is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            else:
                # kineto reports each start and stop on standard error, above its error level. With
                # a GPU its reports matter: this process may lack the permission to trace the GPU.
                os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            self._trace = torch.profiler.profile(activities=activities)
            # Start before the first step's span: starting may take longer than a step.
            self._trace.start()
        with record_function(f"{STEP}{number}"):
            yield
        if number == last:
            self.close()

    def close(self) -> None:
        """Write and print the traces; for a run that ends before the last of the steps.

        A trace that cannot be written is reported, but does not end training.
        """
        trace, self._trace = self._trace, None
        if trace is None:
            return
        trace.stop()
        path = self.folder / f"rank-{self.rank_info.rank}.json"
        try:
            events = _write(trace, path)
        except (OSError, ValueError, RuntimeError) as error:
            self.console.complain(f"no trace in {path}: {error}", every_rank=True)
            return
        if self.rank_info.rank == 0:
            self.console.say("\n".join(_lines(split(events))))
            self.console.say(f"  traces: {self.folder}/rank-*.json, for ui.perfetto.dev")


def _write(trace: torch.profiler.profile, path: Path) -> list[dict[str, object]]:
    """Write a trace, and read it back to detect a file truncated by a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp.json")
    try:
        trace.export_chrome_trace(str(draft))
        content = json.loads(draft.read_text(encoding="utf-8"))
        events: list[dict[str, object]] = content["traceEvents"]
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return events


def _lines(parts: Split) -> list[str]:
    steps, wall = max(parts.steps, 1), max(parts.wall, 1e-12)
    lines = [f"profile of {parts.steps} steps on rank 0, {parts.wall / steps * 1e3:.2f} ms each:"]
    notes = {
        "communication": f"and {parts.hidden / steps * 1e3:.2f} ms hidden under compute",
        "idle": "Python, launching, waiting for what is not traced",
    }
    for name in ("compute", "communication", "data", "idle"):
        seconds = getattr(parts, name)
        note = f"  ({notes[name]})" if name in notes else ""
        lines.append(f"  {name:<14}{seconds / wall:>7.1%} {seconds / steps * 1e3:>10.3f} ms{note}")
    lines.append("  slowest operations, by their own time per step:")
    lines += [
        f"  {operation.seconds / steps * 1e3:>10.3f} ms {operation.calls / steps:>7.4g} x  "
        f"{operation.name[:60]}"
        for operation in parts.operations[:MOST_OPERATIONS]
    ]
    return lines
