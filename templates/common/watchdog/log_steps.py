"""Reads steps in the output of a rank, and records them as a script with telemetry would.

The job file's `log_pattern` is in TRAIN_LOG_PATTERN; the rank whose output is read, `first` or
`last`, is in TRAIN_LOG_RANK. A line with a new `step` becomes a record in `metrics.jsonl`. Figures
in a line without a step, or with the same step again, are added to that step.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
"""How much of a rank's output is read at a time."""

LONGEST_LINE = 4000
"""In bytes; the rest is left out. Some patterns need a time that grows with the line's square."""

NONE = -1
"""The number of the step before the first line."""

LINE_ENDS = re.compile(rb"[\r\n]+")  # a progress bar ends its lines with a carriage return


def size_of(path: Path) -> int:
    """Return the size of a file, 0 for a missing one."""
    return path.stat().st_size if path.exists() else 0


def figures_in(pattern: re.Pattern[str], line: str) -> dict[str, float]:
    """Return the numbers that the groups of a pattern find in a line, by the groups' names."""
    figures = {}
    for match in pattern.finditer(line):
        for name, text in match.groupdict().items():
            try:
                figures[name] = float((text or "").replace(",", ""))  # such as 1,234
            except ValueError:
                continue
    return figures


def in_json(name: str, number: float) -> float | None:
    """Return a figure as JSON has it: infinity and NaN become null."""
    if not math.isfinite(number):
        return None
    return int(number) if name == "steps" else number


class Output:
    """A file that a rank prints to, read line by line as it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.rest = path, 0, b""

    def new_lines(self) -> list[str]:
        """Return the lines that have ended since the last call."""
        if size_of(self.path) <= self.offset:
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            content = file.read(MOST_BYTES)
        self.offset += len(content)
        *lines, rest = LINE_ENDS.split(self.rest + content)
        self.rest = rest[:LONGEST_LINE]
        return [line[:LONGEST_LINE].decode("utf-8", "replace") for line in lines]


class LogSteps:
    """Records the steps that one rank prints."""

    def __init__(self, run_dir: Path, pattern: str, rank: str = "first") -> None:
        self.pattern, self.is_last = re.compile(pattern), rank == "last"
        self.metrics, self.events = run_dir / "metrics.jsonl", run_dir / "events.jsonl"
        self.pid = 0

    def look(self, ranks: Iterable[Mapping[str, Any]]) -> None:
        """Record the steps that were printed since the last look.

        Args:
            ranks: Those that this node has started last, also if they have ended.
        """
        for rank in ranks:
            number = rank["world"] - 1 if self.is_last else 0
            if rank["rank"] == number and rank["pid"] != self.pid:
                self.begin(rank)
        if self.pid and not self.is_off:
            for output in self.outputs:
                for line in output.new_lines():
                    self.add(figures_in(self.pattern, line))
            self.write()

    def begin(self, rank: Mapping[str, Any]) -> None:
        """Begin anew with a new start of the ranks."""
        folder, environ, now = Path(rank["error_file"]).parent, os.environ, time.time()
        self.outputs = [Output(folder / f"{name}.log") for name in ("stdout", "stderr")]
        self.start = {"attempt": int(environ.get("TRAIN_ATTEMPT", 0)), "restart": rank["restart"]}
        # When a restart in the job began is not known.
        began = None if rank["restart"] else environ.get("TRAIN_ATTEMPT_BEGAN")
        self.pid, self.began, self.attempt_began = rank["pid"], now, min(float(began or now), now)
        self.step, self.names, self.records = NONE, set[str](), list[str]()
        self.is_off = self.goes_back = False
        self.size = size_of(self.metrics)
        self.record(self.events, event="start", world_size=rank["world"])

    def add(self, figures: Mapping[str, float]) -> None:
        """Note the figures of a line."""
        step = figures.get("step", self.step)
        if not math.isfinite(step) or step != math.floor(step):
            return
        if step < self.step:
            if not self.goes_back:
                self.goes_back = True
                self.say(
                    f"step {step:g} after step {self.step} is left out: steps count from the start "
                    "of the run, through all epochs"
                )
            return
        count = 1
        if step > self.step:
            if self.step == NONE:
                setup = time.time() - self.began
                phases = {"start": self.began - self.attempt_began, "setup": setup}
                self.record(self.events, event="ready", began=self.attempt_began, phases=phases)
            else:  # many scripts print each hundredth step only
                count = int(step) - self.step
            self.step, self.names = int(step), set()
        new = {name: figures[name] for name in figures if name not in {"step"} | self.names}
        if self.step != NONE and (new or not self.names):
            self.names |= {"step", *new}
            shown = {name: in_json(name, number) for name, number in new.items()}
            self.records.append(self.line(**shown, **({"count": count} if count > 1 else {})))

    def write(self) -> None:
        """Append the new records, unless the script writes such records itself."""
        if size_of(self.metrics) != self.size:
            self.is_off = True
            self.say("not used, since the script itself writes metrics.jsonl")
        elif self.records:
            self.size += append(self.metrics, self.records)
            self.records = []

    def record(self, path: Path, **fields: object) -> None:
        """Append a record to a file."""
        append(path, [self.line(**fields)])

    def line(self, **fields: object) -> str:
        """Return a record of this start and step."""
        place = {"version": 1, "time": time.time(), **self.start, "step": max(self.step, 0)}
        return json.dumps({**place, **fields})

    def say(self, text: str) -> None:
        """Print a line to the log."""
        print(f"watchdog: log_pattern: {text}", file=sys.stderr, flush=True)


def append(path: Path, lines: Iterable[str]) -> int:
    """Append lines to a file, after a torn line on one of their own; return how many bytes."""
    with path.open("a+b") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        torn = file.read(1) not in (b"", b"\n")
        return file.write(("\n" * torn + "".join(f"{line}\n" for line in lines)).encode())
