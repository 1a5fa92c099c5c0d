"""A job with a variable number of nodes.

Slurm removes a lost node from a job permanently and adds none. So the supervisor submits a one-node
job for each missing node: the same script, with the word `join`. Their job ids are in the file
`joiners` in the attempt's folder.
"""

import os
import signal
import subprocess
from typing import Callable, List, Mapping, Optional, Sequence

from .attempt import Attempt, folder_of
from .evidence.files import read
from .process import Signals, status_of
from .schedulers.slurm import Slurm

LOOK_TICKS = 15
"""Interval between two counts of the job's nodes, in seconds."""


class Joiners:
    """The jobs that join an attempt."""

    def __init__(self, slurm: Slurm, attempt: Attempt, script: str, log: str) -> None:
        self.slurm, self.attempt, self.script, self.log = slurm, attempt, script, log
        self._before: Optional[int] = None

    def look(self, endpoint: str, most: int, say: Callable[[str], None]) -> None:
        """Submit a job for each missing node."""
        job = self.slurm.show_job()
        before = self._before
        if before is None:
            count = self.slurm.environ.get("SLURM_JOB_NUM_NODES", "")
            before = int(count) if count.isdigit() else most
        here = before if job.node_count is None else job.node_count
        if here < before:
            say(f"{before - here} of {before} nodes lost; {here} go on")
        self._before = here
        # Slurm still counts nodes that have restarted.
        restarted = set(read(self.attempt.path("restarted")).split())
        joined = self.slurm.waiting_or_running(read(self.attempt.path("joiners")).split())
        for _ in range(here + len(joined) - len(restarted), most):
            number = self._submit(job.nodes or self.slurm.node_list, endpoint)
            if number is None:
                return
            with open(self.attempt.path("joiners"), "a", encoding="ascii") as file:
                file.write(f"{number}\n")
            say(f"job {number} waits for another node, to join this run")

    def _submit(self, not_on: str, endpoint: str) -> Optional[int]:
        return self.slurm.submit(
            f"--exclude={not_on}",
            "--output=" + self.log.replace("%", "%%"),
            f"--job-name={self.slurm.environ.get('SLURM_JOB_NAME', 'torchrun')}-join",
            *("--nodes=1", "--no-requeue", "--no-kill=off"),
            *(self.script, self.attempt.run_dir, "join"),
            *(str(self.attempt.number), endpoint, self.slurm.job_id),
        )


def cancel_joiners(slurm: Slurm, attempt: Attempt) -> None:
    """Cancel the jobs that wait to join any attempt of a run or have joined it."""
    job_ids: List[str] = []
    for number in range(attempt.number + 1):
        job_ids += read(os.path.join(folder_of(attempt.run_dir, number), "joiners")).split()
    if job_ids:
        slurm.cancel(job_ids)


def join(
    argv: Sequence[str], environ: Mapping[str, str], slurm: Slurm, signals: Signals, logs: str
) -> int:
    """Run the step of a job that joins another job's run; return its exit status."""
    srun = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=dict(environ))
    while srun.poll() is None:
        if any([number != signal.SIGCHLD for number in signals.take()]):
            step = read(os.path.join(logs, f"began-joined-by-{slurm.job_id}"), 100).strip()
            if not step or not slurm.signal_step(step):
                srun.send_signal(signal.SIGUSR1)
        signals.wait(1.0)
    return status_of(srun.returncode)
