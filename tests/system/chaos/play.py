"""Play runs that faults hit at drawn moments, and hold each to the unbroken run.

`make chaos MINUTES=30 SEED=7` plays run after run; `RUN=12` repeats one of them. A run is a
function of seed and number, apart from what the machine does meanwhile.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.system.chaos.arena import (
    Arena,
    LocalArena,
    SlurmArena,
    living,
    own_pods,
    own_slurm,
    ranks,
    status_of,
)
from tests.system.chaos.counted import word
from tests.system.chaos.faults import FAULTS, Fault, Scene
from tests.system.chaos.frame import STEPS, Trial, whole_result
from toolkit.runs.state import RunState, RunStatus

PATIENCE_S = 300
IDLE_S = 60
"""How long nodes may be reserved for a run of which no rank lives."""
STARTS = 8
"""How often a run that has ended is continued by hand, before it counts as lost."""


class Broken(AssertionError):
    """What a run should have kept, and has not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blow:
    """A fault, and when it hits."""

    fault: Fault
    moment: str
    delay_s: float

    def __str__(self) -> str:
        return f"{self.fault.what} ({self.moment} + {self.delay_s:.1f} s)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """One run as it is to be played."""

    place: str
    blows: tuple[Blow, ...]
    pace: float = 0.2
    every: int = 10
    hold_s: float | None = None
    """How long the place stays harmed; as each fault has it where None."""
    overrides: tuple[str, ...] = ("retries.in_job=0", "retries.requeue=6", "stop.grace=20s")
    idle_s: float | None = IDLE_S
    """How long nodes may be idle; not looked at where None."""


@dataclasses.dataclass(kw_only=True)
class Course:
    """What was seen of a run that was played."""

    hits: list[Fault] = dataclasses.field(default_factory=list)
    first_end: RunStatus = dataclasses.field(
        default_factory=lambda: RunStatus(state=RunState.UNKNOWN)
    )
    """How it ended by itself."""
    seen: list[str] = dataclasses.field(default_factory=list)
    """The statuses' reasons while it ran, each once."""
    reasons: list[str] = dataclasses.field(default_factory=list)
    """Of the attempts until it ended by itself."""
    restarts: int = 0
    """Starts of the ranks by torchrun in the job."""
    steps_again: int = 0
    idle_s: float = 0.0


MOMENTS = ("start", "processes", "training", "checkpoint", "end")


def reached(moment: str, trial: Trial) -> bool:
    """Whether a run has reached a moment; `again` is right after the fault before."""
    if moment == "processes":
        return bool(ranks(trial))
    if moment == "training":
        return bool(trial.events("checkpoint"))
    if moment == "checkpoint":
        return bool(list(trial.run_dir.glob("checkpoints/attempt-*/*.tmp")))
    if moment == "end":
        trial.pace(0)
        if trial.steps() < STEPS - 60:
            return False
        trial.pace(0.05)
    return True


def draw(seed: int, number: int, *, place: str = "", quick: bool = False) -> Score:
    """Draw the run of a number."""
    dice = random.Random(f"{seed}/{number}/{place}")
    place = place or dice.choices(["slurm", "pods", "local"], [6, 3, 1])[0]
    pool = [f for f in FAULTS if f.place == place and f.drawn and (f.quick or not quick)]
    blows: list[Blow] = []
    count = dice.choices([1, 2, 3], [5, 4, 1])[0]
    if quick:
        count = 2 if place == "slurm" else 1
    for index in range(count):
        moments = [*MOMENTS[2:], "again"] if index else [*MOMENTS]
        if quick:  # at the end a fault may come too late
            moments.remove("end")
        moment = dice.choice(moments)
        delay_s = dice.uniform(0, 5 if moment in ("start", "processes") else 2)
        blows.append(Blow(fault=dice.choice(pool), moment=moment, delay_s=delay_s))
    return Score(
        place=place,
        blows=tuple(blows),
        pace=dice.choice([0.02, 0.05] if quick else [0.02, 0.1, 0.2]),
        every=dice.choice([1, 10, 40]),
        hold_s=dice.uniform(0, 5 if quick else 40),
        overrides=(
            f"retries.in_job={dice.choice([0, 0, 1, 2])}",
            *("retries.requeue=8", f"stop.grace={60 if quick else 20}s"),
            f"start={random.Random(f'{seed}/{number}/start').choice(['cold', 'warm'])}",
        ),
        idle_s=None if quick else IDLE_S,
    )


