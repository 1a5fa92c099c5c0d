"""The faults that can be drawn, as data: how each is injected, and what may follow from it.

`make faults` runs each of them once and writes the table of docs/how-to/failures.md; `make chaos`
draws them at any moment.
"""

import contextlib
import dataclasses
import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.support.processes import BATCH_ROLE
from tests.system.chaos import arena as places
from tests.system.chaos.arena import Arena, PodArena, SlurmArena, status_of
from tests.system.chaos.frame import Trial
from tests.system.chaos.memory import limited
from toolkit.errors import LauncherError
from toolkit.runs.state import RunState

T = TypeVar("T")

IN_PLACE, ANOTHER = "ranks restarted in the job", "another attempt"
FINAL, UNHURT = "the run ends", "training continues"
AGAIN = frozenset({ANOTHER})
_VICTIM_S = 120
"""How long a fault waits for the process that it hits."""


@dataclasses.dataclass
class Scene:
    """A run in its arena, and the dice."""

    arena: Arena
    trial: Trial
    dice: random.Random

    def victim(self, look: Callable[[], T]) -> T | None:
        """Return what is looked for as soon as it is there; None where the run ends before."""
        deadline = time.monotonic() + _VICTIM_S
        while time.monotonic() < deadline:
            if found := look():
                return found
            if status_of(self.trial).state.final:
                return None
            time.sleep(0.1)
        return None

    @property
    def slurm(self) -> SlurmArena:
        """The arena of a fault of Slurm."""
        assert isinstance(self.arena, SlurmArena)
        return self.arena

    @property
    def pods(self) -> PodArena:
        """The arena of a fault of pods."""
        assert isinstance(self.arena, PodArena)
        return self.arena


Injection = Callable[[Scene], bool]
"""Injects a fault; returns whether there was something to hit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault."""

    what: str
    """What happens: the row of the table."""

    place: str
    """`slurm`, `pods` or `local`."""

    inject: Injection

    reasons: tuple[str, ...] = ()
    """Regular expressions: what reason or status says of the fault alone, after a checkpoint; then
    the words of unlucky moments, and of other faults beside. None where nothing is said."""

    states: frozenset[RunState] = frozenset()
    """In which states the run may end, beside success."""

    follows: frozenset[str] = AGAIN
    """What may follow when the fault hits a run that has a checkpoint."""

    overrides: tuple[str, ...] = ()
    """What the job must have for it."""

    need: str = ""
    """What the place must offer."""

    prepare: Callable[[Arena], None] = lambda _: None
    """Called before the run is submitted."""

    drawn: bool = True
    """Whether it may be drawn beside others, at any moment."""

    quick: bool = False
    """Whether the gate may draw it."""

    hold_s: float = 120
    """How long the place stays harmed at most, where nothing follows by itself."""

    destroys: bool = False
    """Whether the run's results are gone."""


# Processes: in all places.


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Signal a process; return whether it lived."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def kill_rank(scene: Scene, number: int = signal.SIGKILL) -> bool:
    """Signal one rank, any of those that live."""
    found = scene.victim(lambda: places.ranks(scene.trial))
    if not found:
        return False
    return kill(scene.dice.choice(found[scene.dice.choice(sorted(found))]), number)


def kill_torchrun(scene: Scene) -> bool:
    """Kill torchrun of one node, and not its ranks."""
    found = scene.victim(lambda: places.torchruns(scene.trial))
    return bool(found) and kill(scene.dice.choice(found or []))


def hang_rank(scene: Scene) -> bool:
    """Stop a rank for good, as a driver that never returns does."""
    return kill_rank(scene, signal.SIGSTOP)


def raise_exception(scene: Scene) -> bool:
    """Let rank 1 raise an exception at each start, until the place is healed."""
    path = scene.trial.folder / "faulty-1"
    path.touch()
    scene.arena.undo_later(lambda: path.unlink(missing_ok=True))
    return True


def remove_run_directory(scene: Scene) -> bool:
    """Remove the run directory under the run."""
    if not scene.victim(lambda: places.ranks(scene.trial)):
        return False
    while scene.trial.run_dir.exists():  # its processes may write meanwhile
        shutil.rmtree(scene.trial.run_dir, ignore_errors=True)
    return True


