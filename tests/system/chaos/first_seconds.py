"""Faults in the first seconds of runs on Slurm, between `sbatch` and the first training step.

`make chaos SEED=7` begins with so many MOMENTS; `MOMENT=12` repeats one of them. A moment is a
function of seed and number: a fault, a phase of the start that is waited for, and a delay after it.
The script `tiny.py` makes no step before the fault has hit.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import toolkit
from tests.conftest import SANDBOX, Cluster
from tests.system.chaos import faults
from tests.system.chaos.arena import SlurmArena, living, status_of
from tests.system.chaos.frame import Trial
from tests.system.chaos.play import Broken, wait_for
from tests.system.chaos.starts import GATED, LIMIT_S, PHASES, Start, gated, wait_line
from tests.system.chaos.tiny import STEPS, checkpoint, digest
from toolkit.runs.evidence.restarts import restarts_in
from toolkit.runs.state import RunState, RunStatus
from toolkit.slurm import SlurmLauncher

TASK = Path(__file__).with_name("tiny.py")
NEVER = 99
COUNTED = ("retryable", "node_failure", "lost")
"""Words of attempts that use up `retries.requeue`."""

_bind = functools.partial
_submitting = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hit:
    """One kind of fault."""

    what: str

    inject: Callable[[Start], bool]
    """Injects it; returns whether Slurm has accepted it and the attempt must end."""

    settle: Callable[[Start], object] = lambda _: None
    """Called once the attempts to come may make steps."""

    reason: str
    """What the reason of the attempt must match."""

    failures: int = 0
    """How many failures it may count."""

    ends: bool = False
    """Whether the run ends by it, as cancelled."""

    phases: Sequence[str] = PHASES
    """When it can hit."""

    slow: bool = False
    """Whether Slurm takes its time to notice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blow:
    """A fault, and when it hits."""

    hit: Hit
    phase: str
    delay_s: float

    def of(self, hit: Hit) -> "Blow":
        """Return the same with another fault."""
        return dataclasses.replace(self, hit=hit)

    def __str__(self) -> str:
        return f"{self.hit.what} at {self.phase!r} + {self.delay_s:.2f} s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """One run, and when what hits it."""

    number: int
    blows: Sequence[Blow]
    """The first hits the first attempt, the second the attempt that follows."""

    nodes: int
    records: bool
    """Whether the script writes an outcome."""

    holds: bool
    """Whether the run is kept in the phase of the first fault until it has hit."""

    def __str__(self) -> str:
        how = "with" if self.records else "without"
        what = ", then ".join(map(str, self.blows))
        kept = ", kept there" if self.holds else ""
        return f"moment {self.number}: {what}{kept}; {self.nodes} nodes, {how} an outcome"


# ---- The faults


def requeue(start: Start) -> bool:
    """Have an operator queue the job again."""
    return start.arena.slurm("scontrol", "requeue", start.trial.job_id)


def lose_node(start: Start, how: str) -> bool:
    """Lose the first or last node of the job."""
    first = start.dice.random() < 0.5
    if how == "cut":
        return faults.cut(start.scene, first=first)
    listed = start.arena.nodes(start.trial)
    for node in listed[:1] if first else listed[-1:]:
        start.arena.restore_later(_bind(start.arena.power_cycle, node))
        for pid in start.arena.processes(node, "slurmd "):
            faults.kill(pid)
    return bool(listed)


def find_node(start: Start) -> None:
    """Put the node back once Slurm has noticed."""
    known = start.requeues()
    wait_for(
        lambda: start.requeues() > known or status_of(start.trial).state.final,
        "Slurm queues the job again",
        LIMIT_S,
    )
    start.arena.restore()


def terminate(start: Start, option: str = "--verbose") -> bool:
    """Send SIGTERM by scancel; the attempt may end by it or not."""
    start.arena.slurm("scancel", "--signal=TERM", option, start.trial.job_id)
    return False


def preempt(start: Start) -> bool:
    """Submit an urgent job that needs the run's nodes, and wait until it gets them."""
    before, nodes = start.job("PreemptTime"), start.job("NodeList").replace("(null)", "")
    if not nodes or start.job("JobState") != "RUNNING":
        return False
    argv = ("--parsable", "--partition=high", f"--nodelist={nodes}", f"--nodes={start.nodes}")
    more = ("--exclusive", "--output=/dev/null", "--wrap=true")
    start.arena.cluster.slurm("sbatch", *argv, *more)
    wait_for(
        lambda: start.job("PreemptTime") != before or start.job("JobState") != "RUNNING",
        "Slurm takes the nodes",
        LIMIT_S,
    )
    return True


