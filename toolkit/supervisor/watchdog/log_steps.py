"""Reads steps from the output of a rank, and records them as a script with telemetry would.

The job file's `log_pattern` is in TRAIN_LOG_PATTERN; the rank that prints steps, `first` or `last`,
is in TRAIN_LOG_RANK. A line with a new `step` becomes a record in `metrics.jsonl`. Figures in a
line without a step, or with the same step again, are added to that step.

Records count steps from the beginning of the run. If a script counts them within each epoch, the
steps of earlier epochs are added. `steps.jsonl`, next to the watchdog's other records, lists these
epochs and the number of skipped lines.
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
"""How many bytes of a rank's output to read at a time."""

LONGEST_LINE = 4000
"""In bytes; the rest is cut. Some patterns take time quadratic in the length of a line."""

NONE = -1
"""The number of the step before the first line."""

OWN = {"step", "steps", "epoch", "epochs"}
"""Groups that are not figures."""

LINE_ENDS = re.compile(rb"[\r\n]+")  # a progress bar ends its lines with a carriage return


def size_of(path: Path) -> int:
    """Return the size of a file, 0 for a missing one."""
    return path.stat().st_size if path.exists() else 0


def figures_in(pattern: re.Pattern[str], line: str) -> dict[str, float]:
    """Return the numbers that a pattern finds in a line, by group name."""
    figures = {}
    for match in pattern.finditer(line):
        for name, text in match.groupdict().items():
            try:
                figures[name] = float((text or "").replace(",", ""))  # such as 1,234
            except ValueError:
                continue
    return figures


def in_json(name: str, number: float) -> float | None:
    """Return a figure as JSON allows it: infinity and NaN become null."""
    if not math.isfinite(number):
        return None
    return int(number) if name == "steps" else number


def whole(number: float | None) -> int | None:
    """Return a number if it is whole, else None."""
    if number is None or not math.isfinite(number) or number != math.floor(number):
        return None
    return int(number)


