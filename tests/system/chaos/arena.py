"""The three places of the drawn runs: a Slurm cluster, a cluster of pods, this machine.

An arena submits runs of the task `counted`, finds their processes, and undoes what faults changed.
"""

import abc
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import toolkit
from tests.conftest import ROOT, SANDBOX, Cluster
from tests.fakes.kubernetes import FakeKubernetes
from tests.support.processes import is_torchrun, with_environment
from tests.support.slurm_site import Site
from tests.system.chaos.frame import Trial, submit, write_job
from toolkit.job.kubernetes_options import Workload
from toolkit.kubernetes import KubernetesLauncher
from toolkit.local.launcher import LocalLauncher
from toolkit.runs.state import RunState, RunStatus

RUNTIME = ROOT / "k8s/base/trainer/runtime.yaml"
CLAIM = "runs"
OVER_MEMORY_KILL = "over-memory-kill"
"""An option of the sandbox, which gives Slurm the parameter of this name."""


class Arena(abc.ABC):
    """A place where runs are submitted and harmed."""

    place: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._undo: list[Callable[[], object]] = []
        self._restore: list[Callable[[], object]] = []

    @abc.abstractmethod
    def submit(self, overrides: Sequence[str], *, pace: float, every: int) -> Trial:
        """Submit a run of two ranks on two nodes."""

    @abc.abstractmethod
    def go_on(self, trial: Trial) -> None:
        """Start a run again that has ended."""

    def offers(self, need: str) -> bool:
        """Whether the place has what a fault needs."""
        return not need

    def undo_later(self, undo: Callable[[], object]) -> None:
        """Remember how a change of the place is undone."""
        self._undo.append(undo)

    def heal(self) -> None:
        """Undo all changes, the newest first."""
        while self._undo:
            self._undo.pop()()

    def restore_later(self, restore: Callable[[], object]) -> None:
        """Remember what makes the place as it was, and would end what a run has left there."""
        self._restore.append(restore)

    def restore(self) -> None:
        """Undo all changes, and make the place as it was: only after a run has been judged."""
        self.heal()
        while self._restore:
            self._restore.pop()()

    def holds_nodes(self, trial: Trial) -> bool:
        """Whether nodes are reserved for the run."""
        return status_of(trial).state is RunState.RUNNING


