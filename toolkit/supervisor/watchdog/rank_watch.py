"""Lets the watchdog inspect a hanging rank; loaded in each rank by sitecustomize.py.

A thread listens on a socket that only this user can reach, and answers with the stacks of all
threads and torch's record of collectives. While another thread holds the GIL it cannot answer: then
a signal makes faulthandler print that thread's stack, in C.

It also gives a rank's Weights & Biases run an id that stays the same over all starts.
"""

from __future__ import annotations

import _thread
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import types

TORCH = "torch._C._distributed_c10d"
RECORDERS = "_dump_fr_trace_json", "_dump_nccl_trace_json"
"""Functions that return torch's records of collectives: gloo's and NCCL's, which are separate."""

RUN_NAME = re.compile(r"-\d{4}-\d{6}-[a-z0-9]{4}$")
"""The suffix of run names."""

KEPT = []  # type: list[object]
"""Objects that must live as long as the process."""


def open_to_watchdog(folder: str) -> None:
    """Open the socket and the signal handler for the watchdog, and write this rank's file."""
    environ, rank, pid = os.environ, os.environ["RANK"], os.getpid()
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:  # its older name
        environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the number of recorded collectives
    environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # and their times on the GPU
    number = signal.SIGRTMIN + 20
    stacks = open(os.path.join(folder, f"{rank}.stacks"), "a", encoding="utf-8")  # noqa: SIM115
    KEPT.append(stacks)
    faulthandler.register(number, file=stacks, all_threads=False, chain=False)
    path = os.path.join(folder, f"{rank}-{pid}.socket")
    server = socket.socket(socket.AF_UNIX)
    if os.path.lexists(path):  # this process has replaced its program
        os.unlink(path)
    server.bind(path)
    server.listen()
    # Not `threading`: this thread must stay out of the script's list of threads.
    _thread.start_new_thread(answer_for_ever, (server,))
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        began = file.read().rpartition(")")[2].split()[19]
    place = {
        "rank": int(rank),
        "pid": pid,
        "began": began,
        "world": int(environ["WORLD_SIZE"]),
        "restart": int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "signal": int(number),
        "thread": threading.main_thread().ident,
        "socket": path,
        "error_file": environ.get("TORCHELASTIC_ERROR_FILE", ""),
    }
    draft = os.path.join(folder, f"{rank}.draft")
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(place, file)
    os.replace(draft, os.path.join(folder, f"{rank}.json"))


def go_on_in_wandb() -> None:
    """Set variables so that this rank's Weights & Biases run continues over all starts.

    Ranks other than rank 0 have separate runs. Settings of the script or the job take precedence.
    """
    environ = os.environ
    if not {"WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID"}.isdisjoint(environ):
        return
    above, name = ["", *environ["TRAIN_RUN_DIR"].rstrip("/").split("/")][-2:]
    rank = "" if environ["RANK"] == "0" else f"-rank-{environ['RANK']}"
    if not RUN_NAME.search(name):  # a point of a sweep
        if RUN_NAME.search(above):
            environ.setdefault("WANDB_RUN_GROUP", above)
        name = f"{above}.{name}"
    environ["WANDB_RUN_ID"], environ["WANDB_RESUME"] = f"{name}{rank}", "allow"
    environ.setdefault("WANDB_NAME", f"{name}{rank}")


def answer_for_ever(server: socket.socket) -> None:
    """Write the stacks of all threads and torch's records of collectives to each connection."""
    own = threading.get_ident()
    while True:
        try:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(2)
                threads = {
                    f"{thread:x}": frames_of(frame)
                    for thread, frame in sys._current_frames().items()
                    if thread != own
                }
                recorders = (getattr(sys.modules.get(TORCH), name, None) for name in RECORDERS)
                records = [recorded() for recorded in recorders if recorded]
                head = json.dumps({"threads": threads, "records": [*map(len, records)]})
                connection.sendall(b"".join([head.encode(), b"\n", *records]))
        except Exception:  # for example a closed connection
            time.sleep(1)


def frames_of(frame: types.FrameType | None) -> list[tuple[str, int, str]]:
    """Return (file, line, function) of each frame, the innermost first."""
    frames: list[tuple[str, int, str]] = []
    while frame is not None and len(frames) < 100:
        frames.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return frames
