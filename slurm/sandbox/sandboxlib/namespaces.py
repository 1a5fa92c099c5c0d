"""Machines made of namespaces, and the cables between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .config import RUN, address
from .state import CONTROLLER, Process, SandboxError, StateDir

INIT = Path(__file__).resolve().parent.parent / "init.sh"
BRIDGE = "switch"


class Boot:
    """A machine between power-on and the moment when its daemons may start."""

    def __init__(
        self, name: str, state: StateDir, *, accounting: bool = False, slurm: str = ""
    ) -> None:
        """Start PID 1 of the machine; it waits until `go`, and ends when this process does."""
        Path(RUN).mkdir(parents=True, exist_ok=True)
        role = CONTROLLER if name == CONTROLLER else "node"
        argv = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--propagation", "slave"]
        argv += ["--", "bash", str(INIT), role, name, str(state.path)]
        argv += ["accounting" if accounting else "", slurm]
        self.name = name
        self._state = state
        # Nothing of the caller may stay open in a daemon: a pipe after `up` would never end.
        with (state.logs / f"{name}.log").open("ab") as log:
            self._unshare = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
                start_new_session=True,
            )
        assert self._unshare.stdin is not None and self._unshare.stdout is not None
        self._stdin, self._stdout = self._unshare.stdin, self._unshare.stdout

    def process(self) -> Process:
        """Wait until the namespaces are made, and identify PID 1."""
        line = self._stdout.readline()
        if not line.strip():
            raise SandboxError(f"{self.name} did not start\n{self._state.log_tails()}")
        return Process.of(int(line))

    def go(self) -> None:
        """Let the daemons start; from now on the machine lives on its own."""
        self._stdin.write(b"go\n")
        self._stdin.close()
        self._stdout.close()
        # The process ends with its machine; a Popen object without a status would complain.
        self._unshare.returncode = 0

    def abandon(self) -> None:
        """Give the machine up before `go`: without its stdin it ends by itself."""
        if not self._stdin.closed:
            self._stdin.close()
            self._stdout.close()
            self._unshare.wait()


def enter(process: Process, *, pid: bool = False) -> list[str]:
    """Start of an argv that runs a command within a machine's namespaces."""
    argv = ["nsenter", f"--target={process.pid}", "--net", "--mount", "--uts"]
    return [*argv, "--pid", "--"] if pid else [*argv, "--"]


def _ip(process: Process, lines: Sequence[str]) -> None:
    """Run lines of `ip` commands in a machine's network namespace."""
    done = subprocess.run(
        ["nsenter", f"--target={process.pid}", "--net", "--", "ip", "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SandboxError(f"ip: {done.stderr.strip()}\n" + "\n".join(lines))


def wire_controller(controller: Process) -> None:
    """Make the switch."""
    _ip(
        controller,
        [
            "link set lo up",
            f"link add {BRIDGE} type bridge",
            f"addr add {address(CONTROLLER)}/24 dev {BRIDGE}",
            f"link set {BRIDGE} up",
        ],
    )


def wire_node(controller: Process, node: Process, name: str) -> None:
    """Pull a cable from the switch to a node; its end at the switch has the node's name.

    Like a real card, the node's keeps its hardware address when the power goes: to the other nodes,
    which remember it for a while, a new one would be a node that does not answer.
    """
    card = "02:00:" + ":".join(f"{int(part):02x}" for part in address(name).split("."))
    _ip(
        controller,
        [
            f"link add {name} type veth peer name eth0 address {card} netns {node.pid}",
            f"link set {name} master {BRIDGE} up",
        ],
    )
    _ip(node, ["link set lo up", f"addr add {address(name)}/24 dev eth0", "link set eth0 up"])


def unwire(controller: Process, name: str) -> None:
    """Take the cable away; that of a node without power goes by itself, but later."""
    try:
        _ip(controller, [f"link del {name}"])
    except SandboxError:
        if name in cables(controller):
            raise


def set_cable(controller: Process, name: str, *, up: bool) -> None:
    """Plug the cable in or out, at the switch."""
    _ip(controller, [f"link set {name} {'up' if up else 'down'}"])


def cables(controller: Process) -> dict[str, bool]:
    """Cables at the switch by node name, and whether each is plugged in."""
    argv = ["nsenter", f"--target={controller.pid}", "--net", "--", "ip", "-json", "link", "show"]
    argv += ["master", BRIDGE]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise SandboxError(f"ip: {done.stderr.strip()}")
    return {link["ifname"]: "UP" in link["flags"] for link in json.loads(done.stdout or "[]")}


def kill(processes: Sequence[Process]) -> None:
    """End processes at once and wait until they are gone; with PID 1 goes its whole machine."""
    for process in processes:
        if process.alive():
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            try:
                # The descriptor names one process; looked at again, a reused pid cannot be hit.
                if process.alive():
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            except ProcessLookupError:
                pass
            finally:
                os.close(descriptor)
    wait_until(
        lambda: not any(process.alive() for process in processes),
        limit_s=30,
        what="processes to end",
        every_s=0.01,
    )


def wait_until(
    condition: Callable[[], bool], *, limit_s: float, what: str, every_s: float = 0.1
) -> None:
    """Poll until the condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise SandboxError(f"waited {limit_s:g} s in vain for {what}")
        time.sleep(every_s)
