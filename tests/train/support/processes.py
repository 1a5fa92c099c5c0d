"""Processes that need not import torch: copies of one that has.

Their environment is that of the moment when the first of them was started.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # which the first optimizer or DistributedDataParallel imports: 1.2 s
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.nn.parallel",
        "sklearn.datasets",
        "train.session",
        "train.tasks",
    ]
)


class Copied:
    """`python -m train`, or a script, in such a process; what tests use of a `subprocess.Popen`."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        cwd: Path,
        log: Path,
        env: Mapping[str, str],
        script: str = "",
    ) -> None:
        self.flags = flags
        self._process = PROCESSES.Process(
            target=_train, args=(list(flags), cwd, log, dict(env), script)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(list(self.flags), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _train(flags: list[str], cwd: Path, log: Path, env: dict[str, str], script: str) -> None:
    os.setsid()
    os.chdir(cwd)
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = [script or "train", *flags]
    import torch

    torch.set_num_threads(1)
    if script:
        runpy.run_path(script, run_name="__main__")
        return
    from train.__main__ import enter

    enter()
