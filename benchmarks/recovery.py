"""How long a fault stops the training, on a sandbox: from the fault to the first new step.

Run as `make bench-recovery`; needs root, like the sandbox. Each fault hits a run of the toolkit,
one with `start: warm`, and a run as a person would write it: sbatch --requeue, torchrun
--max-restarts=3, torch.save. The time is split into

- detect: until the first rank that the fault has not ended itself ends;
- stop: until the last rank and, where the job starts again, the last torchrun of that start ends;
- queue: until the next torchrun starts; none for a restart in the job;
- processes: until the first new rank starts;
- imports: until rank 0 has imported torch and begins;
- group: until the ranks have met;
- load: until the checkpoint is loaded;
- lost steps: until a step is made that had not been made before the fault.

A target is missed where the toolkit needs longer than the script by hand and a second, or than
60 s where the script by hand does not come back at all; and where a warm start after a killed rank
needs more than half a second.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.support.processes import is_torchrun
from tests.system.chaos.arena import SlurmArena, living, own_slurm
from tests.system.chaos.faults import Scene, control, kill_rank, kill_torchrun, power_off, preempt
from tests.system.chaos.frame import Trial

PHASES = ("detect", "stop", "queue", "processes", "imports", "group", "load", "lost steps")
PACE_S = 0.05
PATIENCE_S = 180.0
SLACK_S, ALONE_S = 1.0, 60.0
WARM_S = {"rank killed": 0.5}
"""What is asked of warm starts."""

FAULTS: dict[str, Callable[[Scene], bool]] = {
    "rank killed": kill_rank,
    "torchrun killed": kill_torchrun,
    "node off": power_off,
    "preemption": preempt,
    "requeue": lambda scene: control(scene, "requeue"),
}
ENDED = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED")
BY_HAND = f"""\
#!/bin/bash
#SBATCH --job-name=hand
#SBATCH --partition=low
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --requeue
#SBATCH --open-mode=append
source {ROOT}/.venv/bin/activate
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK OMP_NUM_THREADS=1 COUNTED=$1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes=2 --nproc-per-node=1 --max-restarts=3 \\
  --rdzv-backend=c10d --rdzv-endpoint="$head_node:$((61000 + SLURM_JOB_ID % 4000))" \\
  --rdzv-id="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" {ROOT}/benchmarks/plain_training.py
"""


class HandTrial(Trial):
    """A job that was submitted by hand; it has no run directory of its own."""

    @property
    def run_dir(self) -> Path:
        """The folder in which it keeps its checkpoint."""
        return self.folder

    @property
    def job_id(self) -> str:
        """The job."""
        return (self.folder / "job_id").read_text().strip()


@dataclass
class Span:
    """When a process was seen first and last."""

    first_s: float
    last_s: float
    rank: bool


@dataclass
class Watch:
    """Sees which ranks and torchruns of a run live, ten times a second."""

    trial: Trial
    spans: dict[int, Span] = field(default_factory=dict)

    def __enter__(self) -> "Watch":
        """Begin."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            now = time.time()
            for pid, (command, environ) in living(self.trial).items():
                rank = b"\0RANK=" in environ
                if rank or is_torchrun(command):
                    span = self.spans.setdefault(pid, Span(now, now, rank))
                    # A new process has its parent's environment until it executes its own program.
                    span.last_s, span.rank = now, rank


@dataclass(frozen=True)
class Marks:
    """Moments of a start of the ranks, as rank 0 has noted them."""

    imported: Callable[[], list[float]]
    met: Callable[[], list[float]]
    loaded: Callable[[], list[float]]
    steps: Callable[[], list[tuple[int, float]]]


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def marks_of(trial: Trial) -> Marks:
    """Return the moments of a run: from its stamps, or from the run directory where it has one."""
    stamps = trial.folder / "stamps.jsonl"

    def stamped(what: str) -> Callable[[], list[float]]:
        return lambda: [line["time"] for line in lines(stamps) if line["what"] == what]

    if isinstance(trial, HandTrial):
        return Marks(
            stamped("imported"),
            stamped("met"),
            stamped("loaded"),
            lambda: [(int(s["step"]), s["time"]) for s in lines(stamps) if s["what"] == "step"],
        )

    def events(kind: str) -> Callable[[], list[float]]:
        return lambda: [event["time"] for event in trial.events(kind)]

    metrics = trial.run_dir / "metrics.jsonl"
    return Marks(
        stamped("imported"),
        events("start"),
        events("resume"),
        lambda: [(int(m["step"]), m["time"]) for m in lines(metrics) if "loss" in m],
    )


def after(moments: list[float], moment: float) -> float:
    """Return the first moment after another one; infinity where there is none."""
    return min((one for one in moments if one > moment), default=float("inf"))


