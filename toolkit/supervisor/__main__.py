"""The command line: `python3 -m toolkit.supervisor ROLE OPTIONS -- torchrun …`."""

import argparse
import importlib
import math
import os
import sys
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

if TYPE_CHECKING:
    from .containers import Container
    from .supervised import Policy


def main(argv: Optional[List[str]] = None) -> int:
    """Read the command line and play a role."""
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="supervisor", description=__doc__)
    roles = parser.add_subparsers(dest="role", metavar="ROLE")
    roles.required = True
    _add_local(roles.add_parser("local", help="one attempt on this machine"))
    _add_keep(roles.add_parser("keep", help="a run on this machine, by its script"))
    _add_points(roles.add_parser("points", help="the points of a sweep on this machine"))
    _add_pod(roles.add_parser("pod", help="the first process of a pod"))
    _add_batch(roles.add_parser("batch", help="an attempt on Slurm, on its batch host"))
    _add_node(roles.add_parser("node", help="one node of a Slurm step"))
    end = words.index("--") if "--" in words else len(words)
    given, command = parser.parse_args(words[:end]), words[end + 1 :]
    if not command and not getattr(given, "refuse", ""):
        parser.error("torchrun and its arguments must follow a '--'")
    # A script carries only the modules of its roles.
    role: Any = importlib.import_module("." + given.role.replace("keep", "keeper"), __package__)
    values = {**vars(given), "command": command}
    if "policy" in role.Options._fields:
        values["policy"] = _policy(given)
    if "container" in role.Options._fields:
        values["container"] = _container(given)
    if "environ" in role.Options._fields:
        values["environ"] = dict(given.environ)
    options = role.Options(**{name: values[name] for name in role.Options._fields})
    return int(role.main(options))


# ---- The options of the roles: each has the name of its field in `Options`


def _add_local(role: argparse.ArgumentParser) -> None:
    role.add_argument("run_dir")
    role.add_argument("mode", nargs="?", default="", choices=["", "continue", "restart"])
    role.add_argument("--devices", action="append", required=True, help="the GPUs of a node: 0,1")
    role.add_argument("--ports", type=_ports, default="61000+4000", help="where the nodes may meet")
    role.add_argument("--static", action="store_true", help="the rendezvous is static")
    role.add_argument(
        "--again", type=int, default=0, help="exit status by which a scheduler queues it again"
    )
    _add_policy(role)


def _add_keep(role: argparse.ArgumentParser) -> None:
    role.add_argument("run_dir")
    role.add_argument(
        "--stop-timeout", dest="stop_timeout_s", type=float, default=60.0, help="seconds"
    )
    role.add_argument(
        "--time-limit", dest="time_limit_s", type=float, default=math.inf, help="of an attempt"
    )
    role.add_argument("--tied-to", type=int, help="stop when this parent ends")
    role.add_argument("--lock", type=int, help="the descriptor that holds the run's lock")


def _add_points(role: argparse.ArgumentParser) -> None:
    _add_keep(role)
    role.add_argument("mode", nargs="?", default="", choices=["", "continue"])
    role.add_argument("--point", dest="points", action="append", required=True, help="its folder")
    role.add_argument("--most", type=int, help="so many at once; by default as many as fit")
    role.add_argument("--cores", type=int, default=1, help="of a point")
    role.add_argument("--gpus", type=int, default=0, help="of a point")


def _add_pod(role: argparse.ArgumentParser) -> None:
    role.add_argument("--nodes", type=int, default=1, help="pods of the run, one torchrun each")
    role.add_argument("--elastic", action="store_true", help="fewer pods may do")
    _add_join_timeout(role, 0)
    role.add_argument(
        "--replaced", dest="replaces", action="store_true", help="Kubernetes replaces failed pods"
    )
    role.add_argument(
        "--mark-end", dest="marks", action="store_true", help="tell other pods of a final failure"
    )
    role.add_argument("--host-network", action="store_true", help="HOSTNAME is that of the node")
    role.add_argument("--cgroups", default="/sys/fs/cgroup", help="where they are mounted")
    role.add_argument(
        "--env", dest="environ", type=_pair, action="append", default=[], help="NAME=VALUE of ranks"
    )
    _add_policy(role)


def _add_batch(role: argparse.ArgumentParser) -> None:
    """Add the options of the program on Slurm's batch host."""
    role.add_argument("run_dir")
    role.add_argument("mode", nargs="?", default="", choices=["", "continue", "chain", "join"])
    role.add_argument("join", nargs="*", help="ATTEMPT ENDPOINT JOB_ID of the run to join")
    role.add_argument("--ports", type=_ports, default="61000+4000", help="where the nodes may meet")
    role.add_argument("--min-nodes", dest="fewest", type=int, default=0, help="of an elastic job")
    role.add_argument("--max-nodes", dest="most", type=int, default=0, help="of an elastic job")
    role.add_argument("--point", default="", help="of a sweep, its name")
    role.add_argument("--takes-turns", action="store_true", help="jobs may continue it in turn")
    role.add_argument(
        "--need-program", dest="programs", action="append", default=[], help="one of NAME,NAME"
    )
    role.add_argument("--need-image", dest="image", default="", help="a file")
    role.add_argument(
        "--signals", dest="early", type=str.split, default="", help="that came: USR1 USR2 TERM"
    )
    role.add_argument("--refuse", default="", help="why the job has ended before torchrun began")
    role.add_argument("--script", default="", help="of an elastic job: who joins it runs that, too")
    _add_policy(role)