class Watch(threading.Thread):
    """Looks at a run from aside: what its status says, and whether its nodes are idle."""

    def __init__(self, arena: Arena, trial: Trial) -> None:
        super().__init__(daemon=True)
        self.arena, self.trial = arena, trial
        self.seen: list[str] = []
        self.idle_s = 0.0
        self._over = threading.Event()

    def run(self) -> None:
        """Look every other second until `stop`."""
        since: float | None = None
        while not self._over.wait(2):
            status = status_of(self.trial)
            text = f"{status.state.upper()}: {status.reason}"
            if status.state is not RunState.UNKNOWN and status.reason and text not in self.seen:
                self.seen.append(text)
            now = time.monotonic()
            if ranks(self.trial) or not self.arena.holds_nodes(self.trial):
                since = None
            else:
                since = now if since is None else since
                self.idle_s = max(self.idle_s, now - since)

    def stop(self) -> None:
        """End it."""
        self._over.set()
        self.join()


def wait_for(condition: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds.

    Raises:
        Broken: it never does.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise Broken(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.1)


def play(arena: Arena, score: Score, reference: Trial, dice: random.Random) -> Course:
    """Play one run.

    Raises:
        Broken: the run has lost what it should have kept.
    """
    course = Course()
    overrides = list(score.overrides)
    for blow in score.blows:
        blow.fault.prepare(arena)
        overrides += blow.fault.overrides
    trial = arena.submit(overrides, pace=score.pace, every=score.every)
    watch = Watch(arena, trial)
    watch.start()
    try:
        for blow in score.blows:
            if course.hits and _ended_early(trial):
                _judge(trial, course)
                arena.heal()
                arena.go_on(trial)
            _await(blow.moment, arena, trial)
            time.sleep(blow.delay_s)
            before = len(trial.events("resume"))
            if blow.fault.inject(Scene(arena, trial, dice)):
                course.hits.append(blow.fault)
                hold_s = blow.fault.hold_s if score.hold_s is None else score.hold_s
                _hold(trial, before, hold_s)
            trial.pace(score.pace)
        arena.heal()
        trial.pace(0)
        _end(arena, trial, course, lambda: watch.idle_s > (score.idle_s or math.inf))
        if not any(fault.destroys for fault in course.hits):
            whole_result(trial, reference)
            last_words(trial)
            course.steps_again = steps_made(trial) - STEPS
    finally:
        arena.heal()
        watch.stop()
        course.seen, course.idle_s = watch.seen, watch.idle_s
        _stop(arena, trial)
        arena.restore()
    told_right(course, trial.reasons())
    return course


def _await(moment: str, arena: Arena, trial: Trial) -> None:
    def come() -> bool:
        return reached(moment, trial) or status_of(trial).state.final

    # A run that is suspended, or whose disk is away, reaches no moment before that is undone.
    with contextlib.suppress(Broken):
        wait_for(come, f"the moment {moment}", IDLE_S)
        return
    arena.heal()
    wait_for(come, f"the moment {moment}")


def _hold(trial: Trial, resumed: int, hold_s: float) -> None:
    """Leave the place harmed until the run has gone on, or has ended, or the time is over."""
    with contextlib.suppress(Broken):
        wait_for(
            lambda: len(trial.events("resume")) > resumed or status_of(trial).state.final,
            "it goes on",
            hold_s,
        )


def _ended_early(trial: Trial) -> bool:
    state = status_of(trial).state
    return state.final and state is not RunState.SUCCEEDED


def _judge(trial: Trial, course: Course) -> None:
    """Hold the end of a run to what its faults allow."""
    _no_orphan(trial)
    # Only now: without its supervisor, a local script may still be writing its reason.
    status = status_of(trial)
    if course.first_end.state is RunState.UNKNOWN:
        course.first_end, course.reasons = status, trial.reasons()
        course.restarts = sum(event["restart"] > 0 for event in trial.events("resume"))
    allowed = {RunState.SUCCEEDED}.union(*(fault.states for fault in course.hits))
    if status.state not in allowed:
        raise Broken(f"the run has ended as {status}, not as one of {sorted(allowed)}")


def _end(arena: Arena, trial: Trial, course: Course, idles: Callable[[], bool]) -> None:
    """Wait for the end, and continue a run that has ended otherwise than with success."""
    for _ in range(STARTS):
        wait_for(
            lambda: status_of(trial).state.final or status_of(trial).lost or idles(),
            "the run ends",
            900,
        )
        if idles():
            raise Broken("nodes are reserved, and no rank lives")
        _judge(trial, course)
        if not _ended_early(trial) or any(fault.destroys for fault in course.hits):
            return
        arena.heal()
        arena.go_on(trial)
    raise Broken(f"not done after {STARTS} starts: {status_of(trial)}")


def _no_orphan(trial: Trial) -> None:
    """Insist that no process of a run is left, and say which is."""
    try:
        wait_for(lambda: not living(trial), "no process is left", 120)
    except Broken as broken:
        left = (shlex.join(c.decode().split("\0")) for c, _ in living(trial).values())
        raise Broken("\n".join([str(broken), *(line[:300] for line in left)])) from None


def _stop(arena: Arena, trial: Trial) -> None:
    """End what a broken run has left, so that the next one finds an empty place."""
    if not status_of(trial).state.final:
        with contextlib.suppress(Exception):
            trial.run.cancel()
    if isinstance(arena, SlurmArena):
        arena.slurm("scancel", "--user=root")
    deadline = time.monotonic() + 60
    while (left := living(trial)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def told_right(course: Course, reasons: Sequence[str]) -> None:
    """Insist that the reasons are those that the faults may have."""
    patterns = [pattern for fault in course.hits for pattern in fault.reasons]
    texts = [text for text in (*course.reasons, *course.seen, course.first_end.reason) if text]
    ended = len(course.reasons) > 1 or course.first_end.state is not RunState.SUCCEEDED
    # Of a restart in the job only the log tells, and one fault may hide the others.
    for fault in course.hits:
        if ended and len(course.hits) == 1 and fault.reasons and not matching(fault, texts):
            raise Broken(f"no reason tells of it: {texts}; wanted one of {patterns}")
    for reason in reasons:
        if reason and not any(re.search(p, reason) for p in (r"^done", r"ended with 0", *patterns)):
            raise Broken(f"a reason that no fault explains: {reason!r}; wanted {patterns}")


def matching(fault: Fault, texts: Sequence[str]) -> str:
    """Return the first text that tells of a fault; the earlier patterns are the better ones."""
    for pattern in fault.reasons:
        for text in texts:
            if re.search(pattern, text):
                return text
    return ""


def _noted(trial: Trial) -> Iterator[tuple[Path, dict[int, int]]]:
    """Yield the file of each rank, and how many steps each of its starts has noted."""
    for path in sorted(trial.folder.glob("[0-9]*-*-*.jsonl")):
        counts: dict[int, int] = {}
        for line in path.read_text().split("\n")[:-1]:
            restart = int(json.loads(line)["restart"])
            counts[restart] = counts.get(restart, 0) + 1
        yield path, counts


def steps_made(trial: Trial) -> int:
    """Return how many steps rank 0 has made in all starts."""
    return sum(sum(counts.values()) for path, counts in _noted(trial) if path.stem.endswith("-0"))


def last_words(trial: Trial) -> None:
    """Insist that the last line that each rank printed in each start is in the logs."""
    texts = [path.read_text(errors="replace") for path in trial.run_dir.glob("logs/**/*.log")]
    shown: str | None = None
    for path, counts in _noted(trial):
        for restart, steps in counts.items():
            said = word(path, restart, steps).strip()
            if any(said in text for text in texts):
                continue
            if shown is None:  # not of a shared disk, or of an earlier pod
                shown = "\n".join(trial.run.logs())
            if said not in shown:
                raise Broken(f"the logs lack the last line of a rank: {said!r}")


def reference_run(folder: Path) -> Trial:
    """Return the run that nothing happens to, made on this machine."""
    arena = LocalArena(folder)
    trial = arena.submit((), pace=0, every=10)
    wait_for(lambda: status_of(trial).state.final, "the unbroken run ends")
    return trial


class Arenas:
    """The arenas of a session, each opened when it is first needed, and anew after a failure."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, tuple[Arena, contextlib.ExitStack]] = {}
        self._count = 0

    def get(self, place: str) -> Arena:
        """Return the arena of a place."""
        if place not in self._open:
            self._count += 1
            folder = self.folder / f"{place}-{self._count}"
            folder.mkdir(parents=True)
            stack = contextlib.ExitStack()
            arena: Arena
            if place == "slurm":
                arena = stack.enter_context(own_slurm(folder))
            elif place == "pods":
                arena = stack.enter_context(own_pods(folder))
            else:
                arena = LocalArena(folder)
            self._open[place] = arena, stack
        return self._open[place][0]

    def drop(self, place: str) -> None:
        """Close the arena of a place."""
        if place in self._open:
            self._open.pop(place)[1].close()

    def __enter__(self) -> "Arenas":
        """End in order when asked to stop, also in the background of a shell."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        """Close all."""
        for place in list(self._open):
            self.drop(place)


def main() -> int:
    """Play runs until the time is over; return how many were broken, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.chaos.play", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--run", type=int, default=None, help="play this run alone")
    parser.add_argument("--place", default="", choices=["", "slurm", "pods", "local"])
    given = parser.parse_args()
    seed = random.randrange(1 << 20) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    os.environ["XDG_STATE_HOME"] = str(folder / "state")  # not among the user's own runs
    broken, number = 0, given.run or 0
    deadline = time.monotonic() + 60 * given.minutes
    print(f"seed {seed}; folder {folder}", flush=True)
    with Arenas(folder) as arenas:
        reference = reference_run(folder / "reference")
        while number == given.run or (given.run is None and time.monotonic() < deadline):
            broken += not play_number(arenas, seed, number, reference, given.place)
            number += 1
    print(f"{number - (given.run or 0)} runs, {broken} broken")
    return int(broken > 0)


def play_number(arenas: Arenas, seed: int, number: int, reference: Trial, place: str) -> bool:
    """Play the run of a number and print how it went; return whether it was whole."""
    score = draw(seed, number, place=place)
    began_s = time.monotonic()
    print(f"run {number} on {score.place}: {'; '.join(map(str, score.blows))}", flush=True)
    try:
        course = play(
            arenas.get(score.place), score, reference, random.Random(f"{seed}/{number}/victims")
        )
    except (Exception, KeyboardInterrupt) as error:
        print(f"  broken: {error}")
        if not isinstance(error, Broken):
            traceback.print_exc(file=sys.stdout)
        limits = f" ARGS=--place={place}" if place else ""
        print(f"  evidence: {arenas.folder}")
        print(f"  again: make chaos SEED={seed} RUN={number}{limits}", flush=True)
        arenas.drop(score.place)
        if isinstance(error, KeyboardInterrupt):
            raise
        return False
    spent_s = time.monotonic() - began_s
    hit = len(course.hits)
    print(
        f"  whole: {hit} of {len(score.blows)} hit, {len(course.reasons)} attempts, "
        f"{course.steps_again} steps again, idle {course.idle_s:.0f} s, {spent_s:.0f} s",
        flush=True,
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
