"""Ranks that stay: processes that run one training after another, without importing torch again."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.train.support.processes import PROCESSES
from tests.train.support.whole_runs import Ended, environment_of, output, outputs

# Generous: a loaded machine is slow, not broken.
PATIENCE_S = 300.0
# How long ranks may go on when one of them has refused, which is the verdict; and when one has
# failed, perhaps as another one refuses.
AFTER_REFUSAL_S, AFTER_FAILURE_S = 1.0, 15.0
MOST_JOBS = 60
"""After so many trainings processes are replaced, for what each of them leaves behind."""


class Pool:
    """Starts ranks when they are needed, by their number."""

    def __init__(self) -> None:
        self._ranks: dict[int, list[tuple[BaseProcess, Connection]]] = {}
        self._jobs: dict[int, int] = {}

    def run(self, ranks: int, argv: Sequence[str]) -> Ended:
        """Run the command line of `train` on so many ranks."""
        if ranks not in self._ranks:
            self._ranks[ranks] = [_started() for _ in range(ranks)]
            self._jobs[ranks] = 0
        self._jobs[ranks] += 1
        members = self._ranks[ranks]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for rank, (_, connection) in enumerate(members):
                variables = environment_of(rank, ranks, folder)
                connection.send((list(argv), variables, str(output(folder, rank))))
            statuses = self._statuses(members)
            if any(statuses) or None in statuses or self._jobs[ranks] >= MOST_JOBS:
                self.end(ranks)
            return Ended(statuses=tuple(statuses), output=outputs(folder))

    def close(self) -> None:
        """End all ranks."""
        for ranks in list(self._ranks):
            self.end(ranks)

    def _statuses(self, members: Sequence[tuple[BaseProcess, Connection]]) -> list[int | None]:
        statuses: dict[int, int | None] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(statuses) < len(members) and (left := deadline - time.monotonic()) > 0:
            waiting = {c: rank for rank, (_, c) in enumerate(members) if rank not in statuses}
            for ready in wait(list(waiting), timeout=left):
                assert isinstance(ready, Connection)
                try:
                    statuses[waiting[ready]] = ready.recv()
                except EOFError:
                    statuses[waiting[ready]] = 1
                if status := statuses[waiting[ready]]:
                    echoes = AFTER_REFUSAL_S if status == 2 else AFTER_FAILURE_S
                    deadline = min(deadline, time.monotonic() + echoes)
        return [statuses.get(rank) for rank in range(len(members))]

    def end(self, ranks: int) -> None:
        """End ranks of this number, and with them their hold of a run directory."""
        for process, connection in self._ranks.pop(ranks):
            connection.close()
            process.kill()
            process.join()


def _started() -> tuple[BaseProcess, Connection]:
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(connection: Connection) -> None:
    """Train whenever told to, until the other end is closed."""
    import torch

    torch.set_num_threads(1)
    # What torch logs; what `train` prints goes to files.
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(_trained(*connection.recv()))


def _trained(argv: Sequence[str], environ: Mapping[str, str], printed: str) -> int:
    """Do what a process of `python -m train` does; give its exit status."""
    import traceback

    import torch

    from train.cli import flags
    from train.errors import TrainError
    from train.failure.record import tell
    from train.rundir.console import Console
    from train.runtime.phases import Phases
    from train.runtime.rank import RankInfo
    from train.runtime.signals import StopRequest
    from train.session import train

    os.environ.update(environ)
    with Path(printed).open("w") as file:
        sys.stdout = sys.stderr = file
        # As a user's own Python: a warning is no error.
        warnings.resetwarnings()
        # What --reduce exact has set.
        torch.use_deterministic_algorithms(False)
        try:
            rank_info = RankInfo.from_environ(os.environ)
            config = flags.parse(list(argv), os.environ, rank_info).config
            phases = Phases.of_process(os.environ, restart=rank_info.restart)
            console = Console(rank=rank_info.rank)
            return train(config, rank_info, StopRequest(), console, phases)
        except TrainError as error:
            tell(rank_info, str(error))
            return error.exit_status
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
