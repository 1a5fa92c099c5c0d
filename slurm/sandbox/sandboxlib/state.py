"""The state of a sandbox: its directory, its record, and its processes by pid and start time."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

CONTROLLER = "controller"


class SandboxError(Exception):
    """An error that the user can mend: a message, and the exit status that goes with it."""

    def __init__(self, message: str, status: int = 1) -> None:
        """Keep the message and the exit status (2 for a wrong call or a missing prerequisite)."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The options of `up`."""

    nodes: int
    cpus: int
    memory: int
    """MiB per node."""
    gpus: int
    kill_wait: int
    """Seconds from SIGTERM to SIGKILL."""
    min_job_age: int
    """Seconds for which the controller remembers a finished job."""
    accounting: bool
    cloud: int = 0
    """The number of nodes in partition `cloud`, which Slurm knows and which never start."""
    message_timeout: int = 5
    """Seconds that a daemon may take to answer another; Slurm's own default is 10."""
    over_memory_kill: bool = False
    """Whether accounting kills a step that uses more memory than the job asked for."""
    slurm: str = ""
    """The folder of another Slurm, as `fetch` makes it; empty for the machine's own."""

    @property
    def node_names(self) -> list[str]:
        """Names of the nodes, in order."""
        return [f"node{index}" for index in range(1, self.nodes + 1)]


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of this boot, by pid and start time: the system uses pids again."""

    pid: int
    started: int
    """Clock ticks since boot."""

    @classmethod
    def of(cls, pid: int) -> Process:
        """Identify the process that has this pid now."""
        fields = stat_fields(pid)
        if fields is None:
            raise SandboxError(f"process {pid} has ended too early")
        return cls(pid=pid, started=int(fields[19]))

    def alive(self) -> bool:
        """Whether exactly this process still runs (a zombie does not)."""
        fields = stat_fields(self.pid)
        return fields is not None and int(fields[19]) == self.started and fields[0] not in "ZX"


def stat_fields(pid: int) -> list[str] | None:
    """Fields 3 and up of /proc/PID/stat (0 is the state, 19 the start time); None when gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def boot_id() -> str:
    """Identify the current boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, kw_only=True)
class Record:
    """The started machines, as written in sandbox.json."""

    boot: str
    shape: Shape
    machines: dict[str, Process]
    """PID 1 of the controller and of every node that was ever powered on."""

    def alive(self, name: str) -> bool:
        """Whether a machine is powered on."""
        process = self.machines.get(name)
        return self.boot == boot_id() and process is not None and process.alive()


class StateDir:
    """The directory of one sandbox. `down` leaves only logs/ and bin/.

    The shims in bin/ stay because a login shell that still has them in its PATH should hear that
    the sandbox is down, rather than talk to another cluster.
    """

    PARTS = ("containers", "dev", "etc", "mariadb", "state")

    def __init__(self, path: Path) -> None:
        """Take any path; `require_usable` checks whether a cluster can start in it."""
        self.path = path.resolve()
        self.bin = self.path / "bin"
        self.containers = self.path / "containers"
        self.dev = self.path / "dev"
        self.etc = self.path / "etc"
        self.logs = self.path / "logs"
        self.record_file = self.path / "sandbox.json"
        self.slurm_conf = self.etc / "slurm.conf"

    def require_usable(self) -> None:
        """Refuse a path that configuration files of Slurm cannot hold."""
        if not re.fullmatch(r"[\w./+@:~-]+", str(self.path), re.ASCII):
            raise SandboxError(
                f"{self.path}: Slurm's configuration cannot hold this path; choose one without "
                "blanks and special characters, as in: sandbox up --dir /tmp/sandbox",
                status=2,
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep two commands from changing one sandbox at the same time."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def create(self) -> None:
        """Make empty directories; old logs end here."""
        shutil.rmtree(self.logs, ignore_errors=True)
        for part in (*self.PARTS, "bin", "logs"):
            (self.path / part).mkdir(parents=True, exist_ok=True)
        (self.path / ".gitignore").write_text("*\n")

    def remove(self) -> None:
        """Delete what `create` and `up` made, and nothing else that may lie in the directory."""
        for part in self.PARTS:
            shutil.rmtree(self.path / part, ignore_errors=True)
        self.record_file.unlink(missing_ok=True)

    def save(self, record: Record) -> None:
        """Write the record so that a reader sees the old or the new one, never half of it."""
        temporary = self.record_file.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(record), indent=1) + "\n")
        temporary.replace(self.record_file)

    def load(self) -> Record | None:
        """Read the record; None when nothing was started or the record is unreadable."""
        try:
            data = json.loads(self.record_file.read_text())
            return Record(
                boot=data["boot"],
                shape=Shape(**data["shape"]),
                machines={name: Process(**item) for name, item in data["machines"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def require(self) -> Record:
        """Read the record of a sandbox that is up."""
        record = self.load()
        if record is None or not record.alive(CONTROLLER):
            raise SandboxError(f"no sandbox is up in {self.path}; start one with `sandbox up`")
        return record

    def log_tails(self, lines: int = 15) -> str:
        """Show the end of every log, for the message of a failure."""
        parts = []
        for log in sorted(self.logs.glob("*.log")):
            tail = log.read_text(errors="replace").splitlines()[-lines:]
            if tail:
                parts.append("\n".join([f"--- {log}", *tail]))
        return "\n".join(parts)