def cancel(scene: Scene) -> bool:
    """Cancel the run as `toolkit cancel` does."""
    if status_of(scene.trial).state.final:
        return False
    try:
        scene.trial.run.cancel()
    except LauncherError:  # an earlier fault has the cluster away: a user asks again later
        scene.arena.heal()
        scene.trial.run.cancel()
    return True


# Slurm.


def kill_on_node(scene: Scene, part: str, *, first: bool = False, cycle: bool = False) -> bool:
    """Kill a process of the job's first or last node whose command holds `part`."""
    nodes = scene.victim(lambda: scene.slurm.nodes(scene.trial))
    if not nodes:
        return False
    node = nodes[0 if first else -1]
    pids = scene.victim(lambda: scene.slurm.processes(node, part))
    if pids and cycle:
        scene.arena.restore_later(lambda: scene.slurm.power_cycle(node))
    return bool(pids) and all([kill(pid) for pid in pids or []])


def power_off(scene: Scene, *, first: bool = False, back: bool = False) -> bool:
    """Cut the power of the job's first or last node, for longer or for a moment (`back`)."""
    nodes = scene.victim(lambda: scene.slurm.nodes(scene.trial))
    if not nodes:
        return False
    node = nodes[0 if first else -1]
    if back:
        scene.slurm.power_cycle(node)
        return True
    scene.arena.undo_later(lambda: scene.slurm.power_on(node))
    scene.slurm.cluster("power-off", node)
    return True


def cut(scene: Scene, *, first: bool = False) -> bool:
    """Pull the network cable of the job's first or last node, whose processes go on."""
    nodes = scene.victim(lambda: scene.slurm.nodes(scene.trial))
    if not nodes:
        return False
    node = nodes[0 if first else -1]
    scene.arena.restore_later(lambda: scene.slurm.power_cycle(node))
    scene.arena.undo_later(lambda: scene.slurm.sandbox("heal", node))
    return scene.slurm.sandbox("cut", node)


def update_node(scene: Scene, state: str) -> bool:
    """Have an administrator set the job's last node to a state."""
    nodes = scene.victim(lambda: scene.slurm.nodes(scene.trial))
    if not nodes:
        return False
    node, update = nodes[-1], ("scontrol", "update")
    scene.arena.undo_later(lambda: scene.slurm.slurm(*update, f"nodename={node}", "state=resume"))
    return scene.slurm.slurm(*update, f"nodename={node}", f"state={state}", "reason=chaos")


def control(scene: Scene, verb: str, undo: str = "") -> bool:
    """Have an operator run `scontrol VERB JOB`."""
    if undo:
        scene.arena.undo_later(lambda: scene.slurm.slurm("scontrol", undo, scene.trial.job_id))
    return scene.slurm.slurm("scontrol", verb, scene.trial.job_id)


def scancel(scene: Scene) -> bool:
    """Cancel the job behind the toolkit's back."""
    if status_of(scene.trial).state.final:
        return False
    return scene.slurm.slurm("scancel", scene.trial.job_id)


def preempt(scene: Scene) -> bool:
    """Submit an urgent job that needs all nodes."""
    argv = (
        *("sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive"),
        *("--output=/dev/null", "--wrap=sleep 1"),
    )
    try:
        urgent = scene.slurm.cluster.slurm(*argv).strip()
    except AssertionError:  # an earlier fault has the controller away
        scene.arena.heal()
        urgent = scene.slurm.cluster.slurm(*argv).strip()
    scene.arena.undo_later(lambda: scene.slurm.slurm("scancel", urgent))
    return True


def end_time(scene: Scene) -> bool:
    """Let the job's time be over soon."""
    if not scene.victim(lambda: scene.slurm.holds_nodes(scene.trial)):
        return False
    with contextlib.suppress(ValueError, AssertionError):
        scene.slurm.cluster.end_in(100, scene.trial.job_id)
        return True
    return False


def stop_controller(scene: Scene, *, kills: str = "") -> bool:
    """Stop slurmctld; it comes back when the place is healed."""
    scene.arena.undo_later(lambda: scene.slurm.cluster("start", "slurmctld"))
    scene.slurm.cluster("stop", "slurmctld")
    return kill_rank(scene) if kills else True


