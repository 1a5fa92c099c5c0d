"""Queries and actions of Slurm, through its command-line programs on the batch host.

Their output is untrusted: a site's wrapper or prolog may print lines before and after it. When
Slurm ends a job, it may send SIGTERM to all processes of its script: these programs get none.
"""

import re
import signal
import subprocess
import time
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

LIMIT_S = 60.0
"""Time limit of a program: an unreachable controller answers late, or not at all."""

NO_SUCH_NAME = 2
"""The exit status of getent for a nonexistent name; an unreachable server has another one."""

SOON_S, _DELAY_S = 10, 120
"""Seconds until a requeued job may start, and Slurm's own delay."""

_DELAY = re.compile(r"\b(?:requeue_delay|cred_expire)=([0-9]+)")
"""Delays set by an administrator in SchedulerParameters and AuthInfo."""

_KILL_WAIT = re.compile(r"^KillWait *= *([0-9]+)", re.MULTILINE)

_SLURMD_PORT = 6818
"""Slurm's default (slurm.conf(5), SlurmdPort). A host that is up refuses connections to others."""

_OUT_OF_USE = ("down", "drain", "drng", "fail", "unk")
"""Prefixes of sinfo's short states of nodes that accept no jobs."""


class Answer(NamedTuple):
    """The result of a program."""

    status: int
    """The exit status; negative for a signal, 124 after a timeout."""
    text: str


