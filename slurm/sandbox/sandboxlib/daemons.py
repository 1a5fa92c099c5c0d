"""The controller's daemons: ended and started again while the nodes go on."""

from __future__ import annotations

import os
import signal
import subprocess

from . import namespaces, packages, processes
from .errors import SandboxError
from .namespaces import wait_until
from .state import CONTROLLER, Process, Record, StateDir

LIMIT_S = 120
READY = {
    "slurmctld": ["scontrol", "ping"],
    "slurmdbd": ["sacctmgr", "-n", "list", "cluster"],
}
"""What succeeds once a daemon serves."""


def stop(state: StateDir, daemon: str, *, kill: bool) -> str:
    """End a daemon as an administrator does, or as a crash does; wait until it has ended."""
    with state.locked():
        record = state.require()
        running = _running(record, daemon)
        if running is None:
            return f"{daemon} was stopped already"
        if kill:
            namespaces.kill([running])
        else:
            os.kill(running.pid, signal.SIGTERM)
        wait_until(lambda: not running.alive(), limit_s=LIMIT_S, what=f"{daemon} to end")
    return f"{daemon} is {'killed' if kill else 'stopped'}"


def start(state: StateDir, daemon: str) -> str:
    """Start a daemon again and wait until it answers."""
    with state.locked():
        record = state.require()
        if daemon == "slurmdbd" and not record.shape.accounting:
            raise SandboxError("no slurmdbd here; `sandbox up --accounting` has one", status=2)
        if _running(record, daemon) is not None:
            return f"{daemon} is running already"
        argv = [*namespaces.enter(record.machines[CONTROLLER], pid=True), daemon]
        with (state.logs / f"{CONTROLLER}.log").open("ab") as log:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": packages.PATH, "SLURM_CONF": str(state.slurm_conf)},
                start_new_session=True,
            )
        if done.returncode:
            raise SandboxError(f"{daemon} did not start\n{state.log_tails()}")
        wait_until(lambda: _answers(record, daemon), limit_s=LIMIT_S, what=f"{daemon} to answer")
    return f"{daemon} is running"


def _running(record: Record, daemon: str) -> Process | None:
    for entry in processes.living(record, [CONTROLLER], daemons=True):
        if entry.command.split()[0].rpartition("/")[2] == daemon:
            return Process.of(entry.pid)
    return None


def _answers(record: Record, daemon: str) -> bool:
    command = [*namespaces.enter(record.machines[CONTROLLER]), "env", "-u", "SLURM_CONF"]
    done = subprocess.run([*command, *READY[daemon]], capture_output=True, timeout=60)
    return done.returncode == 0
