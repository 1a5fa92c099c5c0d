"""The single task of a Slurm step on each node: starts torchrun and reports its end to srun.

The node informs the batch script by files in the attempt's folder
(docs/reference/run-directory.md). Many nodes share this folder, so each writes little and lists
nothing.
"""

import contextlib
import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import TYPE_CHECKING, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import containers
from .containers import Container
from .evidence.files import read
from .evidence.memory import oom_kills, peak_kb, ranks_below
from .own_folder import OwnFolder, short_tmpdir
from .process import Signals, status_of
from .watchdog_files import write_watchdog

if TYPE_CHECKING:
    from .elastic import FirstNode

STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that stop a step. Slurm also sends them to torchrun, which then stops its ranks."""

LOOK_S = 3.0
"""Interval between two checks of the ranks' memory."""

LIFE_S, LIFE_OF_NODE_S = 9.0, 0.06
"""Interval between two heartbeats of a node: the first value, or the second one times the number of
nodes if that is more (at most 17 heartbeats a second in all: all nodes write to one server)."""

PAUSE_S = 5.0
"""Delay before torchrun starts again if it has ended on this node only."""


class Options(NamedTuple):
    """Options from the command line."""

    logs: str
    """The attempt's folder."""
    command: Sequence[str]
    """torchrun and its arguments."""
    variables: Sequence[str] = ()
    """`NAME=VALUE`, for torchrun and its ranks."""
    static: bool = False
    """Whether the rendezvous is static: torchrun gets the node rank."""
    join_timeout_s: int = 600
    """How long nodes wait for each other."""
    stall: str = "never"
    """Seconds without a step after which ranks count as hanging, or `learned`."""
    protect_children: bool = False
    """Whether child processes of a rank outlive a stop until the rank has ended."""
    warm: bool = False
    """Whether ranks are forked from a process that has imported torch."""
    elastic: bool = False
    """Whether the other nodes continue without this node."""
    joins: bool = False
    """Whether this is a separate job that joins the run of another job."""
    restarts: int = 0
    """How often torchrun starts again if it has ended on this node only."""
    container: Optional[Container] = None


class CannotStart(Exception):
    """The reason why torchrun cannot start on this node."""

    def __init__(self, word: str, why: str, status: int) -> None:
        super().__init__(why)
        self.word, self.status = word, status
        """`fatal`; `retryable`; `missing` if another node may have the missing program or file."""


def main(options: Options) -> int:
    """Run torchrun on this node; return the exit status for srun."""
    signals = Signals((*STOPS, signal.SIGCHLD))
    node = Node(options, signals, os.environ)
    try:
        return node.run()
    except Exception as error:
        traceback.print_exc()
        node.cannot("retryable", f"the supervisor failed: {type(error).__name__}: {error}")
        return 1
    finally:
        node.close()