def recover(arena: SlurmArena, trial: Trial, hit: Callable[[Scene], bool]) -> list[float] | None:
    """Let a fault hit a run after some steps; return the seconds of each phase, None if it ends."""
    marks = marks_of(trial)
    until(lambda: max((step for step, _ in marks.steps()), default=0) >= 25)
    with Watch(trial) as watch:
        until(lambda: sum(span.rank for span in watch.spans.values()) == 2)
        made, fault_s = max(step for step, _ in marks.steps()), time.time()
        hit(Scene(arena, trial, random.Random(1)))
        deadline = time.monotonic() + PATIENCE_S
        while not any(
            step > made and s > after(marks.loaded(), fault_s) for step, s in marks.steps()
        ):
            if time.monotonic() > deadline or arena.job(trial).get("JobState") in ENDED:
                return None
            time.sleep(0.1)
        time.sleep(0.3)  # until the watch has seen the ranks
    old = [span for span in watch.spans.values() if span.first_s <= fault_s]
    new = [span for span in watch.spans.values() if span.first_s > fault_s]
    loaded = after(marks.loaded(), fault_s)
    again = any(not span.rank for span in new)  # and not in the job
    ended = [s.last_s for s in old if (s.rank or again) and s.last_s < loaded]
    survivors = [s.last_s for s in old if s.rank and s.last_s > fault_s + 0.3]
    ranks_s = min(span.first_s for span in new if span.rank)
    torchrun_s = min((s.first_s for s in new if not s.rank), default=max(ended))
    step_s = min(s for step, s in marks.steps() if step > made and s > loaded)
    moments = [
        fault_s,
        min(survivors, default=max(ended)),
        max(ended),
        torchrun_s,
        ranks_s,
        after(marks.imported(), ranks_s),
        after(marks.met(), ranks_s),
        loaded,
        step_s,
    ]
    return [max(0.0, b - a) for a, b in itertools.pairwise(moments)]


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; exit where it does not come true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("the run did not get on")
        time.sleep(0.1)


def by_toolkit(arena: SlurmArena, name: str, start: str = "cold") -> Trial:
    """Submit a run of the toolkit, with restarts in the job."""
    task = f"{ROOT}/benchmarks/timestamped_task.py:TimestampedTask"
    words = (
        f"args.1={task}",
        "retries.in_job=3",
        "stop.grace=20s",
        f"name={name}",
        f"start={start}",
    )
    return arena.submit(words, pace=PACE_S, every=10)


def warm(arena: SlurmArena, name: str) -> Trial:
    """Submit a run whose ranks are forked."""
    return by_toolkit(arena, name, "warm")


def by_hand(arena: SlurmArena, name: str) -> Trial:
    """Submit the script by hand."""
    folder = Path(tempfile.mkdtemp(prefix=name, dir=arena.folder))
    (folder / "pace").write_text(str(PACE_S))
    (folder / "hand.sbatch").write_text(BY_HAND)
    argv = ("sbatch", "--parsable", f"--output={folder}/log", str(folder / "hand.sbatch"))
    (folder / "job_id").write_text(arena.cluster.slurm(*argv, str(folder)))
    return HandTrial(run=None, folder=folder)  # type: ignore[arg-type]  # nothing asks it


def measure(
    arena: SlurmArena, submit: Callable[[SlurmArena, str], Trial], fault: str
) -> list[float] | None:
    """Return the seconds of each phase of one recovery."""
    trial = submit(arena, fault.replace(" ", "-"))
    try:
        return recover(arena, trial, FAULTS[fault])
    finally:
        arena.restore()
        arena.slurm("scancel", trial.job_id)
        until(lambda: not living(trial))


def shown(name: str, rounds: list[list[float] | None]) -> tuple[str, float]:
    """Return the line of some recoveries, and the median of their seconds."""
    whole = [phases for phases in rounds if phases is not None]
    if len(whole) < len(rounds):
        return f"{name:26} does not come back", float("inf")
    medians = [statistics.median(column) for column in zip(*whole, strict=True)]
    total = statistics.median(sum(phases) for phases in whole)
    return f"{name:26} {total:6.1f} {' '.join(f'{m:10.1f}' for m in medians)}", total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each fault (default 3)")
    parser.add_argument("--only", default="", help="a part of the name of the faults")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="recovery-", dir="/tmp"))
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    print(f"{'seconds':26} {'total':>6} {' '.join(f'{phase:>10}' for phase in PHASES)}")
    with own_slurm(folder) as arena:
        for fault in FAULTS:
            if given.only not in fault:
                continue
            sides = {"by hand": by_hand, "toolkit": by_toolkit, "warm": warm}
            rounds: dict[str, list[list[float] | None]] = {side: [] for side in sides}
            for _ in range(given.rounds):
                for side, submit in sides.items():
                    rounds[side].append(measure(arena, submit, fault))
            targets = {"by hand": float("inf")}
            for side in sides:
                line, total_s = shown(f"{fault}, {side}", rounds[side])
                targets.setdefault("toolkit", min(total_s + SLACK_S, ALONE_S))
                target_s = targets.get(side, WARM_S.get(fault, targets["toolkit"]))
                missed = f"  missed: {target_s:.1f}" if total_s > target_s else ""
                print(f"{line}{missed}", flush=True)


if __name__ == "__main__":
    main()