def scancel(start: Start) -> bool:
    """Cancel the job behind the toolkit's back."""
    return start.arena.slurm("scancel", start.trial.job_id)


def cancel(start: Start) -> bool:
    """Cancel the run as `toolkit cancel` does."""
    start.trial.run.cancel()
    return True


_STARTED = PHASES[1:]
_UNSAID = r"|^requeued: by Slurm, which has not said why"
_TAKEN = rf"^preempted: Slurm has taken the nodes{_UNSAID}"
_LOST = r"^node[_ ]failure: |^lost: |^(?:retryable|failed): srun could not start "
# In the phase "srun", the site's TaskProlog may be what gets the signal.
_TERM = r"^preempted: stopped |^(?:retryable|failed): TaskProlog failed "
_SCRIPT, _BOTH = (functools.partial(terminate, option=option) for option in ("--batch", "--full"))

HITS = (
    Hit(what="requeue", inject=requeue, reason=rf"^requeued: by an operator{_UNSAID}"),
    Hit(
        what="slurmd killed", inject=_bind(lose_node, how="kill"), reason=_LOST, failures=1,
        settle=find_node, phases=_STARTED, slow=True,
    ),
    Hit(
        what="cable cut", inject=_bind(lose_node, how="cut"), reason=_LOST, failures=1,
        settle=find_node, phases=_STARTED, slow=True,
    ),
    Hit(what="TERM to the steps", inject=terminate, reason=_TERM, failures=1, phases=_STARTED),
    Hit(what="TERM to the script", inject=_SCRIPT, reason=_TERM, phases=_STARTED),
    Hit(what="TERM to both", inject=_BOTH, reason=_TERM, failures=1, phases=_STARTED),
    Hit(what="preemption", inject=preempt, reason=_TAKEN, phases=_STARTED),
    Hit(what="preemption, grace", inject=preempt, reason=_TAKEN, phases=_STARTED, slow=True),
    Hit(what="scancel", inject=scancel, reason=r"^cancelled: by scancel", ends=True),
    Hit(what="toolkit cancel", inject=cancel, reason=r"^cancelled: by toolkit cancel", ends=True),
)  # fmt: skip


def draw(seed: int, number: int) -> Moment:
    """Draw the moment of a number: each fault in each phase once before any comes again."""
    pairs = [(hit, phase) for hit in HITS for phase in hit.phases]
    turn, place = divmod(number, len(pairs))
    random.Random(f"{seed}/{turn}").shuffle(pairs)
    # In rounds that have each fault once, those first for which Slurm takes its time.
    times: collections.Counter[str] = collections.Counter()
    rounds: list[tuple[int, bool, int, Hit, str]] = []
    for hit, phase in pairs:
        rounds.append((times[hit.what], not hit.slow, len(rounds), hit, phase))
        times[hit.what] += 1
    *_, hit, phase = sorted(rounds, key=lambda entry: entry[:3])[place]
    dice = random.Random(f"{seed}/{number}")
    blows = [Blow(hit=hit, phase=phase, delay_s=delay(dice, phase))]
    if not hit.ends and not hit.slow and dice.random() < 0.3:
        again = dice.choice([other for other in HITS if not other.slow])
        phase = dice.choice([phase for phase in again.phases if phase != "no script yet"])
        blows.append(Blow(hit=again, phase=phase, delay_s=delay(dice, phase)))
    return Moment(
        number=number,
        blows=tuple(blows),
        nodes=dice.choice([1, 2, 2]),
        records=dice.random() < 0.5,
        holds=blows[0].phase in ("pending", *GATED) and dice.random() < 0.7,
    )