class Output:
    """A file that a rank prints to, read line by line as it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.rest = path, 0, b""
        self.epoch, self.step = 0, NONE
        """The epoch and step printed last."""
        self.steps: int | None = None

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


class Epochs:
    """The number of steps of the run before each epoch."""

    def __init__(self) -> None:
        self.before: dict[int, int] = {}
        self.newest: dict[int, int] = {}
        """The highest step printed in each epoch."""
        self.lengths: dict[int, int] = {}
        """The number of steps of an epoch, if the script prints it."""
        self.first: int | None = None
        """The lowest first step of any start of the ranks."""
        self.count_anew = False
        """Whether the script counts steps within each epoch."""

    def number(self, epoch: int, step: int, steps: int | None) -> int:
        """Return the run-wide number of a step printed in an epoch."""
        if epoch not in self.before:
            earlier = max((one for one in self.before if one < epoch), default=None)
            if earlier is None:
                self.before[epoch] = 0
            else:
                self.count_anew = self.count_anew or step <= self.newest.get(earlier, NONE)
                passed = (epoch - earlier) * self.length(earlier) if self.count_anew else 0
                self.before[epoch] = self.before[earlier] + passed
        self.newest[epoch] = max(step, self.newest.get(epoch, NONE))
        if steps is not None:
            self.lengths[epoch] = steps
        return self.before[epoch] + step

    def length(self, epoch: int) -> int:
        """Return the number of steps of an epoch: the printed number, else the steps seen."""
        newest, printed = self.newest.get(epoch, NONE), self.lengths.get(epoch, 0)
        if printed and printed >= newest:
            return printed
        if newest > NONE:
            return newest + (self.first == 0)
        earlier = max((one for one in self.before if one < epoch), default=epoch)
        return (self.before[epoch] - self.before[earlier]) // max(epoch - earlier, 1)

    def read(self, files: Iterable[Path]) -> None:
        """Restore the state from files of earlier starts; skip lines without numbers."""
        for path in files:
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    row = json.loads(line)
                    numbers = [row[name] for name in ("epoch", "before", "length", "first")]
                except (ValueError, LookupError, TypeError, RecursionError):
                    continue
                if all(isinstance(one, int) and 0 <= one < 1 << 53 for one in numbers):
                    epoch, before, length, self.first = numbers
                    self.count_anew = self.count_anew or before > 0
                    self.before[epoch], self.lengths[epoch] = before, length


class LogSteps:
    """Records the steps printed by one rank."""

    def __init__(self, run_dir: Path, pattern: str, rank: str = "first") -> None:
        self.pattern, self.is_last = re.compile(pattern), rank == "last"
        self.metrics, self.events = run_dir / "metrics.jsonl", run_dir / "events.jsonl"
        self.logs, self.pid, self.epochs = run_dir / "logs", 0, Epochs()
        self.left_out, self.written, self.why = 0, 0, ""

    def look(self, ranks: Iterable[Mapping[str, Any]]) -> None:
        """Record the steps printed since the last look.

        Args:
            ranks: The newest ranks of this node, including ended ones.
        """
        # An earlier start with another number of ranks may have left another last rank.
        ours = [one for one in ranks if one["rank"] == (one["world"] - 1 if self.is_last else 0)]
        newest = max(ours, key=lambda one: int(one["began"]), default=None)
        if newest is not None and newest["pid"] != self.pid:
            self.begin(newest)
        if self.pid and not self.is_off:
            for output in self.outputs:
                for line in output.new_lines():
                    self.add(figures_in(self.pattern, line), output)
            self.write()

    def begin(self, rank: Mapping[str, Any]) -> None:
        """Reset for a new start of the ranks."""
        folder, environ, now = Path(rank["error_file"]).parent, os.environ, time.time()
        self.outputs = [Output(folder / f"{name}.log") for name in ("stdout", "stderr")]
        self.start = {"attempt": int(environ.get("TRAIN_ATTEMPT", 0)), "restart": rank["restart"]}
        # The time of a restart by torchrun is unknown.
        began = None if rank["restart"] else environ.get("TRAIN_ATTEMPT_BEGAN")
        self.pid, self.began, self.attempt_began = rank["pid"], now, min(float(began or now), now)
        self.step, self.names, self.records = NONE, set[str](), list[str]()
        self.epoch: int | None = None
        self.has_parts = self.is_off = False
        if not self.epochs.before:  # a new attempt, or rank 0 was on another node
            self.epochs.read(sorted(self.logs.glob("attempt-*/watchdog/steps.jsonl")))
        self.size = size_of(self.metrics)
        self.record(self.events, event="start", world_size=rank["world"])

    def add(self, figures: Mapping[str, float], output: Output) -> None:
        """Add the figures of a line."""
        epoch = figures.get("epoch", NONE)
        if 0 <= epoch < math.inf:
            self.epoch = math.floor(epoch)
            self.has_parts = self.has_parts or epoch != self.epoch
        step: int | None = self.step
        if "step" in figures and (step := self.number(figures, output)) is None:
            return
        if step is None or step < self.step:
            return
        count = 1
        if step > self.step:
            if self.step == NONE:
                setup = time.time() - self.began
                phases = {"start": self.began - self.attempt_began, "setup": setup}
                self.record(self.events, event="ready", began=self.attempt_began, phases=phases)
            else:  # many scripts print only every hundredth step
                count = step - self.step
            self.step, self.names = step, set()
        new = {name: figures[name] for name in figures if name not in OWN | self.names}
        if self.step != NONE and (new or not self.names):
            shown = {name: in_json(name, number) for name, number in new.items()}
            shown.update(self.extent(figures))
            self.names.update({"step", *new})
            self.records.append(self.line(**shown, **({"count": count} if count > 1 else {})))

    def extent(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the epoch and the total number of steps, if known."""
        extent: dict[str, float] = {}
        steps, epochs = whole(figures.get("steps")), whole(figures.get("epochs"))
        # In the first epoch, it is unknown whether these are the steps of the whole run.
        is_open = self.epoch is not None and not self.has_parts and len(self.epochs.before) < 2
        if steps is not None and self.epochs.count_anew and epochs:
            extent["steps"] = steps * epochs
        elif steps is not None and not self.epochs.count_anew and not is_open:
            extent["steps"] = steps
        if self.epoch is not None:
            epoch = figures.get("epoch", self.epoch)
            extent["epoch"] = epoch if self.has_parts else self.epoch
        return extent

    def number(self, figures: Mapping[str, float], output: Output) -> int | None:
        """Return the run-wide number of a line's step; None for a skipped line."""
        step, steps = whole(figures["step"]), whole(figures.get("steps"))
        if step is None:
            return None
        epochs, epoch = self.epochs, output.epoch if self.epoch is None else self.epoch
        if (epoch, step) < (output.epoch, output.step):
            if self.epoch is not None or not self.begins_epoch(step, steps, output):
                self.leave_out(step, output.step)
                return None
            epoch += 1
        if epochs.first is None or (output.step == NONE and step < epochs.first):
            epochs.first = step
        if output.step == NONE and self.epoch is None and epochs.count_anew and not self.why:
            self.why = (
                "in which epoch the ranks have started again is unknown, since log_pattern has no "
                "group epoch; their steps count from the first epoch"
            )
            self.say(self.why)
            self.note(epoch)
        is_new = epoch not in epochs.before
        number = epochs.number(epoch, step, steps)
        if is_new and (epochs.count_anew or len(epochs.before) == 1):
            self.note(epoch)
        output.epoch, output.step, output.steps = epoch, step, steps
        return number

    def begins_epoch(self, step: int, steps: int | None, output: Output) -> bool:
        """Return whether a step lower than the previous one begins an epoch."""
        if step > max(self.epochs.first or 0, 1) or steps != output.steps:
            return False  # for example the evaluation loop
        if not self.epochs.count_anew:
            self.say(f"step {step} after step {output.step} is taken as the beginning of an epoch")
        return True

    def leave_out(self, step: int, last: int) -> None:
        """Count a skipped line: its step is lower than the previous one."""
        if not self.left_out:
            self.example = f"step {step} after step {last}"
            self.say(f"{self.example} is left out: it is neither a later step nor a new epoch")
        self.left_out += 1
        if self.left_out >= 2 * self.written:
            self.finish()

    def finish(self) -> None:
        """Record the number of skipped lines."""
        if self.left_out > self.written:
            self.written = self.left_out
            lines = "1 line was" if self.left_out == 1 else f"{self.left_out} lines were"
            self.why = (
                f"{lines} left out, whose step is lower than the one before, such as {self.example}"
            )
            self.note(max(self.epochs.before, default=0))

    def note(self, epoch: int) -> None:
        """Record the start of an epoch and the skipped lines, for later starts and `status`."""
        path = self.logs / f"attempt-{self.start['attempt']}/watchdog/steps.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        before, length = self.epochs.before.get(epoch, 0), self.epochs.lengths.get(epoch, 0)
        place = {"epoch": epoch, "before": before, "length": length}
        more = {**place, "first": self.epochs.first or 0, "left_out": self.left_out}
        record = {"version": 1, "time": time.time(), **more, "why": self.why}
        append(path, [json.dumps(record)])

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
    """Append lines to a file; start a new line after a torn one; return the bytes written."""
    with path.open("ab+") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        torn = file.read(1) not in (b"", b"\n")
        return file.write(("\n" * torn + "".join(f"{line}\n" for line in lines)).encode())