def limit_memory(arena: Arena) -> None:
    """Limit the memory of all nodes to a gibibyte; memory of processes from now on counts."""
    assert isinstance(arena, SlurmArena)
    stack = contextlib.ExitStack()
    for number in range(1, 5):
        stack.enter_context(limited(arena.cluster, f"node{number}", 1 << 30))
    arena.undo_later(stack.close)


def eat_memory(scene: Scene, *, pause_s: float = 0) -> bool:
    """Let rank 1 allocate 32 MiB after each pause."""
    path = scene.trial.folder / "hungry-1"
    path.write_text(f"{pause_s}")
    scene.arena.undo_later(lambda: path.unlink(missing_ok=True))
    return True


def fill_disk(scene: Scene) -> bool:
    """Write until nothing more fits on the disk of the run directory."""
    assert scene.slurm.disk is not None
    path = scene.slurm.disk / "filler"
    scene.arena.undo_later(lambda: path.unlink(missing_ok=True))
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return True


# Pods.


def on_pod(scene: Scene, hit: str, *, first: bool = False) -> bool:
    """Do something to the first or last pod by the cluster's hands."""
    pods = scene.victim(lambda: scene.pods.pods(scene.trial))
    if not pods:
        return False
    pod = pods[0 if first else -1]
    try:
        if hit == "delete":
            scene.pods.server.delete(pod, scene.pods.server.namespaces[0], kind="Pod")
        else:
            getattr(scene.pods.server, hit)(pod)
    except LookupError:  # it has ended meanwhile
        return False
    return True


def lose_node(scene: Scene, *, first: bool) -> bool:
    """Freeze the processes of a pod, whose peers hear nothing more; then delete it by force."""
    pods = scene.victim(lambda: scene.pods.pods(scene.trial))
    if not pods or not scene.victim(lambda: places.ranks(scene.trial)):
        return False
    pod = pods[0 if first else -1]
    host = pod.rpartition("-")[0].encode()
    for pid, (_, environ) in places.living(scene.trial).items():
        if b"HOSTNAME=" + host + b"\0" in environ or b"HOSTNAME=" + pod.encode() in environ:
            kill(pid, signal.SIGSTOP)
    with contextlib.suppress(LookupError, KeyError):
        scene.pods.server.evict(pod, reason="DeletionByTaintManager")
        scene.pods.server.kill(pod)
    return True


def api_away(scene: Scene) -> bool:
    """Let the API server refuse connections until the place is healed."""
    stack = contextlib.ExitStack()
    scene.arena.undo_later(stack.close)
    stack.enter_context(scene.pods.server.away())
    return True


# This machine.