def delay(dice: random.Random, phase: str) -> float:
    """Draw how long after a phase has begun the fault hits; often at once."""
    return dice.choice([0.0, dice.uniform(0, 1.5 if phase == "pending" else 0.6)])


# ---- Playing one


@dataclasses.dataclass(kw_only=True)
class Played:
    """What was seen of a moment."""

    moment: Moment
    struck: list[tuple[Blow, set[int], str]] = dataclasses.field(default_factory=list)
    """The faults, the attempts that each may have hit, and the phase in which it did."""
    reasons: list[str] = dataclasses.field(default_factory=list)
    state: str = ""
    spent_s: float = 0.0
    broken: str = ""


def play(cluster: Cluster, folder: Path, moment: Moment, seed: int, gates: Path) -> Played:
    """Play a moment, and look at what has become of the run."""
    played, began_s = Played(moment=moment), time.monotonic()
    arena = SlurmArena(cluster, folder)
    start: Start | None = None
    try:
        start = submit(arena, moment, random.Random(f"{seed}/{moment.number}/victims"), gates)
        strike(start, moment, played)
        judge(start, played)
    except (Exception, KeyboardInterrupt) as error:
        known = isinstance(error, Broken)
        played.broken = str(error) if known else traceback.format_exc()
        if start is not None:
            played.reasons = start.trial.reasons()
            arena.slurm("scancel", "--full", start.trial.job_id)
            start.let_go()
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        arena.restore()
    played.spent_s = time.monotonic() - began_s
    return played