def ask(
    argv: Sequence[str],
    environ: Mapping[str, str],
    limit_s: float = LIMIT_S,
    stderr: Optional[int] = subprocess.DEVNULL,
) -> Answer:
    """Run a program shielded from Slurm's SIGTERM; return its exit status and output."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=dict(environ),
        )
    except OSError:
        return Answer(127, "")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        text, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        return Answer(124, text.decode("latin-1"))
    return Answer(process.returncode, text.decode("latin-1"))


class Job(NamedTuple):
    """Fields of `scontrol show job`; empty if missing."""

    state: str = ""
    restarts: Optional[int] = None
    began_s: int = 0
    preempted_s: int = 0
    """When Slurm preempted the job, perhaps in an earlier attempt; 0 for never."""
    excluded: str = ""
    """The excluded nodes, as a Slurm node list."""
    nodes: str = ""
    node_count: Optional[int] = None
    folder: str = ""
    """The working directory of its script."""


def job_in(text: str) -> Job:
    r"""Parse the output of `SLURM_TIME_FORMAT=%s scontrol -o show job`.

    >>> job_in("Welcome!\nJobId=7 JobState=RUNNING Restarts=1 PreemptTime=None\n")[:4]
    ('RUNNING', 1, 0, 0)
    """
    lines = [line for line in text.splitlines() if line.startswith("JobId=")]
    found = dict(word.partition("=")[::2] for line in lines for word in line.split())
    folder = re.search(r" WorkDir=(/.*?)(?= [A-Z]\w*=|$)", lines[-1]) if lines else None
    return Job(
        state=found.get("JobState", ""),
        restarts=_number(found.get("Restarts")),
        began_s=_number(found.get("StartTime")) or 0,
        preempted_s=_number(found.get("PreemptTime")) or 0,
        excluded=_list(found.get("ExcNodeList")),
        nodes=_list(found.get("NodeList")),
        node_count=_number((found.get("NumNodes") or "").partition("-")[0]),
        folder=folder.group(1) if folder else "",
    )


def _number(text: Optional[str]) -> Optional[int]:
    return int(text) if text is not None and text.isdigit() else None


def _list(text: Optional[str]) -> str:
    return "" if text is None or text.startswith("(") else text


class Slurm:
    """The Slurm cluster, from the view of a job's batch script."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ: Dict[str, str] = dict(environ)
        self.job_id = self.environ["SLURM_JOB_ID"]
        self.job = self.job_id
        """The job id for Slurm's programs; a task of an array may have the id of the array."""
        if self.job_id == self.environ.get("SLURM_ARRAY_JOB_ID"):
            self.job = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**self.environ)
        self.node_list = self.environ["SLURM_JOB_NODELIST"]

    def _ask(self, *argv: str, **more: str) -> Answer:
        return ask(argv, {**self.environ, **more})

    def _order(self, *argv: str) -> bool:
        """Run a program with stderr in the job's log; return whether it succeeded."""
        return ask(argv, self.environ, stderr=None).status == 0

    # ---- The job

    def show_job(self) -> Job:
        """Return the job's current record in the controller."""
        argv = ("scontrol", "-o", "show", "job", self.job)
        return job_in(self._ask(*argv, SLURM_TIME_FORMAT="%s").text)

    def queued_again(self, restarts: int) -> bool:
        """Whether Slurm has queued the job again since its start number `restarts`."""
        return (self.show_job().restarts or 0) > restarts

    def requeue(self) -> bool:
        """Queue the job again; return whether the controller accepted. This ends the script."""
        return self._order("scontrol", "requeue", self.job)

    def start_soon(self, *, killed: bool = False) -> None:
        """Let the requeued job start within seconds.

        Slurm keeps a start time that is still in the future when all processes and the epilog of
        the attempt have ended. Otherwise, or if a site forbids it, Slurm's own delay applies. Wait
        at least two seconds: slurmd refuses a step with a credential as old as the attempt's end.

        Args:
            killed: Whether Slurm ends the attempt with SIGKILL after KillWait.
        """
        config = self._ask("scontrol", "show", "config").text
        waits = [int(seconds) for seconds in _KILL_WAIT.findall(config)] if killed else []
        after_s = SOON_S + max(waits, default=0)
        if max(map(int, _DELAY.findall(config)), default=_DELAY_S) > after_s:
            self._ask("scontrol", "update", f"jobid={self.job}", f"starttime=now+{after_s}")

    def is_there(self) -> bool:
        """Whether the controller answers."""
        return self._ask("scontrol", "ping").status == 0

    def exclude(self, nodes: Iterable[str]) -> bool:
        """Exclude nodes from the next start of the job."""
        option = "excnodelist=" + ",".join(nodes)
        return self._order("scontrol", "update", f"jobid={self.job}", option)

    def signal_step(self, step: str) -> bool:
        """Send SIGTERM to all processes of a step: on SIGTERM, srun itself would send SIGKILL."""
        return self._ask("scancel", "--signal=TERM", f"{self.job}.{step}").status == 0

    def end_step(self, step: str) -> None:
        """End a step with SIGTERM, and with SIGKILL after Slurm's KillWait."""
        self._ask("scancel", f"{self.job}.{step}")

    def step_is_released(self, step: str) -> bool:
        """Whether the controller has noted the end of a step, so that its resources are free."""
        argv = ("squeue", "-h", "--steps", "-j", self.job, "-o", "==%i==")
        listed = re.findall(r"==[^=\n]+\.([^=\n]+)==", self._ask(*argv).text)
        return "batch" in listed and step not in listed  # this script's step is always listed

    def empty_step(self) -> Optional[int]:
        """Run an empty step; return its number, if known."""
        argv = ("srun", "--export=ALL", "--nodes=1", "--ntasks=1", "env")
        found = re.findall("^SLURM_STEP_ID=([0-9]+)$", self._ask(*argv).text, re.MULTILINE)
        return int(found[-1]) if found else None

    # ---- Other jobs

    def submit(self, *options_and_script: str) -> Optional[int]:
        """Submit a job that inherits none of this job's variables; return its job id."""
        environ = {
            name: value
            for name, value in self.environ.items()
            if not name.startswith("SLURM_") or name == "SLURM_CONF"
        }
        answer = ask(("sbatch", *options_and_script), environ, stderr=None)
        found = re.findall("Submitted batch job ([0-9]+)", answer.text)
        return int(found[-1]) if found and answer.status == 0 else None

    def waiting_or_running(self, job_ids: Sequence[str]) -> Optional[List[str]]:
        """Return the jobs that have not ended; None if the controller does not answer."""
        if not job_ids:
            return []
        answer = self._ask("squeue", "-h", "--me", "-o", "==%A==")
        listed = re.findall("==([0-9]+)==", answer.text)
        return None if answer.status else [one for one in job_ids if one in listed]

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs."""
        self._ask("scancel", "--quiet", *job_ids)

    # ---- Nodes

    def hostnames(self, nodes: str) -> List[str]:
        """Return the names in a list such as `n[1-3]`.

        Tried twice: the signal that ends the job may kill the first program.
        """
        argv = ("scontrol", "show", "hostnames", f"begin-nodes,{nodes},end-nodes")
        for _ in range(2):
            lines = [line.strip() for line in self._ask(*argv).text.splitlines()]
            if "begin-nodes" in lines and "end-nodes" in lines:
                names = lines[lines.index("begin-nodes") + 1 : lines.index("end-nodes")]
                if any(names):
                    return [name for name in names if name]
        return []

    def resolves(self, node: str) -> bool:
        """Whether this host resolves a node's name; True if that cannot be checked."""
        answers = (self._ask("getent", "ahosts", node).status for _ in range(2))
        return any(status != NO_SUCH_NAME for status in answers)

    def down_nodes(self, nodes: str) -> List[str]:
        """Return the nodes of a list that are down or do not respond."""
        argv = ("sinfo", "-h", "-N", "-n", nodes, "-t", "down,no_respond", "-o", "==%N==")
        return sorted(set(re.findall("==([^=\n]+)==", self._ask(*argv).text)))

    def count_other_nodes(self, without: Iterable[str]) -> int:
        """Count the nodes that the job could use, excluding some."""
        partition = self.environ.get("SLURM_JOB_PARTITION", "")
        return len(self._usable("-p", partition) - set(without))

    def all_usable(self, nodes: Sequence[str]) -> bool:
        """Whether all these nodes are up and not being drained."""
        return self._usable("-n", ",".join(nodes)) >= set(nodes)

    def _usable(self, *which: str) -> Set[str]:
        states = re.findall(
            "==([^= \n]+) ([^=\n]+)==",
            self._ask("sinfo", "-h", "-N", *which, "-o", "==%N %t==").text,
        )
        return {
            node
            for node, state in states
            if not state.startswith(_OUT_OF_USE) and not state.endswith("*")
        }

    def slurmd_began_s(self, node: str) -> Optional[float]:
        """Return the start time of a node's slurmd, in seconds since 1970; None if unknown."""
        found = re.search(r"(?:^|\s)SlurmdStartTime=([0-9-]+T[0-9:]+)", self._show_node(node))
        try:
            return (
                time.mktime(time.strptime(found.group(1), "%Y-%m-%dT%H:%M:%S")) if found else None
            )
        except ValueError:
            return None

    def address_of(self, node: str) -> Tuple[str, int]:
        """Return the address and the port of a node's slurmd."""
        text = self._show_node(node)
        address = re.search(r"(?:^|\s)NodeAddr=(\S+)", text)
        port = re.search(r"(?:^|\s)Port=(\d+)", text)
        return (
            address.group(1) if address else node,
            int(port.group(1)) if port else _SLURMD_PORT,
        )

    def _show_node(self, node: str) -> str:
        argv = ("scontrol", "-o", "show", "node", node)
        return self._ask(*argv, SLURM_TIME_FORMAT="standard").text