class SlurmArena(Arena):
    """A sandbox with four nodes; `disk` is a small file system of all of its nodes."""

    place = "slurm"

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *,
        disk: Path | None = None,
        over_memory_kill: bool = False,
    ) -> None:
        super().__init__(folder)
        folder.mkdir(exist_ok=True)
        self.cluster, self.disk, self.over_memory_kill = cluster, disk, over_memory_kill
        self.site = Site(cluster, folder)

    def submit(self, overrides: Sequence[str], *, pace: float, every: int) -> Trial:
        """Submit to partition `low`, which `high` may preempt; `@disk` puts the run on the disk."""
        words = [word for word in overrides if word != "@disk"]
        profile: dict[str, object] = {"partition": "low"}
        if "@disk" in overrides:
            profile["runs_dir"] = str(self.disk)
        return submit(self.site, *words, pace=pace, every=every, **profile)

    def go_on(self, trial: Trial) -> None:
        """Submit the run's script again."""
        self.site.launcher.resubmit(trial.run)

    def offers(self, need: str) -> bool:
        """Whether there is a small disk, or a Slurm that kills jobs for their memory."""
        there = {"": True, "disk": self.disk is not None, OVER_MEMORY_KILL: self.over_memory_kill}
        return there[need]

    def slurm(self, *argv: str) -> bool:
        """Run a command of Slurm that may come too late; return whether Slurm accepted it."""
        return self.cluster._run(*argv).returncode == 0

    def sandbox(self, *argv: str) -> bool:
        """Run a command of the sandbox that a node without power refuses; return whether it ran."""
        with contextlib.suppress(AssertionError):
            self.cluster(*argv)
            return True
        return False

    def job(self, trial: Trial) -> dict[str, str]:
        """Return the fields of the run's newest job as scontrol shows them; empty if unknown."""
        shown = self.cluster._run("scontrol", "-o", "show", "job", trial.job_id).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def nodes(self, trial: Trial) -> list[str]:
        """Return the nodes of the run's job, the first node first."""
        listed = self.job(trial).get("NodeList", "(null)")
        if listed == "(null)":
            return []
        return self.cluster.slurm("scontrol", "show", "hostnames", listed).split()

    def processes(self, node: str, part: str) -> list[int]:
        """Return the processes of a node, Slurm's own included, whose command holds `part`."""
        listed = json.loads(self.cluster("ps", node, "--all", "--json"))
        return [process["pid"] for process in listed if part in process["command"]]

    def power_cycle(self, node: str) -> None:
        """Put a node back to work sooner than Slurm would, which seldom pings lost nodes."""
        self.cluster("power-off", node)
        self.power_on(node)

    def power_on(self, node: str) -> None:
        """Start a node again; one that is drained, too, since Slurm shall use it."""
        self.slurm("scontrol", "update", f"nodename={node}", "state=undrain")
        self.cluster("power-on", node)

    def holds_nodes(self, trial: Trial) -> bool:
        """Whether Slurm has reserved nodes for the job, as squeue says."""
        state = self.cluster._run("squeue", "-h", "-j", trial.job_id, "-o", "%T").stdout.strip()
        return state == "RUNNING"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodTrial(Trial):
    """A run whose directory lies on the claim of a cluster."""

    run: Any
    claim: Path

    @property
    def run_dir(self) -> Path:
        """The run directory, on the machine that plays the nodes."""
        return self.claim / str(self.run.name)

    def reasons(self) -> list[str]:
        """Return how the first, second, ... starts of the pods ended, in all submissions."""
        found = []
        for number in range(len(list(self.run_dir.glob("logs/attempt-*")))):
            ends = [
                [*_lines(folder / "earlier_ends"), *(_lines(folder / "ended") or [""])]
                for folder in sorted(path.parent for path in self.attempt(number).glob("*/began"))
            ]
            found += [" | ".join(filter(None, words)) for words in zip_longest(*ends)]
        return found


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class PodArena(Arena):
    """The tests' Kubernetes cluster, whose pods are processes of this machine."""

    place = "pods"

    def __init__(self, server: FakeKubernetes, folder: Path, workload: Workload) -> None:
        super().__init__(folder)
        folder.mkdir(exist_ok=True)
        self.server = server
        self.profile = toolkit.KubernetesProfile(
            name="pods", namespace=server.namespaces[0], runs_claim=CLAIM, workload=workload
        )
        self.launcher = KubernetesLauncher(
            self.profile,
            api_client=server.api_client(),
            environ={"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")},
        )

    def submit(self, overrides: Sequence[str], *, pace: float, every: int) -> Trial:
        """Submit the workload."""
        path = write_job(self.folder, pace=pace, every=every)
        words = [*overrides, "image=localhost/train:1", "resources.shm=64MiB"]
        job = toolkit.load(path, words)
        run = self.launcher.submit(toolkit.plan(job, self.profile))
        claim = self.server.root / "claims" / CLAIM
        return PodTrial(run=run, folder=path.parent, claim=claim)

    def go_on(self, trial: Trial) -> None:
        """Make the workload again."""
        self.launcher.resubmit(trial.run)

    def pods(self, trial: Trial) -> list[str]:
        """Return the names of the pods whose container runs."""
        pods = self.server.pods(trial.run.name)
        running = [
            pod["metadata"]["name"]
            for pod in pods
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        return sorted(running)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalTrial(Trial):
    """A run on this machine, which may go on by hand."""

    run: Any
    again: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    def status(self) -> RunStatus:
        """Return the run's status; running while a script started by hand runs."""
        if any(process.poll() is None for process in self.again):
            return RunStatus(state=RunState.RUNNING)
        found: RunStatus = self.run.status()
        return found


class LocalArena(Arena):
    """This machine."""

    place = "local"

    def submit(self, overrides: Sequence[str], *, pace: float, every: int) -> Trial:
        """Start the run under a supervisor."""
        path = write_job(self.folder, pace=pace, every=every)
        profile = toolkit.LocalProfile(name="here", runs_dir=str(self.folder / "runs"))
        plan = toolkit.plan(toolkit.load(path, overrides), profile)
        return LocalTrial(run=LocalLauncher(profile).submit(plan), folder=path.parent)

    def go_on(self, trial: Trial) -> None:
        """Start the run's script by hand; each start is one attempt."""
        assert isinstance(trial, LocalTrial)
        environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        script = str(trial.run_dir / "run.sh")
        argv = ["bash", script, str(trial.run_dir), "continue"]
        with (trial.folder / "continued.log").open("a") as log:
            process = subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=log, stderr=log)
        trial.again.append(process)


