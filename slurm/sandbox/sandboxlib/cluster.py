"""The commands on a cluster: up, down, power, cables and the controller's daemons.

Each returns the sentence that the user reads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial

from . import config, containers, namespaces, packages, processes
from .namespaces import wait_until
from .state import CONTROLLER, Process, Record, SandboxError, Shape, StateDir, boot_id

LIMIT_S = 120
"""Generous: a loaded machine is slow, a broken one never gets there."""

DAEMONS = {
    "slurmctld": ["scontrol", "ping"],
    "slurmdbd": ["sacctmgr", "-n", "list", "cluster"],
}
"""The daemons of the controller, each with a command that succeeds once it serves."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node as it is now."""

    name: str
    power: bool
    cable: bool
    state: str
    """The word of sinfo; `*` marks a node that does not respond. `unknown` without an answer."""
    reason: str

    @property
    def usable(self) -> bool:
        """Whether Slurm uses the node."""
        return self.state in {"idle", "mixed", "allocated", "completing"}


def slurm(record: Record, argv: Sequence[str]) -> str | None:
    """Run a Slurm command on the login node; None when it fails or hangs."""
    controller = record.machines[CONTROLLER]
    # /etc/slurm is the sandbox's own there, and the caller's SLURM_CONF may name another cluster.
    command = [*namespaces.enter(controller), "env", "-u", "SLURM_CONF", *argv]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def slurm_nodes(record: Record) -> dict[str, tuple[str, str]]:
    """Return state and reason of each node from sinfo."""
    text = slurm(record, ["sinfo", "-h", "-N", "-p", "main", "-o", "%N|%T|%E"]) or ""
    rows = [line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
    return {name: (state, reason.strip()) for name, state, reason in rows}


def nodes(record: Record) -> list[Node]:
    """Look at every node: power, cable, Slurm."""
    states = slurm_nodes(record)
    cables = namespaces.cables(record.machines[CONTROLLER])
    result = []
    for name in record.shape.node_names:
        state, reason = states.get(name, ("unknown", ""))
        result.append(
            Node(
                name=name,
                power=record.alive(name),
                cable=cables.get(name, False),
                state=state,
                reason="" if reason == "none" else reason,
            )
        )
    return result


def up(state: StateDir, shape: Shape, sandbox: str) -> str:
    """Start a cluster and wait until all nodes are idle."""
    state.require_usable()
    packages.require_root()
    with state.locked():
        record = state.load()
        if record is not None and record.alive(CONTROLLER):
            return _already_up(state, record, shape)
        packages.install(accounting=shape.accounting)
        begin = time.monotonic()
        _tear_down(state)  # a crash or a reboot may have left something
        try:
            _start(state, shape, sandbox)
        except BaseException:
            _tear_down(state)
            raise
        seconds = time.monotonic() - begin
        return f"up in {seconds:.1f} s: {shape.nodes} nodes, state in {state.path}"


def _already_up(state: StateDir, record: Record, shape: Shape) -> str:
    if record.shape == shape:
        return f"already up: {shape.nodes} nodes, state in {state.path}"
    now, wanted = asdict(record.shape), asdict(shape)
    changes = [f"{key} is {now[key]}, not {wanted[key]}" for key in now if now[key] != wanted[key]]
    raise SandboxError(
        f"up already in another shape ({'; '.join(changes)}); run `sandbox down` first", status=2
    )


def _start(state: StateDir, shape: Shape, sandbox: str) -> None:
    state.create()
    config.write_all(shape, state)
    containers.write_all(state, shape.node_names)
    boots: list[namespaces.Boot] = []
    try:
        machine = partial(namespaces.Boot, state=state, slurm=shape.slurm)
        boots += [machine(CONTROLLER, accounting=shape.accounting)]
        boots += [machine(name) for name in shape.node_names]
        _boot(state, shape, sandbox, boots)
    except BaseException:
        for boot in boots:
            boot.abandon()
        raise


def _boot(state: StateDir, shape: Shape, sandbox: str, boots: Sequence[namespaces.Boot]) -> None:
    machines = {boot.name: boot.process() for boot in boots}
    record = Record(boot=boot_id(), shape=shape, machines=machines)
    state.save(record)
    controller = machines[CONTROLLER]
    namespaces.wire_controller(controller)
    for name in shape.node_names:
        namespaces.wire_node(controller, machines[name], name)
    boots[0].go()
    config.write_shims(state, controller, sandbox)
    _await(state, record, lambda: slurm(record, ["scontrol", "ping"]) is not None, "slurmctld")
    for boot in boots[1:]:
        boot.go()
    _await(
        state,
        record,
        lambda: [now for now, _ in slurm_nodes(record).values()] == ["idle"] * shape.nodes,
        "all nodes to be idle",
    )


def _await(state: StateDir, record: Record, condition: Callable[[], bool], what: str) -> None:
    def ready() -> bool:
        dead = [name for name in record.machines if not record.alive(name)]
        if dead:
            raise SandboxError(f"{', '.join(dead)} ended while starting")
        return condition()

    try:
        wait_until(ready, limit_s=LIMIT_S, what=what)
    except SandboxError as error:
        raise SandboxError(f"{error}\n{state.log_tails()}") from error


def down(state: StateDir) -> str:
    """End all that `up` started, in any condition."""
    if not state.path.exists():
        return f"nothing to take down in {state.path}"
    packages.require_root()
    with state.locked():
        known = state.record_file.exists()
        begin = time.monotonic()
        _tear_down(state)
        seconds = time.monotonic() - begin
    if not known:
        return f"nothing to take down in {state.path}"
    return f"down in {seconds:.1f} s; logs stay in {state.logs}"


def _tear_down(state: StateDir) -> None:
    record = state.load()
    if record is not None and record.boot == boot_id():
        namespaces.kill(processes.visitors(record))
        namespaces.kill(list(record.machines.values()))
    state.remove()


def _known(record: Record, name: str) -> str:
    if name not in record.shape.node_names:
        raise SandboxError(
            f"no node {name!r}; the nodes are {' '.join(record.shape.node_names)}", status=2
        )
    return name


def power_off(state: StateDir, name: str, *, wait: bool) -> str:
    """End everything on a node at once."""
    with state.locked():
        record = state.require()
        _known(record, name)
        was_on = record.alive(name)
        namespaces.kill([record.machines[name]])
        namespaces.unwire(record.machines[CONTROLLER], name)
    if wait:
        _wait_down(record, name)
    return f"{name} is powered off" if was_on else f"{name} was powered off already"


def power_on(state: StateDir, name: str) -> str:
    """Start a node again and wait until Slurm uses it."""
    with state.locked():
        record = state.require()
        _known(record, name)
        if record.alive(name):
            return f"{name} is powered on already"
        controller = record.machines[CONTROLLER]
        namespaces.unwire(controller, name)
        began_s = int(time.time())
        boot = namespaces.Boot(name, state, slurm=record.shape.slurm)
        try:
            machine = boot.process()
            record = replace(record, machines=record.machines | {name: machine})
            state.save(record)
            namespaces.wire_node(controller, machine, name)
            boot.go()
        except BaseException:
            boot.abandon()
            raise
    wait_until(
        # The old state reads as idle until Slurm notices the outage, so the new slurmd is queried.
        lambda: _slurmd_start_s(record, name) >= began_s and _node(record, name).usable,
        limit_s=LIMIT_S,
        what=f"{name} to register",
        every_s=0.2,
    )
    return f"{name} is powered on and {_node(record, name).state}"


def _slurmd_start_s(record: Record, name: str) -> float:
    text = slurm(record, ["scontrol", "show", "node", name]) or ""
    for word in text.split():
        key, _, value = word.partition("=")
        if key == "SlurmdStartTime" and value[:1].isdigit():
            return datetime.fromisoformat(value).timestamp()
    return 0.0


def _node(record: Record, name: str) -> Node:
    return next(node for node in nodes(record) if node.name == name)


def cut(state: StateDir, name: str, *, wait: bool) -> str:
    """Pull a node's cable; its jobs go on running."""
    record = _set_cable(state, name, up=False)
    if wait:
        _wait_down(record, name)
    return f"{name} is cut off"


def heal(state: StateDir, name: str, *, wait: bool) -> str:
    """Plug a node's cable in again."""
    record = _set_cable(state, name, up=True)
    if wait:
        wait_until(
            lambda: _node(record, name).usable, limit_s=600, what=f"{name} to be back", every_s=0.2
        )
    return f"{name} is connected"


def _set_cable(state: StateDir, name: str, *, up: bool) -> Record:
    with state.locked():
        record = state.require()
        _known(record, name)
        if not record.alive(name):
            raise SandboxError(f"{name} is powered off; run `sandbox power-on {name}` first")
        namespaces.set_cable(record.machines[CONTROLLER], name, up=up)
        return record


def _wait_down(record: Record, name: str) -> None:
    wait_until(
        lambda: _node(record, name).state.startswith("down"),
        limit_s=LIMIT_S,
        what=f"Slurm to notice that {name} is down",
        every_s=0.2,
    )


def living(state: StateDir, name: str | None, *, daemons: bool) -> list[processes.Entry]:
    """List what runs on one node or on all of them."""
    record = state.require()
    names = [_known(record, name)] if name else record.shape.node_names
    return processes.living(record, names, daemons=daemons)


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
        wait_until(
            lambda: slurm(record, DAEMONS[daemon]) is not None,
            limit_s=LIMIT_S,
            what=f"{daemon} to answer",
        )
    return f"{daemon} is running"


def _running(record: Record, daemon: str) -> Process | None:
    for entry in processes.living(record, [CONTROLLER], daemons=True):
        if entry.command.split()[0].rpartition("/")[2] == daemon:
            return Process.of(entry.pid)
    return None
