"""Calls a function on one rank.

The executors copy this file into the run directory, and torchrun starts it there on every rank. It
imports nothing of the toolkit, so a job's environment needs only torch and cloudpickle. Its input
and output: docs/reference/run-directory.md.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_STOPPED = 75  # EX_TEMPFAIL: start again to continue
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
NOTIFIED_WITHIN_S = 10.0
"""A stop signal reaches all ranks within this time; if it reaches only some, a rank has failed."""
FILE_WITHIN_S = 60.0
"""How long a file from another machine may take to appear."""
STORE_WITHIN_S = 5.0
"""How long to poll for rank 0's store; torch's own client waits longer after each try."""
ECHO_S = 10
"""Seconds added to the error time of a rank that lost another: torchrun takes the first error."""

WEIGHTS = {"running": 0, "retryable": 1, "preempted": 1, "fatal": 2, "done": 3}

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class WorkerId:
    """The identity of this process, from the variables of the launcher and torchrun."""

    def __init__(self) -> None:
        self.run_dir = Path(os.environ["TRAIN_RUN_DIR"])
        self.attempt = int(os.environ.get("TRAIN_ATTEMPT") or 0)
        self.restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        self.submitted_dir = Path(__file__).parent  # the same as function_dir, except in pods
        self.function_dir = self.run_dir / "function"
        self.attempt_dir = self.function_dir / f"attempt-{self.attempt}"


class RankFiles:
    """Writes the files of this rank into the run directory."""

    def __init__(self, worker: WorkerId) -> None:
        """Create the attempt's folder, and a link to the logs of this rank.

        Remove what this rank wrote before torchrun restarted it.
        """
        self._worker = worker
        self._error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        worker.attempt_dir.mkdir(parents=True, exist_ok=True)
        for suffix in ("pkl", "error.json"):
            with contextlib.suppress(OSError):
                (worker.attempt_dir / f"rank-{worker.rank}.{suffix}").unlink()
        if self._error_file:
            link = worker.attempt_dir / f"logs-{worker.rank}"
            with contextlib.suppress(OSError):
                link.unlink(missing_ok=True)
                link.symlink_to(os.path.relpath(Path(self._error_file).parent, link.parent))

    def result(self, value: Any) -> None:
        """Write the result of the function."""
        try:
            self.write_pickle(f"rank-{self._worker.rank}.pkl", value)
        except (TypeError, pickle.PicklingError) as error:
            raise TypeError(f"the result cannot be pickled: {error}") from error

    def write_pickle(self, name: str, value: Any) -> None:
        """Write a value for another process."""
        import cloudpickle  # the job's own

        self.write(name, cloudpickle.dumps(value))

    def failure(self, error: BaseException, *, echo: bool) -> None:
        """Record the failure of this rank: for the client, for torchrun and for the script."""
        message, trace = f"{type(error).__name__}: {error}", trace_of(error)
        print(trace, file=sys.stderr, end="", flush=True)
        date = str(int(time.time()) + (ECHO_S if echo else 0))
        extra = {"py_callstack": trace, "timestamp": date, "time": time.time(), "echo": echo}
        extra |= {"rank": self._worker.rank, "host": socket.gethostname()}
        record = json.dumps({"message": {"message": message, "extraInfo": extra}})
        if self._error_file:
            with contextlib.suppress(OSError):
                Path(self._error_file).write_text(record, encoding="utf-8")
        self.write(f"rank-{self._worker.rank}.error.json", record.encode())
        status, reason = "retryable" if echo else "fatal", message.partition("\n")[0]
        self.outcome(status, reason, rank=self._worker.rank)

    def outcome(self, status: str, reason: str = "", *, rank: int | None = None) -> None:
        """Write the outcome, unless the existing one weighs more."""
        here = self._worker
        new = {"version": 1, "status": status, "attempt": here.attempt, "restart": here.restart}
        new |= {"step": None, "steps": None, "samples_seen": 0, "rank": rank, "reason": reason}
        new |= {"metrics": {}, "time": time.time()}
        with (here.function_dir / "outcome.lock").open("w", encoding="utf-8") as lock:
            with contextlib.suppress(OSError):  # without locks, the last writer wins
                fcntl.lockf(lock, fcntl.LOCK_EX)
            if weight(self._outcome()) < weight(new):
                _replace(here.run_dir / "outcome.json", json.dumps(new).encode())

    def _outcome(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            outcome = json.loads(
                (self._worker.run_dir / "outcome.json").read_text(encoding="utf-8")
            )
            return outcome if isinstance(outcome, dict) else {}
        return {}

    def peer_has_failed(self) -> bool:
        """Whether a rank of this start has reported a failure."""
        outcome, here = self._outcome(), self._worker
        ours = (outcome.get("attempt"), outcome.get("restart")) == (here.attempt, here.restart)
        return ours and outcome.get("status") == "fatal"

    def out_of_time(self) -> bool:
        """Whether the script stops this attempt because of the time limit."""
        stopping = self._worker.run_dir / "logs" / f"attempt-{self._worker.attempt}" / "stopping"
        return stopping.is_file() and stopping.read_text(encoding="utf-8") == "walltime\n"

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically, into the folder of this attempt."""
        _replace(self._worker.attempt_dir / name, content)


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)