class Node:
    """One node of a step."""

    def __init__(self, options: Options, signals: Signals, environ: Mapping[str, str]) -> None:
        self.options, self.signals, self.environ = options, signals, environ
        self.name = environ["SLURMD_NODENAME"]
        self.key = environ["SLURM_NODEID"]
        """The node's number in the job, used in the names of its files."""
        if options.joins:
            self.key = "joined-by-" + environ["SLURM_JOB_ID"]
        self.stopped = False
        """Whether a signal has asked this node to stop."""
        count = environ.get("SLURM_STEP_NUM_NODES", "")
        nodes = int(count) if count.isdigit() else 1
        self._life_s, self._life_at_s, self._look_at_s = (
            max(LIFE_S, nodes * LIFE_OF_NODE_S),
            0.0,
            0.0,
        )
        self._folder = OwnFolder()
        self._lifeline: Optional[Tuple[int, int]] = None
        self._kills = self._kills_before = 0
        self._peak, self._peak_kb = "", 0
        self._start, self._starts, self._oom = (0, 0), 0, False
        self._first: Optional[FirstNode] = None
        """Of an elastic job, on its other nodes; only scripts of such jobs carry the module."""
        if options.elastic and not options.joins and self.key != "0":
            from . import elastic

            self._first = elastic.FirstNode(options.logs, environ)

    # ---- The task

    def run(self) -> int:
        """Start torchrun, wait for it, and record how it ended."""
        self._show_life(time.monotonic())
        self._write("began", self.environ["SLURM_STEP_ID"])
        self._kills = self._kills_before = oom_kills()
        status = 1
        try:
            argv, environ = self._command()
            # srun drops a signal that arrives before its tasks have started; the mark remains.
            self.stopped |= os.path.exists(os.path.join(self.options.logs, "stopping"))
            status = self._until_the_end(argv, environ, status)
            self._judge_container(status)
        except CannotStart as obstacle:
            self.cannot(obstacle.word, str(obstacle))
            status = obstacle.status
        self._heed_signals()
        if oom_kills() != self._kills_before:
            self._report_oom()
        self._write("ended", str(status))
        if self.stopped:
            # srun must not see a failed node: it would kill the others during their checkpoint.
            self._write("stopped", str(status))
            return 0
        if status:
            self._write("failed", f"{time.time():.9f}\t{self.name}\t{status}")
        return status

    def _judge_container(self, status: int) -> None:
        container = self.options.container
        if container and not self.stopped and status == containers.NOT_STARTED[container.runtime]:
            self.cannot("retryable", f"{container.runtime} could not start the container")

    def _until_the_end(self, argv: Sequence[str], environ: Mapping[str, str], status: int) -> int:
        """Run torchrun, and restart it if it ends on this node while the others continue."""
        left = self.options.restarts if self.options.elastic else 0
        while not self._heed_signals():
            status = self._run_once(argv, environ)
            if status == 0 and self.options.elastic:
                self._write("succeeded", "")
            if status == 0 or not left or self.key == "0" or self._oom or self._heed_signals():
                break
            left -= 1
            kill_workers_left(self.environ["SLURM_JOB_ID"])
            self._pause(PAUSE_S)
            if not is_reachable(self.options.command):
                break
            print(
                f"torchrun ended on {self.name} with exit status {status} while others go on; "
                "it starts again"
            )
        if self._first and status and not self.stopped:
            self._heed_loss_of(self._first)
        return status

    def _heed_loss_of(self, first: "FirstNode") -> None:
        """Queue the job again if its first node does not answer and has no heartbeat any more."""
        heartbeat = first.heartbeat
        if first.is_unreachable():
            self._pause(2 * self._life_s)
            if not self.stopped and first.heartbeat == heartbeat:
                first.queue_again()

    def _run_once(self, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run torchrun once; return its exit status."""
        stdin = self._lifeline[0] if self._lifeline else subprocess.DEVNULL
        try:
            torchrun = subprocess.Popen(argv, stdin=stdin, env=dict(environ))
        except OSError as error:
            self.cannot("missing", f"{argv[0]}: {error.strerror}")
            return 126 if isinstance(error, PermissionError) else 127
        if self._heed_signals():  # the signal arrived during the start
            torchrun.send_signal(signal.SIGTERM)
        while torchrun.poll() is None:
            try:
                self.look(torchrun, time.monotonic())
            except Exception:  # torchrun is more important
                traceback.print_exc()
            self.signals.wait(LOOK_S)
            self._heed_signals()
        return status_of(torchrun.returncode)

    def look(self, torchrun: "subprocess.Popen[bytes]", now_s: float) -> None:
        """Write the heartbeat and check the ranks' memory, each at its interval."""
        if now_s >= self._life_at_s:
            self._show_life(now_s)
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._look_at_memory(torchrun)
        if self._first and self._first.look(now_s):
            self._first.queue_again()

    def cannot(self, word: str, why: str) -> None:
        """Report to the batch script why torchrun could not start."""
        print(f"{self.name}: {why}", file=sys.stderr)
        self._write("cannot", f"{word} {self.name}: {why}")

    def close(self) -> None:
        """Remove the programs."""
        self._folder.remove()

    def _heed_signals(self) -> bool:
        """Return whether this node is to stop."""
        self.stopped |= any([number in STOPS for number in self.signals.take()])
        return self.stopped

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not self._heed_signals() and time.monotonic() < until_s:
            self.signals.wait(until_s - time.monotonic())

    def _write(self, kind: str, line: str) -> None:
        """Write a line to a file of this node; a full disk does not stop torchrun."""
        try:
            path = os.path.join(self.options.logs, f"{kind}-{self.key}")
            with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(line + "\n")
        except OSError as error:
            if kind != "alive":
                print(f"{self.name}: {error}", file=sys.stderr)

    def _show_life(self, now_s: float) -> None:
        """Write this node's clock as a heartbeat: it stops while the node is off or cut off."""
        self._life_at_s = now_s + self._life_s
        self._write("alive", str(int(time.time())))

    # ---- The command

    def _command(self) -> Tuple[List[str], Dict[str, str]]:
        """Return the command to start, and its environment.

        Raises:
            CannotStart: the command cannot start on this node.
        """
        options = self.options
        environ = {**self.environ, **self._rendezvous()}
        command = [*self._programs(), *options.command]
        if options.container is None:
            pairs = (pair.partition("=") for pair in options.variables)
            environ.update({name: value for name, _, value in pairs})
            return command, {**environ, **short_tmpdir(environ, self._folder)}
        command = ["env", *options.variables, *command]
        folders = [os.path.dirname(os.path.dirname(options.logs))]
        user = f"{os.getuid()}:{os.getgid()}"
        node = containers.Node(environ, folders, containers.boot_id(), user)
        if options.container.runtime == "podman":
            return self._in_podman(options.container, command, node)
        return self._in_apptainer(options.container, command, node)

    def _rendezvous(self) -> Dict[str, str]:
        """Return the torchrun options that differ between nodes."""
        timeout_s = self.options.join_timeout_s
        own = {
            "PET_LOCAL_ADDR": self.name,
            "PET_LOG_DIR": os.path.join(self.options.logs, f"node-{self.key}"),
            "PET_RDZV_CONF": f"is_host={int(self.key == '0')},join_timeout={timeout_s}",
        }
        if self.options.static:
            own.update(PET_NODE_RANK=self.key, PET_RDZV_CONF=f"timeout={timeout_s}")
        return own

    def _programs(self) -> List[str]:
        """Write the watchdog's programs; return the command to put before torchrun's.

        If they cannot be written, the run continues without a watchdog.
        """
        options = self.options
        watches = options.stall != "never"
        if not watches and not options.protect_children and not options.warm:
            return []
        pattern = "TRAIN_LOG_PATTERN"
        try:
            start = write_watchdog(
                self._folder.path("watchdog"),
                watches=watches,
                reads_steps=pattern in self.environ
                or any(one.startswith(pattern + "=") for one in options.variables),
                children=options.protect_children,
                warm=options.warm,
            )
        except OSError as error:
            print(f"{self.name}: the run goes on without a watchdog: {error}", file=sys.stderr)
            return []
        return ["sh", start, options.stall]

    def _in_apptainer(
        self, container: Container, command: Sequence[str], node: containers.Node
    ) -> Tuple[List[str], Dict[str, str]]:
        """Return the command that runs another one in a container, and its environment."""
        node = node._replace(folders=[*node.folders, *filter(None, [self._folder.made])])
        found = filter(None, map(shutil.which, containers.APPTAINERS))
        program = next(found, containers.APPTAINERS[0])
        environ = containers.apptainer_environ(program, container, node)
        argv = containers.apptainer_argv(program, container, node)
        return [*argv, *command], {**node.environ, **environ}

    def _in_podman(
        self, container: Container, command: Sequence[str], node: containers.Node
    ) -> Tuple[List[str], Dict[str, str]]:
        """Return the command that runs another one in a container, and its environment.

        Raises:
            CannotStart: podman or the image is missing.
        """
        try:
            containers.remove_containers_of_earlier_boots(node.boot)
            nowhere = containers.is_nowhere(container.image)
            inside = self._folder.path("inside.sh")
            source = pkgutil.get_data(str(__package__), "inside.sh")
            assert source is not None
            with open(inside, "wb") as file:
                file.write(source)
        except OSError as error:
            raise CannotStart("retryable", f"podman: {error}", 127) from error
        if nowhere:
            why = f"podman has no image {container.image} here, and nowhere to pull it from"
            raise CannotStart("fatal", why, containers.NOT_STARTED["podman"])
        # The container ends when its stdin closes (inside.sh): when this process is gone.
        self._lifeline = os.pipe()
        node = node._replace(folders=[*node.folders, self._folder.made])
        argv = containers.podman_argv(container, node, self._folder.path("conmon"))
        return [*argv, "sh", inside, *command], dict(node.environ)

    # ---- Memory

    def _look_at_memory(self, torchrun: "subprocess.Popen[bytes]") -> None:
        """Record the highest memory peak of a rank; stop torchrun if ranks ran out of memory.

        torchrun would restart them and they would run out of memory again.
        """
        conmon = read(self._folder.path("conmon"), 100).strip() if self._lifeline else ""
        # podman containers are not children of podman.
        ranks = [*ranks_below([os.getpid(), *([int(conmon)] if conmon.isdigit() else [])])]
        for rank in ranks:
            used_kb = peak_kb(rank.pid)
            if used_kb > self._peak_kb:
                self._peak_kb = used_kb
                self._peak = f"rank {rank.number} had used {used_kb // 1024} MiB"
        start = (torchrun.pid, max((rank.restart for rank in ranks), default=0))
        if not ranks or start == self._start:
            return
        self._start, self._starts = start, self._starts + 1
        kills = oom_kills()
        if kills != self._kills and (self._starts > 1 or start[1]):
            self._report_oom()
            torchrun.send_signal(signal.SIGTERM)
        self._kills = kills

    def _report_oom(self) -> None:
        self._oom = True
        self._write("oom", f"{self.name} ({self._peak})" if self._peak else self.name)


def is_reachable(command: Sequence[str]) -> bool:
    """Whether the rendezvous endpoint in torchrun's command still accepts connections."""
    option = "--rdzv-endpoint="
    endpoint = next((word[len(option) :] for word in command if word.startswith(option)), "")
    host, _, port = endpoint.rpartition(":")
    try:
        with contextlib.closing(socket.create_connection((host, int(port)), timeout=10)):
            return True
    except (OSError, ValueError):
        return False


def kill_workers_left(job_id: str) -> None:
    """Kill the ranks of a job on this node: they survive the kill of their torchrun."""
    own = os.fsencode(f"SLURM_JOB_ID={job_id}")
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            if own in variables and any(
                one.startswith(b"TORCHELASTIC_RUN_ID=") for one in variables
            ):
                os.kill(int(name), signal.SIGKILL)