def status_of(trial: Trial) -> RunStatus:
    """Return a run's status; UNKNOWN where the place gives no answer."""
    try:
        if isinstance(trial, LocalTrial):
            return trial.status()
        return trial.run.status()
    except toolkit.ToolkitError as error:
        return RunStatus(state=RunState.UNKNOWN, reason=str(error))


def living(trial: Trial) -> dict[int, tuple[bytes, bytes]]:
    """Return command line and environment of each process of a run, on any node."""
    found = {}
    for pid in with_environment(f"COUNTED={trial.folder}\0") | trial.processes():
        with contextlib.suppress(OSError):
            process = Path(f"/proc/{pid}")
            found[pid] = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
    return found


def ranks(trial: Trial) -> dict[int, list[int]]:
    """Return the processes that train, by rank."""
    found: dict[int, list[int]] = {}
    for pid, (_, environ) in living(trial).items():
        for variable in environ.split(b"\0"):
            if variable.startswith(b"RANK="):
                found.setdefault(int(variable[5:]), []).append(forked(pid) or pid)
    return found


def forked(pid: int) -> int:
    """Return the rank whose proxy a process is (`start: warm`), in any PID namespace; 0 if none."""
    with contextlib.suppress(OSError):
        word, _, number = Path(f"/proc/{pid}/comm").read_text().strip().partition("-")
        space = Path(f"/proc/{pid}/ns/pid").readlink()
        for path in Path("/proc").glob("[0-9]*") if word == "for" else ():
            with contextlib.suppress(OSError):
                pids = re.search(r"^NSpid:.*?(\d+)$", (path / "status").read_text(), re.M)
                if pids and pids[1] == number and space == (path / "ns/pid").readlink():
                    return int(path.name)
    return 0


def torchruns(trial: Trial) -> list[int]:
    """Return the torchrun processes."""
    return sorted(
        pid
        for pid, (command, environ) in living(trial).items()
        if is_torchrun(command) and b"\0RANK=" not in environ
    )


@contextlib.contextmanager
def own_slurm(folder: Path) -> Iterator[SlurmArena]:
    """Start a sandbox of four nodes, all of which see a small disk."""
    disk, state = folder / "disk", folder / "sb"
    disk.mkdir(parents=True)
    # Before the nodes are made, so that all of them have it.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "chaos", disk], check=True)
    argv = ["up", "--nodes", "4", "--kill-wait", "5", "--dir", str(state)]
    usage = subprocess.run([SANDBOX, "up", "--help"], check=True, capture_output=True, text=True)
    kills = f"--{OVER_MEMORY_KILL}" in usage.stdout
    try:
        subprocess.run([SANDBOX, *argv, *([f"--{OVER_MEMORY_KILL}"] * kills)], check=True)
        arena = SlurmArena(Cluster(state), folder / "slurm", disk=disk, over_memory_kill=kills)
        yield arena
        arena.restore()
    finally:
        subprocess.run([SANDBOX, "down", "--dir", str(state)], check=True)
        subprocess.run(["umount", disk], check=True)


@contextlib.contextmanager
def own_pods(folder: Path, workload: Workload = "JobSet") -> Iterator[PodArena]:
    """Start a cluster of pods."""
    with FakeKubernetes(auto_run=True, restricted=True) as server:
        server.apply(RUNTIME.read_text().replace("namespace: team-a", ""))
        yield PodArena(server, folder, workload)
