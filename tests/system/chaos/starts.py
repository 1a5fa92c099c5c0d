"""A run of `tiny.py` on its way to its first step, and the phases through which it goes.

Real phases may last milliseconds, or minutes where a site's prolog looks after the health of a
node. A gate is a file that keeps a run in a phase for as long as it is there.
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.conftest import Cluster
from tests.system.chaos import faults
from tests.system.chaos.arena import SlurmArena, status_of
from tests.system.chaos.frame import Trial
from tests.system.chaos.play import Broken

PHASES: Sequence[str] = (
    *("pending", "no script yet", "script", "srun", "torchrun", "imports", "first step"),
)
"""What a start goes through; each is observed and not guessed from the time."""

GATED = ("no script yet", "script", "srun", "imports")
"""Phases with a gate: in Prolog, the profile's lines, TaskProlog, the imports of `tiny.py`."""

LIMIT_S = 300
GRACE_S = 4


@dataclasses.dataclass(kw_only=True)
class Start:
    """A run on its way to its first step."""

    arena: SlurmArena
    trial: Trial
    nodes: int
    dice: random.Random
    gates: Path
    held: str = ""
    """The phase that the run may not leave yet."""

    @property
    def scene(self) -> faults.Scene:
        """The run as the other chaos sees it."""
        return faults.Scene(self.arena, self.trial, self.dice)

    def gate(self, phase: str) -> Path:
        """Return the file that keeps the run from leaving a phase while it is there."""
        return self.gates / f"{self.trial.job_id}.{phase.replace(' ', '-')}"

    def attempts(self) -> int:
        """Return how many attempts have a folder."""
        return len(list(self.trial.run_dir.glob("logs/attempt-*")))

    def job(self, key: str) -> str:
        """Return a field of the job, as scontrol shows it."""
        return self.arena.job(self.trial).get(key, "")

    def requeues(self) -> int:
        """Return how often Slurm has queued the job again."""
        return int(self.job("Restarts") or 0)

    def reached(self, phase: str, number: int) -> bool:
        """Whether the attempt of this number, or a later one, is in a phase, or beyond it."""
        if self.held == phase and phase in GATED:
            return Path(f"{self.gate(phase)}.arrived").exists()
        if phase == "pending":
            return self.job("JobState") in ("PENDING", "RUNNING")
        if phase == "no script yet":  # seldom for longer than an instant
            return self.job("JobState") == "RUNNING"
        return any(self.marks(phase, n) for n in range(number, self.attempts()))

    def wait(self, phase: str, number: int) -> None:
        """Wait until the attempt of this number comes to a phase, or the run has ended."""
        deadline = time.monotonic() + LIMIT_S
        looked_s = time.monotonic()
        while not self.reached(phase, number):
            now = time.monotonic()
            if now > deadline:
                raise Broken(f"attempt {number} has not come to {phase!r}: {self.trial.reasons()}")
            if now > looked_s + 2:  # seldom: a look takes as long as a phase
                if status_of(self.trial).state.final:
                    return
                looked_s = now
            time.sleep(0.005)

    def marks(self, phase: str, number: int) -> list[Path]:
        """Return the files that show that an attempt has come to a phase."""
        logs, folder = self.trial.attempt(number), self.trial.folder
        if phase == "first step":
            found = list(folder.glob(f"ready-{number}-*"))
            return found if len(found) == self.nodes else []
        if phase == "imports":
            return list(folder.glob(f"importing-{number}-*"))
        # The script writes `nodes` and starts srun; each task writes `began-N` and starts torchrun.
        return list(logs.glob({"script": "since", "srun": "nodes", "torchrun": "began-*"}[phase]))

    def phase_at(self, time_s: float) -> str:
        """Return in which phase the newest attempt was at a time."""
        number = self.attempts() - 1
        ended = self.trial.attempt(number) / "exit_status"
        if ended.exists() and ended.stat().st_mtime <= time_s:
            return "pending"
        for phase in reversed(PHASES[2:]):
            times = sorted(mark.stat().st_mtime for mark in self.marks(phase, number))
            if times and times[-1 if phase == "first step" else 0] <= time_s:
                return phase
        return "pending" if self.held != "no script yet" else self.held

    def hold(self, phase: str) -> None:
        """Keep the run, whose job is held, in a phase."""
        self.held = phase
        if phase in GATED:
            self.gate(phase).touch()
        if phase != "pending":
            self.arena.cluster.slurm("scontrol", "release", self.trial.job_id)

    def let_go(self) -> None:
        """Let the run leave the phase in which it is kept."""
        if self.held in GATED:
            self.gate(self.held).unlink(missing_ok=True)
        if self.held == "pending":  # it may be cancelled
            self.arena.slurm("scontrol", "release", self.trial.job_id)
        self.held = ""

    def let_step(self, number: int) -> None:
        """Let the attempts from this number on make steps."""
        draft = self.trial.folder / "go.new"
        draft.write_text(f"{number}")
        draft.replace(self.trial.folder / "go")


# ---- The gates

_WAIT = """\
gate={gates}/$SLURM_JOB_ID.{phase}; \
if [ -e "$gate" ]; then touch "$gate.arrived"; while [ -e "$gate" ]; do sleep 0.02; done; fi"""


def wait_line(gates: Path, phase: str) -> str:
    """Return a line of shell that waits while the gate of a phase is shut."""
    return _WAIT.format(gates=gates, phase=phase.replace(" ", "-"))


@contextlib.contextmanager
def gated(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """Give a cluster prologs that wait at gates, and the partition `graced`; yield the gates."""
    gates = folder / "gates"
    gates.mkdir()
    lines = [
        f"PartitionName=graced Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S}"
    ]
    for option, phase in (("Prolog", "no script yet"), ("TaskProlog", "srun")):
        line = wait_line(gates, phase)
        if option == "TaskProlog":  # which is called for the batch script, too
            line = f'[ -n "$SLURM_STEP_ID" ] || exit 0; {line}'
        (folder / option).write_text(f"#!/bin/sh\n{line}\n")
        (folder / option).chmod(0o755)
        lines.append(f"{option}={folder / option}")
    with cluster.configured(*lines):
        yield gates
