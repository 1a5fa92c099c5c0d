"""A job with a variable number of nodes.

Slurm removes a lost node from a job permanently and adds none. So the supervisor submits a one-node
job for each missing node: the same script, with the word `join`. Their job ids are in the file
`joiners` in the attempt's folder.

If a node disappears without a message (no power, no network), the ranks on the other nodes would
wait for it until the timeout of their collective. So the supervisor kills a rank on the first node
instead: torchrun then starts the ranks again, on the nodes that are left.

Slurm keeps the job also if its first node is lost, although the batch script and the rendezvous are
lost with it (`--no-kill`). So the other nodes queue the job again.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import time
from typing import Callable, Iterator, List, Mapping, NamedTuple, Optional, Sequence

from .attempt import Attempt, folder_of
from .evidence.files import read
from .evidence.first_error import LOST_NODE
from .evidence.memory import pids_in_namespaces, variables_of
from .evidence.outcome import read_outcome
from .process import Signals, status_of
from .schedulers.slurm import Job, Slurm

_CONNECT_S = 3.0
"""How long a node may take to answer a connection: the kernel asks three times."""

_HEARTBEAT_S = 10.0
"""A node may live so long after its last heartbeat. Without it, the others meet 15 s later at the
earliest: as soon as torchrun's rendezvous drops a node (torch 2.13)."""

_MOST_FAILED = 3
"""After so many jobs that have ended before they joined, an attempt submits no more."""

_LOOK_S = 60.0
"""Interval between two looks at the heartbeat of the first node."""

_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class Members:
    """The nodes of an attempt, and the jobs that join it."""

    def __init__(self, slurm: Slurm, attempt: Attempt, script: str, log: str) -> None:
        self.slurm, self.attempt, self.script, self.log = slurm, attempt, script, log
        self._before: Optional[int] = None
        self._gave_up = False

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
        known = read(self.attempt.path("joiners")).split()
        joined = self.slurm.waiting_or_running(known)
        if joined is None:  # the controller does not answer
            return
        failed = [one for one in known if one not in joined and not self._has_begun(one)]
        if len(failed) >= _MOST_FAILED:
            if not self._gave_up:
                say(f"{' '.join(failed)}: these jobs ended before they joined; none follows")
            self._gave_up = True
            return
        # Slurm still counts nodes that have restarted, until it takes them from the job.
        restarted = set(read(self.attempt.path("restarted")).split())
        if restarted and job.nodes:
            restarted.intersection_update(self.slurm.hostnames(job.nodes))
        for _ in range(here + len(joined) - len(restarted), most):
            number = self._submit(job, endpoint)
            if number is None:
                return
            with open(self.attempt.path("joiners"), "a", encoding="ascii") as file:
                file.write(f"{number}\n")
            say(f"job {number} waits for another node, to join this run")

    def _has_begun(self, joiner: str) -> bool:
        return os.path.exists(self.attempt.path(f"began-joined-by-{joiner}"))

    def _submit(self, job: Job, endpoint: str) -> Optional[int]:
        return self.slurm.submit(
            f"--exclude={job.nodes or self.slurm.node_list}",
            *([f"--chdir={job.folder}"] if job.folder else []),
            "--output=" + self.log.replace("%", "%%"),
            f"--job-name={self.slurm.environ.get('SLURM_JOB_NAME', 'torchrun')}-join",
            *("--nodes=1", "--no-requeue", "--no-kill=off"),
            *(self.script, self.attempt.run_dir, "join"),
            *(str(self.attempt.number), endpoint, self.slurm.job_id),
        )

    def cancel_joiners(self) -> None:
        """Cancel the jobs that wait to join any attempt of the run or have joined it."""
        job_ids: List[str] = []
        for number in range(self.attempt.number + 1):
            folder = folder_of(self.attempt.run_dir, number)
            job_ids += read(os.path.join(folder, "joiners")).split()
        if job_ids:
            self.slurm.cancel(job_ids)

    # ---- Lost nodes

    def is_unreachable(self, node: str) -> bool:
        """Whether a node accepts no connection and refuses none."""
        return is_unreachable(self.slurm, node)

    def go_on_without(self, node: str, silent_s: float) -> None:
        """Kill the oldest rank on this host, so that all ranks start again.

        Ranks that began later than `_HEARTBEAT_S` after the node's last heartbeat have met without
        it, and continue.
        """
        run_id = f"{self.slurm.job_id}-{self.attempt.number}"
        ranks = sorted(_ranks_here(run_id), key=lambda rank: rank.age_s, reverse=True)
        if not ranks or ranks[0].age_s < silent_s - _HEARTBEAT_S:
            return
        with contextlib.suppress(OSError):
            _explain(ranks[0].environ.get("TORCHELASTIC_ERROR_FILE", ""), node)
        with contextlib.suppress(OSError):
            os.kill(ranks[0].pid, signal.SIGKILL)


