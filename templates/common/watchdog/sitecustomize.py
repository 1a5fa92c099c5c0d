"""Python loads this module when it starts: it lets the watchdog look into a rank that hangs.

In a rank, a signal prints the stacks of all threads (by faulthandler, in C, whatever Python does),
and torch's own worker server answers on a socket that only this user reaches. torchrun and a rank's
child processes are left alone, and the script sees no difference.
"""

import contextlib
import faulthandler
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
KEPT: list[object] = []
"""What must live as long as the process."""


def is_rank() -> bool:
    """Whether torchrun has started this process; a rank's child processes have TRAIN_WATCHED."""
    environ = os.environ
    return (
        "TRAIN_WATCHDOG" in environ
        and "TRAIN_WATCHED" not in environ
        and "TORCHELASTIC_RUN_ID" in environ
        and environ.get("LOCAL_RANK", "").isdigit()
    )


def open_to_watchdog(folder: str) -> None:
    """Register the signal for stacks, prepare torch's server, and write a file about this rank."""
    environ, rank, pid = os.environ, os.environ["RANK"], os.getpid()
    environ["TRAIN_WATCHED"] = str(pid)
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # so many collectives are recorded
    number = signal.SIGRTMIN + 20
    stacks = open(os.path.join(folder, f"{rank}.stacks"), "a", encoding="utf-8")  # noqa: SIM115
    KEPT.append(stacks)
    faulthandler.register(number, file=stacks, all_threads=True, chain=False)
    server = os.path.join(folder, f"{rank}-{pid}.socket")
    sys.meta_path.insert(0, AfterImport("torch.distributed", server))
    place = {
        "rank": int(rank),
        "pid": pid,
        "world": int(environ["WORLD_SIZE"]),
        "signal": int(number),
        "thread": threading.main_thread().ident,
        "socket": server,
        "error_file": environ.get("TORCHELASTIC_ERROR_FILE", ""),
    }
    draft = os.path.join(folder, f"{rank}.draft")
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(place, file)
    os.replace(draft, os.path.join(folder, f"{rank}.json"))


class AfterImport:
    """A finder of modules that starts torch's worker server once a module was imported."""

    def __init__(self, name: str, socket: str) -> None:
        self.name, self.socket = name, socket

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Find the module as Python would, with the start of the server after it."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_serve(module):  # type: ignore[no-untyped-def]
            execute(module)
            with contextlib.suppress(Exception):  # an older torch has no server
                serve(self.socket)

        spec.loader.exec_module = execute_then_serve  # type: ignore[method-assign]
        return spec


def serve(socket: str) -> None:
    """Start torch's worker server, without its line on stderr that it listens."""
    from torch._C._distributed_c10d import _WorkerServer

    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        KEPT.append(_WorkerServer(socket))
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def load_hidden() -> None:
    """Load the sitecustomize that this one hides; this folder leaves the path of imports."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or os.curdir) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if is_rank():
        try:
            open_to_watchdog(os.environ["TRAIN_WATCHDOG"])
        except Exception as error:  # the script must run all the same
            print(f"watchdog: no stacks of this rank: {error}", file=sys.stderr)
    load_hidden()