def _add_node(role: argparse.ArgumentParser) -> None:
    """Add the options of a node of a Slurm step."""
    role.add_argument("logs", help="the attempt's folder")
    role.add_argument(
        "--env", dest="variables", action="append", default=[], help="NAME=VALUE, for the ranks"
    )
    role.add_argument("--static", action="store_true", help="the rendezvous is static")
    _add_join_timeout(role, 600)
    role.add_argument("--stall", default="never", help="seconds, learned or never")
    role.add_argument("--protect-children", action="store_true", help="until their rank ends")
    role.add_argument("--warm", action="store_true", help="fork ranks where torch is imported")
    role.add_argument("--elastic", action="store_true", help="the others go on without this node")
    role.add_argument("--joins", action="store_true", help="a job of its own that joins a run")
    role.add_argument("--restarts", type=int, default=0, help="of torchrun on this node alone")
    role.add_argument("--runtime", default="bare", choices=["bare", "apptainer", "podman"])
    role.add_argument("--image", default="")
    role.add_argument("--name", default="torchrun", help="the container's, and a number")
    role.add_argument(
        "--mount", dest="mounts", action="append", default=[], help="SOURCE:TARGET[:ro]"
    )
    role.add_argument("--workdir", default="", help="in the container")
    role.add_argument("--gpus", action="store_true", help="the container sees the step's")
    role.add_argument("--shm", default="0", help="size of /dev/shm for podman")
    role.add_argument(
        "--container-option", dest="options", action="append", default=[], help="of the runtime"
    )
    role.add_argument(
        "--pass-variable", dest="secrets", action="append", default=[], help="to the container"
    )


def _add_join_timeout(role: argparse.ArgumentParser, default: int) -> None:
    what = "seconds, until all are there"
    role.add_argument("--join-timeout", dest="join_timeout_s", type=int, default=default, help=what)


def _ports(word: str) -> Tuple[int, int]:
    """Return the first port and the number of ports from FIRST+COUNT."""
    first, _, count = word.partition("+")
    return int(first), int(count)


def _pair(word: str) -> Tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _container(given: argparse.Namespace) -> "Optional[Container]":
    from .containers import Container

    if given.runtime == "bare":
        return None
    return Container(**{name: getattr(given, name) for name in Container._fields})


# ---- Options of all roles


def _add_policy(role: argparse.ArgumentParser) -> None:
    """Add the failure options of a role.

    The webhook address and the command of `notify` may contain secrets, and other users can see
    command lines, so the environment variables `_notify_webhook` and `_notify_command` pass them.
    """
    role.add_argument("--job", required=True, help="the job's name")
    role.add_argument("--restarts", type=int, default=0, help="of the ranks, by torchrun")
    role.add_argument("--requeues", type=int, default=0, help="of the job, after failures")
    role.add_argument("--no-progress", type=int, default=3, help="attempts without a new step")
    role.add_argument("--preemptions", type=int, help="of the job; without a limit by default")
    role.add_argument("--grace", type=int, default=60, help="seconds that a stop may take")
    role.add_argument("--stall", default="never", help="seconds, learned or never")
    role.add_argument("--protect-children", action="store_true", help="until their rank ends")
    role.add_argument("--warm", action="store_true", help="fork ranks where torch is imported")
    role.add_argument("--notify-on", default="", help="end,failure,requeue,stall")
    role.add_argument("--notify-webhook-file", default="")
    role.add_argument("--notify-variable", default="", help="that holds the webhook's address")
    role.add_argument("--need", action="append", default=[], help="a file or folder")
    role.add_argument("--need-variable", action="append", default=[], help="secrets: A,B")
    role.add_argument("--secret-file", action="append", default=[], help="NAME=FILE with its value")


def _policy(given: argparse.Namespace) -> "Policy":
    from .notify import Receivers  # a node of a step needs none of these modules
    from .policy import Limits
    from .supervised import Policy

    secrets = [name for names in given.need_variable for name in names.split(",")]
    secret_files = dict(word.partition("=")[::2] for word in given.secret_file)
    return Policy(
        job=given.job,
        restarts=given.restarts,
        limits=Limits(given.requeues, given.no_progress, given.preemptions),
        grace_s=given.grace,
        stall=given.stall,
        protect_children=given.protect_children,
        warm=given.warm,
        needs=given.need,
        secrets=secrets,
        secret_files=secret_files,
        receivers=Receivers(
            events=given.notify_on.split(",") if given.notify_on else (),
            webhook=os.environ.pop("_notify_webhook", ""),
            webhook_file=given.notify_webhook_file,
            variable=given.notify_variable,
            command=os.environ.pop("_notify_command", ""),
            secrets=[*secrets, *secret_files],
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