def weight(outcome: dict[str, Any]) -> tuple[int, int, int]:
    """Return the weight of an outcome: by later start, then by more definite status."""
    status = WEIGHTS.get(str(outcome.get("status")), -1)
    return outcome.get("attempt", -1), outcome.get("restart", -1), status


class StopHandler:
    """Handles the signals that stop a rank.

    Before the function is called, a signal ends the process immediately: it may be in C++, where no
    Python handler runs, waiting for a peer that the same signal has ended. Afterwards rank 0 writes
    the checkpoint, between two lines of the function, as with submitit. The other ranks continue
    meanwhile, since rank 0 may need them to reach its next line.
    """

    def __init__(self, worker: WorkerId, files: RankFiles) -> None:
        self._worker = worker
        self._files = files
        self._call: Call | None = None
        self._channel: Any = None
        self._answered = self._over = False
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="stop-watch", daemon=True).start()
        for number in SIGNALS:
            signal.signal(number, self._answer)

    def agree(self, call: Call, channel: Any) -> None:
        """From now on, all ranks handle a stop together."""
        self._channel, self._call = channel, call

    def over(self) -> None:
        """From now on, ignore signals: the process ends by itself."""
        self._over = True

    def _watch(self, reader: int) -> None:
        while os.read(reader, 1)[0] not in SIGNALS:
            pass
        if self._over:
            return
        if self._call is None:
            os._exit(EXIT_STOPPED)
        try:
            self._channel.add("notified", 1)
            if self._worker.rank == 0:
                return  # the main thread handles it
            if self._files.peer_has_failed() or not self._all_notified():
                os._exit(1)
            while not self._channel.check(["stopped"]):
                time.sleep(0.1)
        except Exception:
            pass  # rank 0, which holds the store, has ended
        os._exit(EXIT_STOPPED)

    def _all_notified(self) -> bool:
        """Whether the stop has reached all ranks; if one has died, torchrun ends its peers."""
        until_s, count = time.monotonic() + NOTIFIED_WITHIN_S, self._channel.add
        while count("notified", 0) + count("left", 0) < self._worker.world_size:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.05)
        return True

    def _answer(self, number: int, frame: FrameType | None) -> None:
        if self._call is None or self._answered or self._over or self._worker.rank != 0:
            return
        self._answered = True
        try:
            if self._files.peer_has_failed():
                exit_now(1)
            status, why = "preempted", f"stopped by {signal.Signals(number).name}"
            if not self._all_notified():
                status, why = "retryable", "another rank has gone"
            self._files.outcome(status, f"{why}; {self._checkpoint(self._call, frame)}")
            self._channel.set("stopped", "")
        except BaseException as error:
            self._files.failure(error, echo=False)
            exit_now(1)
        exit_now(EXIT_STOPPED)

    def _checkpoint(self, call: Call, frame: FrameType | None) -> str:
        """Store the next attempt's call, from the function; return a note for the outcome."""
        function, args, kwargs = call
        own = getattr(function, "__submitit_checkpoint__", None)
        checkpoint = own or getattr(function, "checkpoint", None)
        if checkpoint is None:
            if not self._files.out_of_time():
                return "without a method checkpoint, the call starts anew"
            stack = "".join(traceback.format_stack(frame))
            raise RuntimeError(
                "Job not requeued because: timed-out and not checkpointable. Give the function a "
                f"checkpoint method, or a longer time_limit. The call was at:\n{stack}"
            )
        following = checkpoint(*args, **kwargs)
        if following is None:
            raise RuntimeError("Job not requeued because: checkpoint function returned None.")
        self._files.write_pickle("next.pkl", (following.function, following.args, following.kwargs))
        return "checkpoint was called"


def exit_now(status: int) -> None:
    """Exit the process immediately: destructors of a broken process group may hang."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def trace_of(error: BaseException) -> str:
    """Return the traceback, without the frames of this file that led to the function."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def is_echo(error: BaseException, echoes: str, others: str) -> bool:
    """Whether an error only reports the loss of another rank, by the patterns of call.json."""
    names = {base.__name__ for base in type(error).__mro__}
    if names & {"DistNetworkError", "DistStoreError", "DistBackendError"}:
        return True
    text = str(error).lower()
    return (
        isinstance(error, (RuntimeError, OSError))
        and re.search(echoes, text) is not None
        and not re.search(others, text)
    )


