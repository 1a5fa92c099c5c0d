"""Call the scripts of a page, as their commands say.

Importing torch takes seconds, in torchrun and in each rank. So `ranks_of` has the ranks of
`torchrun --nproc-per-node N SCRIPT` forked from a process that has imported it, with the variables
that torchrun sets, and `alone` does the same for `python SCRIPT`. The slow tests call torchrun and
python themselves.
"""

from __future__ import annotations

import io
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.train.support.processes import PROCESSES

PATIENCE_S = 300.0
ABORTED = "terminate called without an active exception"
"""What a rank that has done everything prints in some runs: "The end of a process" in traps.md."""
CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Result:
    """What a command did."""

    status: int
    stdout: str
    """Of all ranks, in their order."""

    stderr: str
    """Of the first rank that failed; of all, if none did."""

    @property
    def shown(self) -> str:
        """What a page shows of it: its output and, if it fails, the last line of the error."""
        lines = self.stderr.rstrip("\n").splitlines()
        return self.stdout + (f"{lines[-1]}\n" if self.status and lines else "")


def call(words: str, folder: Path, *, real_torchrun: bool = False) -> Result:
    """Call a command in a folder: `python`, `torchrun` or `toolkit`, with their arguments."""
    program, *arguments = shlex.split(words)
    if program == "rm":
        for name in arguments:  # a page is read from top to bottom; here each session is alone
            (folder / name).unlink(missing_ok=True)
        return Result(0, "", "")
    assert program in {"python", "torchrun", "toolkit"}, words
    if program == "torchrun":
        if not real_torchrun:
            return ranks_of(arguments, folder)
        for _ in range(10):
            result = _torchrun(arguments, folder)
            if ABORTED not in result.stderr:
                break
        return result
    imports_torch = arguments[0] != "-c" or "torch" in arguments[1]
    if program == "python" and imports_torch and not real_torchrun:
        return alone(arguments, folder)
    return _program([BIN / program, *arguments], folder)


def _program(argv: list[str | Path], folder: Path) -> Result:
    done = subprocess.run(
        argv,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def _torchrun(arguments: list[str], folder: Path) -> Result:
    """Call torchrun, with a file for each rank: in one stream, ranks mix parts of their lines."""
    with tempfile.TemporaryDirectory() as logs:
        argv: list[str | Path] = [
            BIN / "torchrun",
            "--redirects=3",
            f"--log-dir={logs}",
            *arguments,
        ]
        result = _program(argv, folder)
        stdout, stderr = (
            "".join(path.read_text() for path in sorted(Path(logs).glob(f"*/attempt_0/*/{name}")))
            for name in ("stdout.log", "stderr.log")
        )
    return Result(result.status, stdout, stderr + result.stderr)


def alone(arguments: list[str], folder: Path) -> Result:
    """Call `python SCRIPT|-m MODULE|-c CODE …`."""
    script, *rest = arguments
    with tempfile.TemporaryDirectory() as outputs:
        process = PROCESSES.Process(target=_run, args=(0, {}, folder, script, rest, Path(outputs)))
        process.start()
        process.join(PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            pytest.fail(f"{script}: still running after {PATIENCE_S} s")
        texts = [(Path(outputs) / f"0.{name}").read_text() for name in ("stdout", "stderr")]
    return Result(process.exitcode, *texts)


def ranks_of(arguments: list[str], folder: Path) -> Result:
    """Start the ranks of `torchrun [--standalone] --nproc-per-node N SCRIPT|-m MODULE …`."""
    if arguments[0] == "--standalone":
        del arguments[0]
    flag, count, script, *rest = arguments
    assert flag in {"--nproc-per-node", "--nproc_per_node"}, arguments
    ranks = int(count)
    with tempfile.TemporaryDirectory() as outputs, _store() as port:
        processes = [
            PROCESSES.Process(
                target=_run,
                args=(rank, _variables(rank, ranks, port), folder, script, rest, Path(outputs)),
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline, first = time.monotonic() + PATIENCE_S, None
        try:
            # As torchrun: when one has failed, the others are ended.
            while any(p.is_alive() for p in processes) and first is None:
                if time.monotonic() > deadline:
                    pytest.fail(f"{script}: still running after {PATIENCE_S} s")
                for process in processes:
                    process.join(0.01)
                first = next((r for r, p in enumerate(processes) if p.exitcode), None)
        finally:
            killed = [rank for rank, p in enumerate(processes) if (p.exitcode or 0) < 0]
            for process in processes:
                process.kill()
                process.join()
        texts = [
            [(Path(outputs) / f"{rank}.{name}").read_text() for name in ("stdout", "stderr")]
            for rank in range(ranks)
        ]
    first = next((r for r, p in enumerate(processes) if p.exitcode == 1), first)
    stdout = "".join(text for text, _ in texts)
    if first is None:
        return Result(0, stdout, "".join(text for _, text in texts))
    # A rank that is killed says nothing, and others may fail for it; torchrun ends with this.
    return Result(1, stdout, f"{CHILD_FAILED}:\n" if killed else texts[first][1])


@contextmanager
def _store() -> Iterator[int]:
    """Run the ranks' store in a process of its own, as torchrun's agent does; yield its port.

    In rank 0 it would end with rank 0, while others may still be connecting.
    """
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_keep_store, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def _keep_store(parent: Connection) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parent.send(store.port)
    with suppress(EOFError):
        parent.recv()


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _run(
    rank: int,
    variables: dict[str, str],
    folder: Path,
    script: str,
    arguments: list[str],
    outputs: Path,
) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(outputs / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), write_through=True)
    os.environ |= {**variables, "OMP_NUM_THREADS": "1"}
    import torch
    from torch import distributed as dist
    from torch.distributed import distributed_c10d

    destroy = dist.destroy_process_group

    def destroy_and_keep(group: dist.ProcessGroup | None = None) -> None:
        # torch 2.13 can wait for ever when a group is freed: the destructor holds Python's lock,
        # and gloo's thread wants it, to free the tensors of the last exchange.
        kept.extend(distributed_c10d._world.pg_map)
        destroy(group)

    kept: list[object] = []
    dist.destroy_process_group = destroy_and_keep
    torch.set_num_threads(1)
    os.chdir(folder)
    warnings.simplefilter("default")
    try:
        if script == "-m":
            sys.argv = arguments
            names = runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif script == "-c":
            code, *arguments = arguments
            sys.argv = ["-c", *arguments]
            sys.path[0:0] = [""]
            exec(code, names := {"__name__": "__main__"})
        else:
            sys.argv = [script, *arguments]
            sys.path[0:0] = [str(folder / Path(script).parent)]
            names = runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # Nothing is freed, for the same reason.
    assert names
    os._exit(0)
