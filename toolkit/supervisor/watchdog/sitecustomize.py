"""Python loads this module at startup: it prepares the ranks of a run before their script runs.

A rank is a process started by torchrun. Its child processes outlive a stop of the run until the
rank ends (rank_children.py). If the run has a watchdog, it can inspect the rank (rank_watch.py).
torchrun and other programs are not affected.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))

PIDS = "TRAIN_RANK_PIDS"
"""The variable with the pids of a rank and of its ancestors, the rank's first."""

QUIET_S, LONGEST_S = 0.1, 2.0
"""How long gloo's threads must be idle at the end of a rank, and how long they may take."""


def ancestors_of(pid: int) -> list[int]:
    """Return the pids of a process's ancestors from /proc, the parent first."""
    ancestors: list[int] = []
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:  # of another user, where /proc hides these
            break
        if pid > 0:
            ancestors.append(pid)
    return ancestors


def prepare() -> None:
    """Prepare this process if it is a rank, a rank's child process, or may fork ranks."""
    environ = os.environ
    import quick_imports

    quick_imports.start()
    if os.path.exists(os.path.join(HERE, "rank_children.py")):
        import rank_children
    if PIDS in environ:
        rank, *above = [int(pid) for pid in environ[PIDS].split()]
        lives = rank in ancestors_of(os.getpid()) or os.path.exists(f"/proc/{rank}")
        # Not only an ancestor: a shell that started this program in the background may have ended.
        if lives and rank != os.getpid():  # a rank may start itself again by exec
            if "rank_children" in sys.modules:
                rank_children.protect(rank, above)
            return
        del environ[PIDS]  # from a rank that submitted this job
    if environ.pop("TRAIN_IS_FORK_SERVER", ""):  # it prepares each rank after the fork
        return
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("LOCAL_RANK", "").isdigit():
        if "TRAIN_FORK_SERVER" in environ:
            import rank_proxy

            rank_proxy.start(ancestors_of(os.getpid()))
        become_rank(ancestors_of(os.getpid()))
        watch_rank()
    else:  # torchrun, perhaps with --start-method=fork
        quick_imports.in_torchrun()
        os.register_at_fork(after_in_child=lambda: become_rank(ancestors_of(os.getpid())))


def become_rank(ancestors: list[int]) -> None:
    """Make this rank known to its child processes, and let them outlive a stop."""
    if PIDS in os.environ:  # a child process of a rank that was forked
        return
    own = os.getpid()
    os.environ[PIDS] = " ".join(map(str, [own, *ancestors]))
    if sys.version_info < (3, 14):
        atexit.register(let_gloo_finish)
    if rank_children := sys.modules.get("rank_children"):
        rank_children.protect(own, ancestors)


def let_gloo_finish() -> None:
    """Wait until gloo's threads have released the tensors of the last collectives.

    A thread takes Python's lock for that. At the shutdown of Python 3.13 and older, this would
    abort the rank after all its work.
    """
    now = began = busy = time.monotonic()
    while (states := states_of_threads("pt_gloo")) and now < min(busy + QUIET_S, began + LONGEST_S):
        time.sleep(QUIET_S / 10)
        now = time.monotonic()
        busy = now if set(states) != {"S"} else busy


def states_of_threads(name: str) -> list[str]:
    """Return the states of this process's threads with a name (proc(5), stat)."""
    states = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                before, _, after = file.read().rpartition(")")
        except OSError:  # it has ended
            continue
        if before.partition("(")[2].startswith(name):
            states.append(after.split()[0])
    return states


def watch_rank() -> None:
    """Let the watchdog look into this rank, if there is one."""
    if "TRAIN_WATCHDOG" in os.environ:
        import rank_watch

        rank_watch.open_to_watchdog(os.environ["TRAIN_WATCHDOG"])
        rank_watch.go_on_in_wandb()


def load_hidden() -> None:
    """Load the sitecustomize that this one hides; remove this folder from the import path."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or os.curdir) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    try:
        prepare()
    except Exception as error:  # the script must run all the same
        print(f"torch-deploy-toolkit: this rank is not prepared: {error}", file=sys.stderr)
    load_hidden()