def signal_supervisor(scene: Scene, number: int) -> bool:
    """Signal the process that keeps the run."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((scene.trial.run_dir / "running.lock").read_text())
        mine = Path(f"/proc/{pid}/cmdline").read_bytes()
        return pid > 1 and os.fsencode(scene.trial.run_dir) in mine and kill(pid, number)
    return False


_WITHOUT = ("retries.in_job=0",)
_WITHIN = ("retries.in_job=2",)
_HANGS = ("args.9=20",)
_LOST = (
    r"down: node\d",
    r"node_failure: ",
    r"lost: ",
    r"preempted: ",
    r"failed: ",
    r"requeued: ",
)
_STOPPED = (r"preempted: ", r"terminated: ", r"failed: ", r"requeued: by Slurm")
_KILLED = (r"failed: ", r"torchrun ended with .*(failed|preempted)")
_TAKEN = (r"torchrun ended with .*(preempted|failed)", *_KILLED)
_FAILED, _CANCELLED = frozenset({RunState.FAILED}), frozenset({RunState.CANCELLED})


def _slurm(what: str, inject: Injection, *reasons: str, **more: object) -> Fault:
    return Fault(what=what, place="slurm", inject=inject, reasons=reasons, **more)  # type: ignore[arg-type]


def _pod(what: str, inject: Injection, *reasons: str, **more: object) -> Fault:
    return Fault(what=what, place="pods", inject=inject, reasons=reasons, **more)  # type: ignore[arg-type]


def _local(what: str, inject: Injection, *reasons: str, **more: object) -> Fault:
    return Fault(what=what, place="local", inject=inject, reasons=reasons, **more)  # type: ignore[arg-type]


_bind = functools.partial

FAULTS: tuple[Fault, ...] = (
    _slurm(
        "a rank is killed; `retries.in_job: 2`", kill_rank, *_KILLED,
        follows=frozenset({IN_PLACE}), overrides=_WITHIN,
    ),
    _slurm("a rank is killed; `retries.in_job: 0`", kill_rank, *_KILLED, quick=True),
    _slurm(
        "torchrun is killed", kill_torchrun,
        r"failed: torchrun was killed on node\d", *_KILLED, quick=True,
    ),
    _slurm(
        "a rank hangs", hang_rank, *_KILLED,
        follows=frozenset({ANOTHER, IN_PLACE}), overrides=_HANGS,
    ),
    _slurm(
        "the script raises an exception at each start", raise_exception,
        r"fatal: .*IndexError", r"failed: ",
        states=_FAILED, follows=frozenset({FINAL}),
    ),
    _slurm(
        "the batch script is killed", _bind(kill_on_node, part=BATCH_ROLE, first=True),
        r"the batch script was killed", r"FAILED: ", r"lost: ", r"preempted: ",
        states=_FAILED, follows=frozenset({FINAL}),
    ),
    _slurm(
        "slurmstepd of a node is killed", _bind(kill_on_node, part="slurmstepd"),
        *_LOST, states=_FAILED, follows=frozenset({ANOTHER, UNHURT}),
    ),
    _slurm(
        "slurmd of a node is killed", _bind(kill_on_node, part="slurmd ", cycle=True),
        *_LOST, follows=frozenset({ANOTHER}),
    ),
    _slurm(
        "the last node loses its power",
        power_off, *_LOST,
    ),
    _slurm(
        "the first node loses its power",
        _bind(power_off, first=True), *_LOST,
    ),
    _slurm(
        "the last node loses its power for a moment", _bind(power_off, back=True),
        r"node_failure: node\d has restarted", *_LOST, follows=frozenset({ANOTHER}),
    ),
    _slurm(
        "the first node loses its power for a moment", _bind(power_off, first=True, back=True),
        r"lost: the batch script was killed", *_LOST, follows=frozenset({ANOTHER}),
    ),
    _slurm(
        "the last node loses its network cable", cut, *_LOST
    ),
    _slurm(
        "the first node loses its network cable",
        _bind(cut, first=True), *_LOST,
    ),
    _slurm("a node is set down", _bind(update_node, state="down"), *_LOST),
    _slurm(
        "a node is drained", _bind(update_node, state="drain"),
        follows=frozenset({UNHURT}), hold_s=8,
    ),
    _slurm(
        "an operator requeues the job", _bind(control, verb="requeue"),
        r"requeued: by an operator", *_STOPPED, quick=True,
    ),
    _slurm(
        "an operator requeues and holds the job",
        _bind(control, verb="requeuehold", undo="release"),
        r"(?i)held", r"requeued: by an operator", *_STOPPED, hold_s=20,
    ),
    _slurm(
        "an operator suspends the job", _bind(control, verb="suspend", undo="resume"),
        r"(?i)suspended", follows=frozenset({UNHURT}), hold_s=8,
    ),
    # KillWait (5 s) may be over before the script knows why.
    _slurm("preemption", preempt, r"preempted: |terminated: by Slurm", *_STOPPED),
    _slurm(
        "the time limit", end_time, r"walltime: out of time", *_STOPPED,
        overrides=("time_limit=10m",),
    ),
    _slurm(
        "out of memory (cgroup)", eat_memory, r"fatal: out of memory",
        states=_FAILED, follows=frozenset({FINAL}), prepare=limit_memory, drawn=False,
    ),
    _slurm(
        "out of memory (accounting, OverMemoryKill)", _bind(eat_memory, pause_s=0.5),
        r"fatal: out of memory", states=_FAILED, follows=frozenset({FINAL}),
        overrides=("resources.memory=1GiB",), need="over-memory-kill", drawn=False,
    ),
    _slurm(
        "the disk is full", fill_disk, r"fatal: .*(?i:no space)",
        states=_FAILED, follows=frozenset({FINAL}), overrides=("@disk",), need="disk", drawn=False,
    ),
    _slurm(
        "the run directory is removed", remove_run_directory, r"was removed|is gone",
        states=_FAILED, follows=frozenset({FINAL}), drawn=False, destroys=True,
    ),
    _slurm(
        "scancel", scancel, r"cancelled: by scancel", r"terminated: ", r"CANCELLED",
        states=_CANCELLED, follows=frozenset({FINAL}), quick=True,
    ),
    _slurm(
        "`toolkit cancel`", cancel, r"cancelled: by toolkit cancel", r"cancelled",
        states=_CANCELLED, follows=frozenset({FINAL}), quick=True,
    ),
    _slurm("slurmctld is away", stop_controller, follows=frozenset({UNHURT}), hold_s=8, quick=True),
    _slurm(
        "slurmctld is away when a rank is killed", _bind(stop_controller, kills="rank"), *_KILLED
    ),
    _pod(
        "a rank is killed in a pod; `retries.in_job: 2`", kill_rank, *_KILLED,
        follows=frozenset({IN_PLACE}), overrides=_WITHIN,
    ),
    _pod("a rank is killed in a pod; `retries.in_job: 0`", kill_rank, *_KILLED, quick=True),
    _pod("torchrun is killed in a pod", kill_torchrun, *_KILLED, quick=True),
    _pod(
        "the first process of a pod is killed", _bind(on_pod, hit="kill"), *_TAKEN, quick=True
    ),
    _pod("a pod is deleted", _bind(on_pod, hit="delete"), *_TAKEN, quick=True),
    _pod("a pod is evicted", _bind(on_pod, hit="evict"), *_TAKEN, quick=True),
    _pod("the last pod's node is lost", _bind(lose_node, first=False), *_TAKEN, overrides=_HANGS),
    _pod("the rendezvous host is lost", _bind(lose_node, first=True), *_TAKEN, overrides=_HANGS),
    _pod("the API server is away", api_away, follows=frozenset({UNHURT}), hold_s=8, quick=True),
    _pod(
        "a pod runs out of memory", _bind(on_pod, hit="oom"), r"out of memory",
        *_KILLED, states=_FAILED, follows=frozenset({FINAL}),
    ),
    _pod(
        "a pod's script raises an exception at each start", raise_exception,
        r"fatal: .*IndexError", *_KILLED, states=_FAILED, follows=frozenset({FINAL}),
    ),
    _pod(
        "the deadline of a workload", lambda _: True, r"(?i)deadline|time_limit|walltime", *_KILLED,
        states=_FAILED | {RunState.PREEMPTED}, follows=frozenset({FINAL}),
        overrides=("time_limit=40s", "stop.grace=5s"), drawn=False,
    ),
    _pod(
        "`toolkit cancel` of pods", cancel, r"(?i)cancel", *_KILLED,
        states=_CANCELLED, follows=frozenset({FINAL}), quick=True,
    ),
    _local(
        "a rank is killed on this machine; `retries.in_job: 2`", kill_rank, *_KILLED,
        follows=frozenset({IN_PLACE}), overrides=_WITHIN,
    ),
    _local(
        "a rank is killed on this machine; `retries.in_job: 0`", kill_rank, *_KILLED, quick=True
    ),
    _local("torchrun is killed on this machine", kill_torchrun, *_KILLED, _STOPPED[0], quick=True),
    _local(
        "the supervisor is killed", _bind(signal_supervisor, number=signal.SIGKILL),
        r"supervisor|cancelled: ", r"lost: ", r"killed",
        states=_FAILED | _CANCELLED, follows=frozenset({FINAL}), quick=True,
    ),
    _local(
        "Ctrl-C", _bind(signal_supervisor, number=signal.SIGINT), r"cancelled: ",
        states=_CANCELLED, follows=frozenset({FINAL}), quick=True,
    ),
    _local(
        "the script raises an exception at each start, on this machine", raise_exception,
        r"fatal: .*IndexError", r"failed: ",
        states=_FAILED, follows=frozenset({FINAL}),
    ),
    _local(
        "the run directory is removed on this machine", remove_run_directory,
        r"was removed|is gone",
        states=_FAILED | {RunState.UNKNOWN}, follows=frozenset({FINAL}), drawn=False, destroys=True,
    ),
    _local(
        "`toolkit cancel` on this machine", cancel, r"cancelled",
        states=_CANCELLED, follows=frozenset({FINAL}), quick=True,
    ),
)  # fmt: skip