def submit(arena: SlurmArena, moment: Moment, dice: random.Random, gates: Path) -> Start:
    """Submit the run of a moment."""
    folder = arena.folder / "tiny"
    folder.mkdir()
    env = {"COUNTED": str(folder), "TINY_RECORDS": "yes" if moment.records else ""}
    env["TINY_GATES"] = str(gates)
    job = {
        "name": "tiny",
        "script": str(TASK),
        "resources": {"nnodes": moment.nodes, "cpus_per_node": 1, "memory": "1GiB"},
        "env": {"OMP_NUM_THREADS": "1", **env},
        "retries": {"in_job": 0, "requeue": 1},
        "stop": {"grace": "10s"},
        "sbatch": {"exclusive": True, **({"hold": True} if moment.holds else {})},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    graced = "grace" in moment.blows[0].hit.what
    site = {"partition": "graced" if graced else "low", "prolog": (wait_line(gates, "script"),)}
    profile = arena.site.profile.model_copy(update=site)
    launcher = SlurmLauncher(profile, command=arena.site._command)
    with _submitting:  # the locks of the toolkit's journal are those of processes
        run = launcher.submit(toolkit.plan(toolkit.load(folder / "job.yaml"), profile))
    trial = Trial(run=run, folder=folder)
    start = Start(arena=arena, trial=trial, nodes=moment.nodes, dice=dice, gates=gates)
    if moment.holds:
        start.hold(moment.blows[0].phase)
    return start


def strike(start: Start, moment: Moment, played: Played) -> None:
    """Hit the run with each fault at its moment, and let it go on."""
    number = 0
    for blow in moment.blows:
        start.wait(blow.phase, number)
        time.sleep(blow.delay_s)
        before = start.attempts()
        over, hit_s = blow.hit.inject(start), time.time()
        after, seen = start.attempts(), start.phase_at(hit_s)
        start.let_go()
        # It may hit the next attempt: before that has a folder, or where the one before was ending.
        early = {after} if blow.hit.ends or blow.phase in PHASES[:3] else set()
        played.struck.append((blow, {before - 1, after - 1} | early, seen))
        if over and blow.hit.ends:
            return
        number = after if over else max(after - 1, 0)
        start.let_step(number if blow is moment.blows[-1] else NEVER)
        blow.hit.settle(start)


def judge(start: Start, played: Played) -> None:
    """Hold the end of a run to what its faults allow.

    Raises:
        Broken: it has ended otherwise, or something is left of it.
    """
    trial, moment = start.trial, played.moment
    try:
        status = trial.run.wait(LIMIT_S)
    except TimeoutError as error:
        raise Broken(f"{error}: {status_of(trial)}") from None
    try:
        wait_for(lambda: not living(trial), "no process is left", 60)
    except Broken as broken:
        left = [command.decode()[:200] for command, _ in living(trial).values()]
        raise Broken(f"{broken}: {left}") from None
    played.reasons, played.state = trial.reasons(), str(status.state)
    ended = any(blow.hit.ends for blow, *_ in played.struck)
    wanted = RunState.CANCELLED if ended else RunState.SUCCEEDED
    told = f"{status.state}: {status.reason!r}; reasons: {played.reasons}"
    if killed_by_slurm(status, played):
        return  # nothing of ours had begun that could have queued it again
    if status.state is not wanted:
        raise Broken(f"it is {told}; wanted {wanted}")
    if list(trial.folder.glob("twice-*")):
        raise Broken(f"two copies of a rank have lived at once: {told}")
    listed = start.arena.cluster.slurm("scontrol", "-o", "show", "jobs").splitlines()
    if len(jobs := [line for line in listed if str(trial.run_dir) in line]) != 1:
        raise Broken(f"{len(jobs)} jobs: {jobs}")
    if not ended:
        right_result(trial, moment.nodes)
    right_words(played, ended, status.reason)
    whys = [one.why for one in restarts_in(trial.run_dir)]
    patterns = [blow.hit.reason for blow, *_ in played.struck]
    for why in whys:
        if not any(re.search(pattern, why) for pattern in patterns):
            raise Broken(f"status tells of {why!r}; {told}")


def killed_by_slurm(status: RunStatus, played: Played) -> bool:
    """Whether SIGTERM came before bash ran: Slurm then fails the job, and does not queue it again.

    The status must say that, and how to go on.
    """
    told = re.fullmatch(
        r"FAILED: the batch script ended before its first line, by a signal, .*"
        r"\((JobLaunchFailure|RaisedSignal:15\S*)\); `toolkit resubmit` starts it again",
        status.reason,
    )
    before_bash = any(
        blow.hit.what in ("TERM to the script", "TERM to both") and phase in PHASES[:2]
        for blow, _, phase in played.struck
    )
    return bool(told) and before_bash and status.state is RunState.FAILED


def right_result(trial: Trial, nodes: int) -> None:
    """Insist that each rank has made all steps, one after the other."""
    for rank in range(nodes):
        wanted = ""
        for step in range(1, STEPS + 1):
            wanted = digest(rank, step, wanted)
        if (found := checkpoint(trial.run_dir, rank)) != (STEPS, wanted):
            raise Broken(f"rank {rank} has ended with {found}")


def right_words(played: Played, ended: bool, reason: str) -> None:
    """Insist that each attempt's reason tells what was done to it, and counts no more than that."""
    reasons = played.reasons
    counted = [text for text in reasons if text.partition(":")[0] in COUNTED]
    if len(counted) > sum(blow.hit.failures for blow, *_ in played.struck):
        raise Broken(f"counted as a failure: {counted}; reasons: {reasons}")
    for number, text in enumerate(reasons):
        patterns = [blow.hit.reason for blow, where, _ in played.struck if number in where]
        if number == len(reasons) - 1 and not ended:
            patterns = [r"^done: all steps made$"]
        if not any(re.search(pattern, text) for pattern in patterns):
            raise Broken(f"attempt {number} says {text!r}, wanted {patterns}; reasons: {reasons}")
    by = [blow.hit.reason.strip("^") for blow, *_ in played.struck if blow.hit.ends]
    if ended and not any(re.search(p, reason) for p in (*by, "never started", "before it began")):
        raise Broken(f"the status says {reason!r}, wanted {by}; reasons: {reasons}")


# ---- Playing many


def play_all(
    cluster: Cluster,
    folder: Path,
    moments: Sequence[Moment],
    seed: int,
    *,
    lanes: int,
    tell: Callable[[Played], None] = lambda _: None,
) -> list[Played]:
    """Play moments, so many at a time."""

    def one(moment: Moment) -> Played:
        place = folder / f"moment-{moment.number}"
        place.mkdir()
        played = play(cluster, place, moment, seed, gates)
        tell(played)
        return played

    with gated(cluster, folder) as gates, ThreadPoolExecutor(lanes) as pool:
        return list(pool.map(one, moments))


def line(played: Played) -> str:
    """Return how a moment went."""
    seen = ", ".join(phase for *_, phase in played.struck)
    if played.broken:
        return f"{played.moment} (seen: {seen}): BROKEN: {played.broken}"
    words = " | ".join(played.reasons) or "never started"
    return f"{played.moment} (seen: {seen}): {played.state} in {played.spent_s:.0f} s: {words}"


def again(seed: int, played: Played) -> str:
    """Return the command that plays a moment again."""
    return f"make chaos SEED={seed} MOMENT={played.moment.number}"


def table(all_played: Sequence[Played]) -> str:
    """Return how many faults have hit in which phase, and how many of the runs were broken."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    broken: collections.Counter[tuple[str, str]] = collections.Counter()
    for played in all_played:
        for blow, _, phase in played.struck:
            counts[blow.hit.what, phase] += 1
            broken[blow.hit.what, phase] += bool(played.broken)
    rows = [["fault", *PHASES]]
    for hit in HITS:
        cells = [(counts[hit.what, phase], broken[hit.what, phase]) for phase in PHASES]
        rows.append([hit.what, *(f"{n} ({b} broken)" if b else f"{n or '-'}" for n, b in cells)])
    return "\n".join(" | ".join(f"{cell:18}" for cell in row).rstrip() for row in rows)


def main() -> int:
    """Play moments on a sandbox of their own; return whether one was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.system.chaos.first_seconds", description=__doc__
    )
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--moment", type=int, default=None, help="play this moment alone")
    parser.add_argument("--lanes", type=int, default=3, help="how many at a time (%(default)s)")
    given = parser.parse_args()
    seed = random.randrange(1 << 20) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="first-", dir="/tmp"))
    folder.chmod(0o755)
    os.environ["XDG_STATE_HOME"] = str(folder / "state")  # not among the user's own runs
    for number in (signal.SIGINT, signal.SIGTERM):  # also in the background of a shell
        signal.signal(number, signal.default_int_handler)
    numbers = range(given.moments) if given.moment is None else [given.moment]
    print(f"seed {seed}; folder {folder}", flush=True)

    def tell(played: Played) -> None:
        print(line(played), flush=True)
        if played.broken:
            print(f"  again: {again(seed, played)}", flush=True)

    state = folder / "sb"
    up = ("up", "--nodes", f"{2 * given.lanes + 2}", "--kill-wait", "5", "--dir", str(state))
    try:
        subprocess.run([SANDBOX, *up], check=True)
        moments = [draw(seed, number) for number in numbers]
        found = play_all(Cluster(state), folder, moments, seed, lanes=given.lanes, tell=tell)
    finally:
        subprocess.run([SANDBOX, "down", "--dir", str(state)], check=True)
    print(table(found))
    broken = sum(bool(played.broken) for played in found)
    print(f"{len(found)} moments of seed {seed}, {broken} broken")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
