"""The command line: arguments in, one function of `cluster`, text or JSON out."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from . import cluster, config, namespaces, packages, versions
from .state import CONTROLLER, Record, SandboxError, Shape, StateDir

SANDBOX = Path(__file__).resolve().parent.parent / "sandbox"
STATE = ".sandbox"

Run = Callable[[argparse.Namespace, StateDir], str | int]
"""Runs a command; returns the sentence for the user, or the exit status."""

_ENDS_WITHIN_S = 5
"""How long a controller may take to end once it no longer answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        if Path(config.RUN, "node").exists():
            raise SandboxError("this is a node of a sandbox; call from outside", status=2)
        run: Run = arguments.run
        if (folder := Path(arguments.dir)).exists() and not _is_own(folder):
            raise SandboxError(
                f"{folder} is not yours, and its programs would run; name another with --dir",
                status=2,
            )
        result = run(arguments, StateDir(folder))
        if isinstance(result, str):
            print(result)
            return 0
        return result
    except SandboxError as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _default_dir() -> Path:
    """Return the state directory of the current folder or the nearest above that has one."""
    here = Path.cwd()
    paths = (folder / STATE for folder in (here, *here.parents))
    return next((path for path in paths if _is_own(path) and _is_own(path / "bin")), here / STATE)


def _is_own(path: Path) -> bool:
    """Whether a folder is ours: `sandbox env` puts its programs before all others."""
    try:
        info = path.lstat()
    except OSError:
        return False
    own = info.st_uid in (os.geteuid(), 0) and not info.st_mode & stat.S_IWOTH
    return stat.S_ISDIR(info.st_mode) and own


def _install(arguments: argparse.Namespace, _: StateDir) -> str:
    installed = packages.install(accounting=arguments.accounting)
    return f"installed {' '.join(installed)}" if installed else "all packages are there"


def _up(arguments: argparse.Namespace, state: StateDir) -> str:
    shape = Shape(
        nodes=arguments.nodes,
        cpus=arguments.cpus,
        memory=arguments.memory,
        gpus=arguments.gpus,
        kill_wait=arguments.kill_wait,
        message_timeout=arguments.message_timeout,
        over_memory_kill=arguments.over_memory_kill,
        min_job_age=arguments.min_job_age,
        accounting=arguments.accounting,
        cloud=arguments.cloud,
        slurm=str(versions.require(Path(arguments.slurm))) if arguments.slurm else "",
    )
    return cluster.up(state, shape, str(SANDBOX))


def _env(_: argparse.Namespace, state: StateDir) -> str:
    state.require()
    # The guard keeps PATH from growing with every eval.
    directory = shlex.quote(str(state.bin))
    return (
        f'case ":$PATH:" in *:{directory}:*) ;; *) export PATH={directory}:"$PATH" ;; esac\n'
        f"export SLURM_CONF={shlex.quote(str(state.slurm_conf))}\n"
        f"export SANDBOX_DIR={shlex.quote(str(state.path))}"
    )


def _exec(arguments: argparse.Namespace, state: StateDir) -> int:
    command = [*arguments.command]
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        raise SandboxError("which command? For example: sandbox exec -- sinfo", status=2)
    packages.require_root()
    record = state.require()
    env = os.environ | {
        "PATH": f"{state.bin}:{os.environ.get('PATH', packages.PATH)}",
        "SLURM_CONF": str(state.slurm_conf),
        "SANDBOX_DIR": str(state.path),
    }
    argv = namespaces.enter(record.machines[CONTROLLER])
    argv[-1:] = [f"--wdns={Path.cwd()}", "--", *command]
    sys.stdout.flush()
    os.execvpe(argv[0], argv, env)


def _status(arguments: argparse.Namespace, state: StateDir) -> int:
    record = state.load()
    nodes = _nodes(record) if record else None
    if record is None or nodes is None:
        if arguments.json:
            print(json.dumps({"up": False, "dir": str(state.path), "logs": str(state.logs)}))
        else:
            print(f"down; state directory {state.path}")
        return 1
    if arguments.json:
        report = {
            "up": True,
            "dir": str(state.path),
            "logs": str(state.logs),
            "shape": asdict(record.shape),
            "nodes": [asdict(node) for node in nodes],
            "pids": {name: process.pid for name, process in record.machines.items()},
        }
        print(json.dumps(report, indent=1))
        return 0
    print(f"up; state directory {state.path}, logs in {state.logs}")
    print(f"{'NODE':8} {'POWER':6} {'CABLE':6} {'SLURM':12} REASON")
    for node in nodes:
        power = "on" if node.power else "off"
        cable = "cut" if node.power and not node.cable else "in" if node.cable else "-"
        print(f"{node.name:8} {power:6} {cable:6} {node.state:12} {node.reason}".rstrip())
    return 0


def _nodes(record: Record) -> list[cluster.Node] | None:
    """Return the nodes; None if the cluster is down, or ends at this moment."""
    if not record.alive(CONTROLLER):
        return None
    try:
        return cluster.nodes(record)
    except SandboxError:
        until = time.monotonic() + _ENDS_WITHIN_S
        while record.alive(CONTROLLER):  # its namespaces go before it
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        return None


def _ps(arguments: argparse.Namespace, state: StateDir) -> int:
    entries = cluster.living(state, arguments.node, daemons=arguments.all)
    if arguments.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=1))
        return 0
    print(f"{'NODE':8} {'PID':>7} {'NODEPID':>7} COMMAND")
    for entry in entries:
        print(f"{entry.node:8} {entry.pid:7} {entry.node_pid:7} {entry.command}")
    return 0


