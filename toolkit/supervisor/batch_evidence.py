"""How an attempt on Slurm ended: evidence from its marks, its log and Slurm."""

import errno
import glob
import os
import re
from typing import List, Optional, Sequence

from .attempt import Attempt, folder_of
from .evidence import job_log
from .evidence.cause import Logs, few_gpus, no_image, program_error
from .evidence.files import read
from .evidence.first_error import Failure, in_words
from .evidence.job_log import JobLog
from .evidence.torchrun_report import has_exitcode, read_reports
from .marks import Marks
from .policy import Verdict
from .schedulers.slurm import Slurm
from .supervised import Policy, Supervised

NOT_REACHED = frozenset((233, 234, 235, 236, 167))
"""Exit statuses of an srun that could not start a node's task: the error number modulo 256. 1001 to
1004: a slurmd did not answer; 4007: the request took too long to arrive (cred_expire)."""

BY_SIGNAL = "stopped by a signal from outside"

_KILLED = frozenset(("134", "135", "137", "139"))
"""Exit statuses of a torchrun killed by SIGABRT, SIGBUS, SIGKILL or SIGSEGV."""

_NO_NODES_FAULT = re.compile(
    "enforce fail|StallError.*(?:collective mismatch: |no rank differs )", re.DOTALL
)
"""Errors that no node causes: bugs in the code, and stalls in which no rank differs."""

_A_NODES_FAULT = re.compile(
    "CUDA|unhandled cuda error|NVIDIA driver|ECC|Input/output error|Stale file handle"
)


class Nodes:
    """The number of nodes that a job needs, and the names of its nodes."""

    def __init__(self, fewest: int = 0, most: int = 0) -> None:
        self.names: List[str] = []
        self._fewest, self._most = fewest, most

    @property
    def elastic(self) -> bool:
        """Whether the job continues with fewer nodes."""
        return self._fewest < self._most

    @property
    def fewest(self) -> int:
        """The number of nodes that must succeed."""
        return self._fewest or len(self.names)

    @property
    def most(self) -> int:
        """The number of nodes of a complete job."""
        return self._most or len(self.names)