class FirstNode:
    """The node of the batch script and of the rendezvous, as another node of the job sees it."""

    def __init__(self, logs: str, environ: Mapping[str, str]) -> None:
        self.logs, self.slurm = logs, Slurm({"SLURM_JOB_NODELIST": "", **environ})
        self._heartbeat, self._look_at_s = "", 0.0

    @property
    def heartbeat(self) -> str:
        """The last heartbeat of the node; empty if unknown."""
        return read(os.path.join(self.logs, "alive-0"), 100)

    @property
    def name(self) -> str:
        """The name of the node; empty if unknown."""
        return "".join(read(os.path.join(self.logs, "nodes"), 1000).split()[:1])

    def look(self, now_s: float) -> bool:
        """Look for its heartbeat once a minute; return whether there was none, and no answer."""
        if now_s < self._look_at_s:
            return False
        self._look_at_s = now_s + _LOOK_S
        before, self._heartbeat = self._heartbeat, self.heartbeat
        return self._heartbeat == before and self.is_unreachable()

    def is_unreachable(self) -> bool:
        """Whether it accepts no connection and refuses none, three times in a row."""
        name = self.name
        for left in (2, 1, 0):
            if not name or not is_unreachable(self.slurm, name):
                return False
            time.sleep(left)
        return True

    def queue_again(self) -> None:
        """Queue the job again; end it if that is not allowed. Only one node does."""
        try:
            open(os.path.join(self.logs, "first_lost"), "x", encoding="utf-8").close()
        except FileExistsError:
            return
        except OSError:
            pass
        why = f"node_failure: {self.name}, which ran the batch script, is lost; "
        self._write("failing_node", self.name)
        run_dir = os.path.dirname(os.path.dirname(self.logs))
        self._write("step", read_outcome(run_dir).step)
        self._write("reason", why + "queued again")
        print(f"{self.name}, which runs the batch script, is lost: the job is queued again")
        if self.slurm.requeue():
            self.slurm.start_soon(killed=True)
        else:
            self._write("reason", why + "not queued again")
            self._write("exit_status", "1")
            self.slurm.cancel([self.slurm.job])

    def _write(self, name: str, line: str) -> None:
        path = os.path.join(self.logs, name)
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(line + "\n")


def is_unreachable(slurm: Slurm, node: str) -> bool:
    """Whether a node accepts no connection and refuses none.

    A node that is up answers on every port, also without slurmd.
    """
    try:
        socket.create_connection(slurm.address_of(node), timeout=_CONNECT_S).close()
    except socket.timeout:
        return True
    except OSError as error:
        return error.errno in _UNREACHABLE
    return False


class _Rank(NamedTuple):
    """A rank on this host, or a process that a rank has forked."""

    pid: int
    age_s: float
    environ: Mapping[str, str]


def _ranks_here(run_id: str) -> Iterator[_Rank]:
    """Yield the processes of torchrun's run id, also those in containers."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        environ = variables_of(int(name))
        ours = environ.get("TORCHELASTIC_RUN_ID") == run_id and "RANK" in environ
        above = environ.get("TRAIN_RANK_PIDS", "").split()  # of a program of a rank
        # A rank that has replaced its own program is first there.
        if ours and (not above or above[0] in pids_in_namespaces(int(name))[-1:]):
            yield _Rank(int(name), _age_s(name), environ)


def _age_s(pid: str) -> float:
    """Return the age of a process; 0 if it has ended (proc(5), starttime)."""
    fields = read(f"/proc/{pid}/stat", 4096).rpartition(")")[2].split()
    up = read("/proc/uptime", 100).split()
    if len(fields) < 20 or not up:
        return 0.0
    return float(up[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _explain(path: str, node: str) -> None:
    """Write the rank's error file, from which torchrun takes the reason."""
    if path:
        extra = {"timestamp": str(int(time.time())), "py_callstack": ""}
        message = f"{LOST_NODE}{node} is lost; the ranks start again without it"
        with open(path, "x", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)


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