def open_stores(worker: WorkerId) -> tuple[Any, Any]:
    """Return the store of all ranks, and a second connection to it for the watching thread."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.rendezvous import rendezvous

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until_s = time.monotonic() + STORE_WITHIN_S
    while worker.rank != 0 and time.monotonic() < until_s:
        try:
            socket.create_connection((host, port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.02)
    store, _, _ = next(rendezvous("env://", timeout=timedelta(minutes=30)))
    channel = TCPStore(host, port, wait_for_workers=False)
    # Only a store of torchrun itself outlives a restart.
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    prefix = f"function/{worker.restart if agent_store else 0}"
    return PrefixStore(prefix, store), PrefixStore(prefix, channel)


def join_group(store: Any, *, rank: int, world_size: int, gpu: int | None) -> Callable[[], None]:
    """Create the process group, with NCCL if this rank has a GPU; return how to leave it."""
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import HashStore

    if distributed.is_initialized():
        return lambda: None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    backend, store = "gloo" if gpu is None else "nccl", store or HashStore()
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return lambda: distributed.destroy_process_group() if distributed.is_initialized() else None


def gpu_of(worker: WorkerId, per_node: int) -> int | None:
    """Return this rank's GPU; None if the job has none."""
    if not per_node:
        return None
    import torch

    if (gpus := torch.cuda.device_count()) < worker.local_world_size:
        raise RuntimeError(
            f"the job has asked for {per_node} GPUs per node, and torch sees {gpus} on "
            f"{socket.gethostname()} for {worker.local_world_size} ranks"
        )
    return worker.local_rank


def load(worker: WorkerId, store: Any, python: str) -> Call:
    """Read the call, once all ranks have started: the last checkpoint, or the submitted call."""
    if worker.rank == 0:
        older = (f"attempt-{number}/next.pkl" for number in range(worker.attempt - 1, -1, -1))
        checkpoints = (name for name in older if (worker.function_dir / name).exists())
        store.set("call", next(checkpoints, "call.pkl"))
    path = worker.submitted_dir / (name := store.get("call").decode())
    if not path.exists():  # a checkpoint, or too large to mount
        path = worker.function_dir / name
    until_s = time.monotonic() + FILE_WITHIN_S
    while not path.exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    try:
        call: Call = pickle.loads(path.read_bytes())
    except Exception as error:
        version = "{}.{}".format(*sys.version_info)
        raise RuntimeError(
            f"{path}, pickled by Python {python}, cannot be read by Python {version}: {error!r}"
        ) from error
    if store.add("here", 1) == worker.world_size:
        store.set("all here", "")
    store.wait(["all here"], timedelta(days=1))
    return call


def set_submitit_variables(worker: WorkerId) -> None:
    """Set the variables from which `submitit.JobEnvironment()` reads its ranks."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{key}_ID") for key in ("JOB", "TASK"))
    job_id = os.environ.get("SLURM_JOB_ID", worker.run_dir.name)
    nodes, node = (n // worker.local_world_size for n in (worker.world_size, worker.rank))
    variables = {"JOB_ID": f"{array}_{task}" if array else job_id, "JOB_NUM_NODES": nodes}
    variables |= {"NTASKS": worker.world_size, "GLOBALID": worker.rank}
    variables |= {"NODEID": node, "LOCALID": worker.local_rank}
    os.environ.update({f"SUBMITIT_LOCAL_{key}": str(value) for key, value in variables.items()})
    os.environ |= {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_FOLDER": str(worker.function_dir)}


def main() -> int:
    """Call the function, and write its result or failure."""
    sys.path[0] = os.getcwd()  # noqa: PTH109  # as after `python -m`; it was torchrun's folder
    atexit._clear()  # drop the handlers that torchrun has registered
    for stream in (sys.stdout, sys.stderr):  # torchrun would pass on incomplete lines
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    # Files that are unpickled later must not be writable by others.
    os.umask(os.umask(0o022) | 0o022)
    files = RankFiles(worker := WorkerId())
    stop = StopHandler(worker, files)
    set_submitit_variables(worker)
    joined = False
    try:
        facts = json.loads((worker.submitted_dir / "call.json").read_text(encoding="utf-8"))
        gpu = gpu_of(worker, facts["gpus_per_node"])
        store, channel = open_stores(worker)
        leave_group = join_group(store, rank=worker.rank, world_size=worker.world_size, gpu=gpu)
        joined = True
        call = load(worker, store, facts["python"])
        if worker.rank == 0:
            files.outcome("running")
        stop.agree(call, channel)
        files.result(call[0](*call[1], **call[2]))
        leave_group()
        ended = channel.add("left", 1)
        # Rank 0 waits for all ranks: it hosts the store, and can still handle a stop.
        while worker.rank == 0 and ended < worker.world_size:
            time.sleep(0.02)
            ended = channel.add("left", 0)
        stop.over()
        if worker.rank == 0:
            files.outcome("done")
        atexit._run_exitfuncs()  # forked processes skip them
    except BaseException as error:
        # A failed rendezvous may be temporary: a lost node, a port in use.
        lost = not joined or (worker.world_size > 1 and is_echo(error, *facts["echoes"]))
        files.failure(error, echo=lost)
        exit_now(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
