"""The command line: `python3 -m toolkit.supervisor ROLE OPTIONS -- torchrun …`."""

import argparse
import os
import sys
from typing import Any, Dict, List, Optional

from . import local, pod
from .notify import Receivers
from .policy import Limits


def main(argv: Optional[List[str]] = None) -> int:
    """Read the command line and play a role."""
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="supervisor", description=__doc__)
    roles = parser.add_subparsers(dest="role", metavar="ROLE")
    roles.required = True
    _add_local(roles.add_parser("local", help="one attempt on this machine"))
    _add_pod(roles.add_parser("pod", help="the first process of a pod"))
    end = words.index("--") if "--" in words else len(words)
    given, command = parser.parse_args(words[:end]), words[end + 1 :]
    if not command:
        parser.error("torchrun and its arguments must follow a '--'")
    return {"local": _local, "pod": _pod}[given.role](given, command)


# ---- local


def _add_local(role: argparse.ArgumentParser) -> None:
    role.add_argument("run_dir")
    role.add_argument("mode", nargs="?", default="", choices=["", "continue", "restart"])
    role.add_argument("--devices", action="append", default=[], help="the GPUs of a node: 0,1")
    role.add_argument("--ports", default="61000+4000", help="where the nodes may meet")
    role.add_argument("--static", action="store_true", help="the rendezvous is static")
    role.add_argument("--need", action="append", default=[], help="a folder that must exist")
    _add_policy(role)


def _local(given: argparse.Namespace, command: List[str]) -> int:
    first, _, count = given.ports.partition("+")
    return local.main(
        local.Options(
            run_dir=given.run_dir,
            mode=given.mode,
            command=command,
            devices=given.devices or [""],
            ports=(int(first), int(count)),
            static=given.static,
            needs=given.need,
            secrets=_names(given.secret),
            secret_files=dict(word.partition("=")[::2] for word in given.secret_file),
            **_policy(given),
        )
    )


# ---- pod


def _add_pod(role: argparse.ArgumentParser) -> None:
    role.add_argument("--nodes", type=int, default=1, help="pods of the run, one torchrun each")
    role.add_argument("--elastic", action="store_true", help="fewer pods may do")
    role.add_argument(
        "--join-timeout", type=int, default=0, help="seconds until all pods are there"
    )
    role.add_argument("--replaced", action="store_true", help="Kubernetes replaces failed pods")
    role.add_argument("--mark-end", action="store_true", help="tell other pods of a final failure")
    role.add_argument("--cgroups", default="/sys/fs/cgroup", help="where they are mounted")
    role.add_argument("--env", action="append", default=[], help="NAME=VALUE of the ranks")
    _add_policy(role)


def _pod(given: argparse.Namespace, command: List[str]) -> int:
    return pod.main(
        pod.Options(
            command=command,
            nodes=given.nodes,
            elastic=given.elastic,
            replaces=given.replaced,
            marks=given.mark_end,
            join_timeout_s=given.join_timeout,
            cgroups=given.cgroups,
            environ=dict(word.partition("=")[::2] for word in given.env),
            **_policy(given),
        )
    )


# ---- What all roles have in common


def _add_policy(role: argparse.ArgumentParser) -> None:
    """Add what a role does when something fails.

    The webhook's address and the command of `notify` may hold secrets, and other users see command
    lines: they come by the environment variables `_notify_webhook` and `_notify_command`.
    """
    role.add_argument("--job", required=True, help="the job's name")
    role.add_argument("--restarts", type=int, default=0, help="of the ranks, by torchrun")
    role.add_argument("--requeues", type=int, default=0, help="of the job, after failures")
    role.add_argument("--no-progress", type=int, default=3, help="attempts without a new step")
    role.add_argument("--preemptions", type=int, help="of the job; without a limit by default")
    role.add_argument("--grace", type=int, default=60, help="seconds that a stop may take")
    role.add_argument("--stall", default="never", help="seconds, learned or never")
    role.add_argument("--protect-children", action="store_true", help="until their rank ends")
    role.add_argument("--notify-on", default="", help="end,failure,requeue,stall")
    role.add_argument("--notify-webhook-file", default="")
    role.add_argument("--notify-variable", default="", help="that holds the webhook's address")
    role.add_argument("--secret", action="append", default=[], help="variables with secrets: A,B")
    role.add_argument("--secret-file", action="append", default=[], help="NAME=FILE with its value")


def _names(words: List[str]) -> List[str]:
    return [name for word in words for name in word.split(",")]


def _policy(given: argparse.Namespace) -> Dict[str, Any]:
    return {
        "job": given.job,
        "restarts": given.restarts,
        "limits": Limits(given.requeues, given.no_progress, given.preemptions),
        "grace_s": given.grace,
        "stall": given.stall,
        "protect_children": given.protect_children,
        "receivers": Receivers(
            events=given.notify_on.split(",") if given.notify_on else (),
            webhook=os.environ.pop("_notify_webhook", ""),
            webhook_file=given.notify_webhook_file,
            variable=given.notify_variable,
            command=os.environ.pop("_notify_command", ""),
            secrets=[
                *_names(given.secret),
                *(word.partition("=")[0] for word in given.secret_file),
            ],
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
