"""Real runs of the trainer: start, wait for files, signal, leave no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.record_schemas import faults_of
from tests.train.support import held, shared_gpu
from tests.train.support.processes import Copied
from train.rundir.files import read_lines

ROOT = Path(__file__).parents[2]
# Generous: a loaded machine is slow, not broken. Nothing waits this long when all is well.
PATIENCE_S = 300.0
UNHURRIED = "100"
"""`TORCH_ELASTIC_SHUTDOWN_TIMEOUT`: torchrun's own 30 s are too few where a rank may be slow."""

Record = dict[str, Any]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Compute in one thread, as ranks do: with more, processes wait for each other's threads."""
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs more GPUs than there are: none of it can run, in CI least of all."""
    there = shared_gpu.ranks_at_most()
    wanted = {item: _gpus(item) for item in items}
    left_out = [item for item, count in wanted.items() if count > there]
    if left_out:
        items[:] = [item for item in items if wanted[item] <= there]
        config.hook.pytest_deselected(items=left_out)


def _gpus(item: pytest.Item) -> int:
    return max((mark.args[0] if mark.args else 1 for mark in item.iter_markers("gpu")), default=0)


@dataclass(frozen=True, kw_only=True)
class Running:
    """A started run and its directory."""

    process: subprocess.Popen[bytes] | Copied
    run_dir: Path
    log: Path
    earlier: int
    """How many lines the metrics had when it was started."""

    def wait(self) -> int:
        """Wait for the end and give the exit status."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {PATIENCE_S} s:\n{self.output()}")

    def finish(self, status: int = 0) -> Running:
        """Wait for the end; insist on an exit status, and on records that the schemas describe."""
        got = self.wait()
        assert got == status, self.output()
        assert faults_of(self.run_dir) == []
        return self

    def output(self) -> str:
        return self.log.read_text()

    def events(self) -> list[Record]:
        return read_lines(self.run_dir / "events.jsonl")

    def metrics(self) -> list[Record]:
        return read_lines(self.run_dir / "metrics.jsonl")

    def contents(self) -> dict[str, bytes]:
        """Every file of the run directory, by its path in it."""
        files = (path for path in self.run_dir.rglob("*") if path.is_file())
        return {str(path.relative_to(self.run_dir)): path.read_bytes() for path in files}

    def losses(self) -> dict[int, float]:
        """Loss by step; a step done twice counts as it was done last."""
        return {m["step"]: m["loss"] for m in self.metrics() if "loss" in m}

    def outcome(self) -> Record:
        read: Record = json.loads((self.run_dir / "outcome.json").read_text())
        return read

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll until something is so; fail with the output when the run ends or time is up."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None and not condition():
                pytest.fail(f"the run ended too early:\n{self.output()}")
            if time.monotonic() > deadline:
                pytest.fail(f"waited {PATIENCE_S} s in vain:\n{self.output()}")
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        """Wait until the metrics of this start have reached a step."""

        def reached() -> bool:
            steps = (m["step"] for m in self.metrics()[self.earlier :] if "loss" in m)
            return max(steps, default=0) >= step

        self.wait_until(reached)

    def wait_until_held(self, step: int, *, saved: int) -> None:
        """Wait until what `Start.held` started stays, and a checkpoint before that is whole."""
        self.wait_until(lambda: held.mark(self.run_dir, step).exists())
        self.wait_until(
            lambda: any(e["event"] == "checkpoint" and e["step"] == saved for e in self.events())
        )

    def workers(self) -> dict[int, int]:
        """Process numbers by rank, from the environment that torchrun gave to its children."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                variables = (path / "environ").read_bytes().split(b"\0")
            except (OSError, ValueError):
                continue
            if parent == self.process.pid:
                ranks = [v for v in variables if v.startswith(b"RANK=")]
                found.update({int(v.removeprefix(b"RANK=")): int(path.name) for v in ranks})
        return found

    def end(self) -> None:
        """End the remaining processes: torchrun and, since they have sessions too, its workers."""
        left = [*self.workers().values(), self.process.pid]
        if self.process.poll() is None:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.wait(PATIENCE_S)


UNPROVED = ("--no-verify",)
"""What is not tested of a run costs no time."""


class Start:
    """Starts runs; every one of them is over when the fixture is."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.started: list[Running] = []

    def single(
        self, *flags: str, run_dir: Path, attempt: int = 0, script: str = "", **env: str
    ) -> Running:
        """`python -m train`, or a script that ends as it does.

        In a process that need not import torch, unless it imports others.
        """
        flags = (*UNPROVED, *flags)
        if "PYTHONPATH" in env:
            return self.command([sys.executable, "-m", "train", *flags], run_dir, attempt, env)

        def started(log: Path, env: dict[str, str]) -> Copied:
            return Copied(flags, cwd=self.home, log=log, env=env, script=script)

        return self._started(started, run_dir, attempt, env)

    def ranks(
        self,
        count: int,
        *flags: str,
        run_dir: Path,
        attempt: int = 0,
        torchrun: tuple[str, ...] = ("--standalone",),
        module: tuple[str, ...] = ("-m", "train"),
        **env: str,
    ) -> Running:
        """`torchrun --nproc-per-node COUNT -m train`."""
        argv = [sys.executable, "-m", "torch.distributed.run", *torchrun]
        argv += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
        unproved = UNPROVED if module[-1] != "train.collectives" else ()
        program = shared_gpu.started_by_torchrun(*module, *unproved, *flags)
        argv += ["--monitor-interval=0.05", f"--nproc-per-node={count}", *program]
        return self.command(argv, run_dir, attempt, env)

    def each(
        self, count: int, *flags: str, run_dir: Path, attempt: int = 0, script: str = ""
    ) -> list[Running]:
        """`ranks` without torchrun, in processes that need not import torch."""
        meeting = run_dir.parent / f"meeting-{len(self.started)}"
        return [
            self.single(
                *flags,
                run_dir=run_dir,
                attempt=attempt,
                script=script,
                RANK=str(rank),
                WORLD_SIZE=str(count),
                LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(count),
                TRAIN_MEETING=f"file://{meeting}",
            )
            for rank in range(count)
        ]

    def whole(self, count: int, *flags: str, run_dir: Path, attempt: int = 0) -> Running:
        """`each` to their end."""
        ranks = self.each(count, *flags, run_dir=run_dir, attempt=attempt)
        first, *_ = [rank.finish() for rank in ranks]
        return first

    def held(
        self,
        count: int,
        *flags: str,
        after: int,
        rank: int,
        run_dir: Path,
        attempt: int = 0,
        torchrun: tuple[str, ...] = ("--standalone",),
    ) -> Running:
        """`ranks`, one of which stays after a step until it is killed or asked to stop."""
        return self.ranks(
            count,
            *flags,
            run_dir=run_dir,
            attempt=attempt,
            torchrun=torchrun,
            module=held.MODULE,
            HELD_AT=str(after),
            HELD_BY=f"RANK={rank}",
            TORCH_ELASTIC_SHUTDOWN_TIMEOUT=UNHURRIED,
        )

    def command(self, argv: list[str], run_dir: Path, attempt: int, env: dict[str, str]) -> Running:
        def started(log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
            with log.open("wb") as file:
                return subprocess.Popen(
                    argv,
                    cwd=self.home,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=env,
                )

        return self._started(started, run_dir, attempt, env)

    def _started(
        self,
        start: Callable[[Path, dict[str, str]], subprocess.Popen[bytes] | Copied],
        run_dir: Path,
        attempt: int,
        env: dict[str, str],
    ) -> Running:
        log = self.home / f"log-{len(self.started)}.txt"
        log.touch()
        earlier = len(read_lines(run_dir / "metrics.jsonl"))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRAIN_", "PET_"))}
        process = start(
            log,
            {
                **inherited,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "TRAIN_RUN_DIR": str(run_dir),
                "TRAIN_ATTEMPT": str(attempt),
                **env,
            },
        )
        running = Running(process=process, run_dir=run_dir, log=log, earlier=earlier)
        self.started.append(running)
        return running

    def end_all(self) -> None:
        for running in self.started:
            running.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs that end with the test."""
    starter = Start(tmp_path)
    yield starter
    starter.end_all()


@pytest.fixture(scope="session")
def session_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start runs that several tests look at."""
    starter = Start(tmp_path_factory.mktemp("shared"))
    yield starter
    starter.end_all()


# Three ranks: with two, a + b = b + a hides every difference in the order of summing.
# `chars`: its gradients arrive in another order than DDP first assumes (digits' do not).
FLAGS = (
    "--task=chars",
    "--global-batch=12",
    "--steps=60",
    "--checkpoint-every=12",
    "--export=weights.st",
)


@pytest.fixture(scope="session")
def flags() -> tuple[str, ...]:
    """Command line of the run that is broken in many ways, each time to end in the same bits."""
    return FLAGS


@pytest.fixture(scope="session")
def unbroken(session_start: Start) -> Running:
    """That run on three ranks without any interruption."""
    return session_start.whole(3, *FLAGS, run_dir=session_start.home / "unbroken")