def _at_least(lowest: int, highest: int) -> type[int]:
    def number(text: str) -> int:
        value = int(text)
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"{value} is not within {lowest} to {highest}")
        return value

    return number  # type: ignore[return-value]  # argparse takes any callable


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sandbox",
        description="A real Slurm cluster on one machine: every node has its own namespaces, so"
        " that power and cables can be cut. Needs root.",
        epilog='First steps: sandbox up; eval "$(sandbox env)"; srun -N2 hostname; sandbox down',
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    default = os.environ.get("SANDBOX_DIR") or str(_default_dir())

    def command(name: str, run: Run, text: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"Example: {example}",
        )
        sub.add_argument(
            "--dir", default=default, help="state directory (SANDBOX_DIR; default %(default)s)"
        )
        sub.set_defaults(run=run)
        return sub

    sub = command("install", _install, "install the packages that are missing", "sandbox install")
    sub.add_argument("--accounting", action="store_true", help="slurmdbd and MariaDB, too")

    sub = command(
        "fetch",
        lambda a, _: versions.fetch(a.suite, Path(a.folder)),
        "unpack the Slurm of another Debian into a folder; installs nothing",
        "sandbox fetch trixie .cache/slurm-trixie; sandbox up --slurm .cache/slurm-trixie",
    )
    sub.add_argument("suite", help="Debian's name of it, like trixie")
    sub.add_argument("folder", help="where it is unpacked")

    sub = command(
        "up", _up, "start a cluster, wait until its nodes are idle", "sandbox up --nodes 2 --gpus 0"
    )
    number = _at_least
    sub.add_argument("--nodes", type=number(1, 200), default=4, help="how many (%(default)s)")
    sub.add_argument("--cpus", type=number(1, 4096), default=8, help="per node (%(default)s)")
    sub.add_argument(
        "--memory", type=number(64, 2**30), default=262144, metavar="MIB",
        help="per node in MiB, pretended and not enforced (%(default)s)",
    )  # fmt: skip
    sub.add_argument("--gpus", type=number(0, 64), default=8, help="h100, pretended (%(default)s)")
    sub.add_argument(
        "--kill-wait", type=number(1, 3600), default=30, metavar="S",
        help="KillWait: seconds from SIGTERM to SIGKILL (%(default)s)",
    )  # fmt: skip
    sub.add_argument(
        "--message-timeout", type=number(1, 100), default=5, metavar="S",
        help="MessageTimeout: seconds in which daemons answer (%(default)s; Slurm's own: 10)",
    )  # fmt: skip
    sub.add_argument(
        "--min-job-age", type=number(2, 86400), default=300, metavar="S",
        help="MinJobAge: seconds for which scontrol remembers a job (%(default)s)",
    )  # fmt: skip
    sub.add_argument("--accounting", action="store_true", help="slurmdbd and MariaDB, for sacct")
    sub.add_argument(
        "--cloud", type=number(0, 65000), default=0, metavar="N",
        help="partition `cloud` of so many nodes that never start, to plan for (%(default)s)",
    )  # fmt: skip
    sub.add_argument(
        "--slurm", metavar="FOLDER", help="run the Slurm that `fetch` has unpacked there"
    )
    sub.add_argument(
        "--over-memory-kill",
        action="store_true",
        help="have accounting kill a step that uses more memory than it asked for (OverMemoryKill)",
    )

    text = "end everything, keep the logs"
    command("down", lambda _, state: cluster.down(state), text, "sandbox down")
    command("env", _env, "print what makes a shell a login node", 'eval "$(sandbox env)"')

    sub = command("exec", _exec, "run one command as on the login node", "sandbox exec -- sinfo -N")
    sub.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")

    sub = command("status", _status, "show nodes, power, cables (exit 1: down)", "sandbox status")
    sub.add_argument("--json", action="store_true", help="for programs")

    on_nodes: dict[str, tuple[Run, str]] = {
        "power-off": (
            lambda a, state: cluster.power_off(state, a.node, wait=a.wait),
            "kill everything on a node at once",
        ),
        "power-on": (
            lambda a, state: cluster.power_on(state, a.node),
            "start a node again, wait until Slurm uses it",
        ),
        "cut": (
            lambda a, state: cluster.cut(state, a.node, wait=a.wait),
            "pull a node's network cable",
        ),
        "heal": (
            lambda a, state: cluster.heal(state, a.node, wait=a.wait),
            "plug a node's network cable in again",
        ),
    }
    for name, (run, text) in on_nodes.items():
        sub = command(name, run, text, f"sandbox {name} node2")
        sub.add_argument("node")
        if name != "power-on":
            sub.add_argument("--wait", action="store_true", help="until Slurm has noticed")

    sub = command(
        "stop",
        lambda a, state: cluster.stop(state, a.daemon, kill=a.kill),
        "end a daemon of the controller",
        "sandbox stop slurmctld",
    )
    sub.add_argument("daemon", choices=cluster.DAEMONS)
    sub.add_argument("--kill", action="store_true", help="at once, as a crash does")

    sub = command(
        "start",
        lambda a, state: cluster.start(state, a.daemon),
        "start such a daemon again",
        "sandbox start slurmctld",
    )
    sub.add_argument("daemon", choices=cluster.DAEMONS)

    sub = command("ps", _ps, "list the processes that jobs have on the nodes", "sandbox ps node2")
    sub.add_argument("node", nargs="?")
    sub.add_argument("--all", action="store_true", help="PID 1 and the daemons, too")
    sub.add_argument("--json", action="store_true", help="for programs")
    return parser