class JobEvidence(Supervised):
    """An attempt of a batch job, and its evidence."""

    def __init__(
        self, policy: Policy, attempt: Attempt, slurm: Slurm, log: JobLog, nodes: Nodes
    ) -> None:
        super().__init__(policy, attempt)
        self.slurm, self.log, self.nodes = slurm, log, nodes
        self.marks = Marks(attempt.logs)
        self.command: Sequence[str] = ()
        """The command that starts the ranks."""
        self.restarts = 0
        """The restart count of the job: 0 for the first start."""
        self.queued = False
        """Whether Slurm itself has queued the job again."""

    # ---- What the policy asks for

    def reports(self) -> Sequence[str]:
        """Return the relevant lines of the log, including the torchrun reports."""
        return self.log.read_on()

    def hosts(self) -> List[str]:
        """Return the names of the job's nodes."""
        return self.nodes.names

    def ranks_began(self) -> bool:
        """Whether torchrun has started any ranks."""
        return bool(glob.glob(glob.escape(self.attempt.logs) + "/node-*/*/attempt_*"))

    def superseded(self) -> Optional[Verdict]:
        """Return a verdict if Slurm started another attempt while this node was cut off."""
        if not os.path.lexists(folder_of(self.attempt.run_dir, self.attempt.number + 1)):
            return None
        return Verdict("fenced", f"attempt {self.attempt.number + 1} has taken over")

    def exited_with(self, status: int) -> bool:
        """Whether torchrun's report shows a worker with this exit status."""
        return has_exitcode(self.log.read_on(), status)

    def stopped(self) -> Optional[Verdict]:
        """Return the verdict if the attempt was ended from outside."""
        if self.stopping == "cancelled":
            return Verdict("cancelled", "by toolkit cancel")
        if self.stopping == "walltime":
            return Verdict("walltime", "out of time")
        if self.stopping == "terminated":
            return self._ended_by_slurm()
        lost = None if self.nodes.elastic else self._node_restarted() or self._node_lost()
        if lost is None and self.policy.limits.requeue and self._queued_by_slurm():
            return self._ended_by_slurm()  # a SIGTERM before the start of the script is lost
        return lost or self._preempted_without_signal()

    def out_of_memory(self) -> Optional[str]:
        """Return where memory ran out, by the kernel's counters on the nodes or by Slurm."""
        nodes = sorted(set(self.marks.texts("oom")))
        if nodes:
            return "the kernel killed a process on " + " ".join(nodes)
        return job_log.memory_exceeded(self.log.read_on())

    def torchrun_was_killed(self) -> Optional[str]:
        """Return the node, if that was the first failure: srun then ends the other nodes' ranks."""
        _, node, status = ([*[*self.marks.texts("failed"), ""][0].split("\t"), "", ""])[:3]
        return node if node and status in _KILLED else None

    def could_not_start(self) -> Optional[Verdict]:
        """Return the verdict if the node's program, srun or a site's prolog prevented the start."""
        status, lines = self.status, self.log.read_on()
        cannot = self.marks.texts("cannot")
        if cannot and not (self.outcome and self.outcome.status):
            word, _, why = cannot[0].partition("\n")[0].partition(" ")
            said = program_error(self.log.tail()) if word == "retryable" else ""
            everywhere = word == "missing" and len(cannot) >= len(self.nodes.names)
            word = "fatal" if word == "fatal" or everywhere or no_image(said) else "retryable"
            if word != "fatal":
                self.attempt.note("failing_node", why.partition(":")[0])
            return Verdict(word, why + (f": {said}" if said else ""))
        without = self.nodes_without_task() if status in NOT_REACHED else []
        if without:
            self.attempt.note("failing_node", without[0])
            why = f"srun could not start on {' '.join(without)}"
            if job_log.credential_expired(lines):
                why += ": Job credential expired; Slurm's cred_expire must pass after a requeue"
            return Verdict("retryable", f"{why} (exit status {status})")
        prolog, error = job_log.prolog_failed(lines), job_log.srun_error(lines)
        if prolog:
            return Verdict("retryable", f"{prolog} (exit status {status})")
        if error and not self.marks.of("began"):
            said = program_error(self.log.tail()) or error
            why = f"srun could not start torchrun: {said} (exit status {status})"
            return Verdict("fatal" if no_image(said) else "retryable", why)
        return None

    def logs(self) -> Logs:
        """Return the attempt's evidence outside the rank folders."""
        return Logs(
            names=self.nodes.names,
            nodes=len(self.nodes.names),
            reported=read_reports(self.log.read_on()),
            out_of_memory=[text.partition(" ")[0] for text in self.marks.texts("oom")],
            lines=self.log.tail(),
            few_gpus=few_gpus(self.command, self.slurm.environ),
        )

    # ---- The sender of a stop

    def _queued_by_slurm(self) -> bool:
        return self.slurm.queued_again(self.restarts)

    def _node_restarted(self) -> Optional[Verdict]:
        """Return a verdict if the step was stopped because a node restarted, unnoticed by Slurm."""
        nodes = sorted(set(read(self.attempt.path("restarted")).split()))
        if not nodes:
            return None
        self.attempt.note("failing_node", "\n".join(nodes))
        return Verdict("node_failure", ", ".join(f"{node} has restarted" for node in nodes))

    def _node_lost(self) -> Optional[Verdict]:
        """Return a verdict if Slurm lost a node: without slurmd, its script gets no signal."""
        nodes = job_log.failed_nodes(self.log.read_on())
        return self._down(nodes) if nodes else None

    def _down(self, nodes: Sequence[str]) -> Verdict:
        if nodes:
            self.attempt.note("failing_node", "\n".join(nodes))
        return Verdict("node_failure", "down: " + " ".join(nodes))

    def _ended_by_slurm(self) -> Verdict:
        """Return why Slurm sent SIGTERM; slurmstepd usually logs the reason."""
        lines = self.log.read_on()
        cause = job_log.cause_of_end(lines)
        if self.policy.limits.requeue and not self.queued:
            self.queued = cause == "JOB" or self._queued_by_slurm()
        down = self.slurm.down_nodes(self.slurm.node_list)
        if cause == "JOB":
            return Verdict("requeued", "by an operator")
        if cause == "PREEMPTION":
            return Verdict("preempted", "Slurm has taken the nodes")
        if cause == "TIME":
            return Verdict("walltime", "out of time")
        if cause == "NODE" or down:
            return self._down(down or job_log.failed_nodes(lines))  # it may already be back
        if self.queued:
            return Verdict("requeued", "by Slurm, which has not said why")
        if self.slurm.show_job().state == "RUNNING":  # a job that Slurm ends has another state
            return Verdict("preempted", BY_SIGNAL)
        return Verdict("cancelled", "by scancel")

    def _preempted_without_signal(self) -> Optional[Verdict]:
        """Return a verdict if only the step got SIGTERM: by GraceTime or scancel --signal."""
        failed, outcome = self.marks.of("failed"), self.outcome.status if self.outcome else ""
        if failed and not self.marks.of("stopped"):
            return None
        job = self.slurm.show_job()
        if job.began_s and job.preempted_s >= job.began_s:
            return Verdict("preempted", "Slurm has taken the nodes")
        if failed or outcome not in ("", "running") or self.out_of_memory() is not None:
            return None
        stopped = job_log.step_was_stopped(self.log.read_on())
        return Verdict("preempted", BY_SIGNAL) if stopped else None

    # ---- Nodes

    def nodes_without_task(self) -> List[str]:
        """Return the nodes on which no task has begun.

        srun also ends the other nodes' tasks, some before they begin: if srun names a node, only
        that node counts.
        """
        began = set(self.marks.of("began"))
        waiting = [node for n, node in enumerate(self.nodes.names) if str(n) not in began]
        named = set(job_log.nodes_without_launch(self.log.read_on()))
        return sorted(named.intersection(waiting)) or waiting

    def is_removed(self) -> bool:
        """Whether the run directory was removed, and is not only temporarily unreachable."""
        try:
            os.stat(self.attempt.path("since"))
        except OSError as error:
            return error.errno == errno.ENOENT  # a stale handle is a different error
        return False

    def _first_failed_node(self) -> str:
        """Return the node of the first failed rank, killed ranks first; else that of a torchrun."""
        reported = read_reports(self.log.read_on())
        failures = [(int(one.time), one.exitcode >= 0, one.host) for one in reported]
        if failures:
            return min(failures)[2]
        marks = (text.split("\t") for text in self.marks.texts("failed"))
        return next((one[1] for one in sorted(marks) if len(one) > 1), "")

    def note_failing_node(self, verdict: Verdict) -> Verdict:
        """Record the node that failed first; change the verdict if the node may be at fault.

        After the same failure twice on one node, unless the script raised it, the job gets one more
        attempt without that node, if enough other nodes exist.
        """
        if verdict.word != "retryable" and self.twice is None:
            return verdict
        error = self.error
        if error and (error.kind == "fault" or _NO_NODES_FAULT.search(error.message)):
            return verdict
        node = _first_line(self.attempt.path("failing_node"))
        if not node:
            node = self.torchrun_was_killed() or same_node(
                self._first_failed_node(), self.nodes.names
            )
            if node:
                self.attempt.note("failing_node", node)
        if self.twice is None or not node or not self._may_be_at_fault(node, self.twice):
            return verdict
        if self.slurm.count_other_nodes([node]) < self.nodes.fewest:
            return verdict
        for name in ("once_more", "failing_node"):
            self.attempt.note(name, f"{node}\n{node}")
        return Verdict("retryable", in_words(self.twice))

    def _may_be_at_fault(self, node: str, twice: Failure) -> bool:
        if self.earlier and _first_line(self.earlier + "/failing_node") != node:
            return False
        for number in range(max(self.attempt.since, 0), self.attempt.number):
            if os.path.exists(folder_of(self.attempt.run_dir, number) + "/once_more"):
                return False
        raised = twice.kind in ("error", "fault")
        return not raised or _A_NODES_FAULT.search(twice.message) is not None


def _first_line(path: str) -> str:
    return read(path, 4096).partition("\n")[0].strip()


def same_node(host: str, nodes: Sequence[str]) -> str:
    """Return Slurm's name of a host; either name may include a domain. Empty if ambiguous.

    >>> same_node("n2", ["n1.site", "n2.site"]), same_node("n2.x.org", ["n1", "n2"])
    ('n2.site', 'n2')
    >>> same_node("n2", ["n2.east", "n2.west"]), same_node("n2", ["n1", "n22"])
    ('', '')
    """
    short = host.partition(".")[0]
    found = [node for node in nodes if node == host] or [
        node for node in nodes if node.partition(".")[0] == short
    ]
    return found[0] if host and len(found) == 1 else ""
