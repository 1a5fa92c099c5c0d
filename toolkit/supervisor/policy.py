"""How an attempt ended, and whether another one follows: the same rules for all schedulers.

`judge` queries the evidence in the order of `RULES`; the first rule with an answer decides. The
status words are listed in docs/reference/run-directory.md, "How an attempt ended".
"""

from typing import Callable, Iterable, NamedTuple, Optional

from .evidence.cause import Cause
from .evidence.echoes import is_echo
from .evidence.first_error import Failure, in_words
from .evidence.outcome import Outcome

NO_PROGRESS_STATUS = 93
"""The exit status with which a worker or script ends an attempt without progress."""

_NOT_STARTED = frozenset((2, 126, 127))
"""Exit statuses of programs that could not start, by sh(1) and Python's argparse."""


class Verdict(NamedTuple):
    """How an attempt ended."""

    word: str
    why: str = ""


class Evidence:
    """The evidence about an attempt that has ended. Subclasses override what they can find out.

    A method may call the scheduler, so `judge` calls each only when needed.
    """

    status = 0
    """The exit status of torchrun, or of the program that started it on all nodes."""

    outcome: Optional[Outcome] = None
    """The record outcome.json, if it belongs to this attempt."""

    stopping = ""
    """Why the attempt was asked to stop, as a word of the subclass; empty if it was not."""

    disk = ""
    """The folder on the full disk; empty if there is none."""

    def ranks_began(self) -> bool:
        """Whether torchrun has started any ranks."""
        return True

    def superseded(self) -> Optional[Verdict]:
        """Return the verdict if another attempt has taken over; else None."""
        return None

    def repeated(self) -> Optional[Failure]:
        """Return the repeated failure for which torchrun was stopped, if any."""
        return None

    def exited_with(self, status: int) -> bool:
        """Whether torchrun's report shows a worker with this exit status."""
        return False

    def no_progress(self) -> bool:
        """Whether another node has recorded a worker that ended for lack of progress."""
        return False

    def stopped(self) -> Optional[Verdict]:
        """Return the verdict if the attempt was ended from outside."""
        return None

    def raised(self) -> Optional[Failure]:
        """Return the first error of the last start."""
        return None

    def failed_before(self) -> Optional[Failure]:
        """Return the failure of this start if an earlier start, of any attempt, failed alike."""
        return None

    def out_of_memory(self) -> Optional[str]:
        """Return where the kernel killed a process out of memory; empty if the node is unknown."""
        return None

    def torchrun_was_killed(self) -> Optional[str]:
        """Return the node on which torchrun was killed, if that was the first failure."""
        return None

    def cause(self) -> Optional[Cause]:
        """Return the first failure, by the best evidence other than outcome.json."""
        return None

    def cost(self) -> str:
        """Return the number of steps since the newest checkpoint; empty if unknown."""
        return ""

    def could_not_start(self) -> Optional[Verdict]:
        """Return the verdict if torchrun could not start."""
        return None


# ---- The rules, in their order


def _said(evidence: Evidence) -> str:
    """Return the reason in outcome.json, with the rank that wrote it."""
    if evidence.outcome is None:
        return ""
    rank, reason = evidence.outcome.rank, evidence.outcome.reason
    return f"rank {rank}: {reason}" if rank else reason


def _outcome(evidence: Evidence) -> str:
    return evidence.outcome.status if evidence.outcome else ""


def _status(evidence: Evidence) -> int:
    """Return torchrun's exit status: a torchrun stopped before its ranks began may exit with 0."""
    if evidence.status == 0 and evidence.stopping and not _outcome(evidence):
        return 0 if evidence.ranks_began() else 1
    return evidence.status


def _done(evidence: Evidence) -> Optional[Verdict]:
    done = _outcome(evidence) == "done"
    if done or (_status(evidence) == 0 and _outcome(evidence) in ("", "running")):
        return Verdict("done")
    return None


def _superseded(evidence: Evidence) -> Optional[Verdict]:
    return evidence.superseded()


def _repeated(evidence: Evidence) -> Optional[Verdict]:
    return _twice(evidence.repeated())


def _no_progress(evidence: Evidence) -> Optional[Verdict]:
    if not evidence.exited_with(NO_PROGRESS_STATUS) and not evidence.no_progress():
        return None
    said = _said(evidence)
    return Verdict(
        "no_progress",
        f"a worker exited with status {NO_PROGRESS_STATUS}" + (f" ({said})" if said else ""),
    )


def _fatal(evidence: Evidence) -> Optional[Verdict]:
    return Verdict("fatal", _said(evidence)) if _outcome(evidence) == "fatal" else None


def _disk_full(evidence: Evidence) -> Optional[Verdict]:
    if not evidence.disk or _outcome(evidence) == "preempted":
        return None
    return Verdict("fatal", "no space is left for " + evidence.disk)


def _stopped(evidence: Evidence) -> Optional[Verdict]:
    verdict = evidence.stopped()
    raised = evidence.raised() if verdict else None
    if verdict and raised and raised.kind in ("error", "fault"):
        return verdict._replace(why=f"{verdict.why}; meanwhile a rank has raised {raised.message}")
    return verdict


def _out_of_memory(evidence: Evidence) -> Optional[Verdict]:
    where = evidence.out_of_memory()
    if where is None:
        return None
    return Verdict("fatal", "out of memory: " + (where or "the kernel killed a process"))


def _preempted(evidence: Evidence) -> Optional[Verdict]:
    if _outcome(evidence) == "preempted" and evidence.torchrun_was_killed() is None:
        return Verdict("preempted", _said(evidence))
    return None


def _could_not_start(evidence: Evidence) -> Optional[Verdict]:
    return evidence.could_not_start()


def _code(evidence: Evidence) -> int:
    """Return the exit status that decides: 2, if any worker exited with it."""
    return 2 if evidence.exited_with(2) else evidence.status


def _hopeless(evidence: Evidence) -> Optional[Verdict]:
    code, cause = _code(evidence), evidence.cause()
    if cause is not None and cause.hopeless:
        return Verdict("fatal", f"{_said(evidence) or cause.text}; {cause.hopeless}")
    if _outcome(evidence) or code not in _NOT_STARTED:
        return None
    why = cause.text if cause else f"exit status {code}"
    return Verdict("fatal", f"{why}: another start would end like this one")


def _failed(evidence: Evidence) -> Verdict:
    why, outcome, cause = _said(evidence), evidence.outcome, evidence.cause()
    echo = cause is not None and not cause.echo and is_echo(why)
    if outcome is None or outcome.status in ("", "running") or not why or echo:
        unknown = "killed" if outcome and outcome.status == "running" else "exit status {}"
        why = cause.text if cause else unknown.format(_code(evidence))
    if _outcome(evidence) in ("", "preempted", "running"):
        killed_on = evidence.torchrun_was_killed()
        if killed_on is not None:
            why = f"torchrun was killed on {killed_on} (exit status {_status(evidence)})"
    return _twice(evidence.failed_before()) or Verdict("retryable", why + evidence.cost())


def _twice(failure: Optional[Failure]) -> Optional[Verdict]:
    if failure is None:
        return None
    why = in_words(failure) + "; another start would end like these two"
    return Verdict("fatal", why)


RULES: Iterable[Callable[[Evidence], Optional[Verdict]]] = (
    _done,
    _superseded,
    _repeated,
    _no_progress,
    _fatal,
    _disk_full,
    _stopped,
    _out_of_memory,
    _preempted,
    _could_not_start,
    _hopeless,
    _failed,
)


def judge(evidence: Evidence) -> Verdict:
    """Return how an attempt ended."""
    verdicts = (rule(evidence) for rule in RULES)
    return next(verdict for verdict in verdicts if verdict is not None)


# ---- What people read

_IN_WORDS = {
    "retryable": "failed",
    "node_failure": "node failure",
    "no_progress": "no progress",
    "gave_up": "gave up",
}


def sentence(reason: str) -> str:
    """Return a line of a file `reason` as `status`, `logs`, reports and notifications show it.

    >>> sentence("retryable: rank 1 on n2: killed by SIGKILL; queued again")
    'failed: rank 1 on n2: killed by SIGKILL; queued again'
    """
    word, colon, rest = reason.partition(": ")
    return _IN_WORDS.get(word, word) + colon + rest


def reason_line(verdict: Verdict, decision: str) -> str:
    """Return the line of a file `reason`: how an attempt ended, and what follows."""
    why = f"{verdict.why}; " if verdict.why else ""
    return f"{verdict.word}: {why}{decision}"


# ---- What follows


class Made(NamedTuple):
    """The result of an attempt."""

    word: str
    """The status word of its reason; empty while it has none."""

    step: Optional[int] = None
    """Its last step, if the script records steps."""


class Limits(NamedTuple):
    """How often a run may start again (`retries` of a job file)."""

    requeue: int = 0
    """Failures after which another attempt follows."""

    no_progress: int = 3
    """Attempts in a row without a new step that end the run."""

    preemptions: Optional[int] = None
    """Preemptions, requeues and time limits after which another attempt follows; None: any."""

    by_others: bool = False
    """Whether the next job of a chain continues the run, so failures are not limited."""


class Decision(NamedTuple):
    """The decision after an attempt."""

    word: str
    text: str
    again: bool


class Counts(NamedTuple):
    """The totals of the attempts since a submission."""

    failures: int
    preemptions: int
    idle: int
    """Attempts in a row, up to the last one, without a new step."""
    best: int
    """The highest step of any attempt."""


def count(attempts: Iterable[Made], best: int = 0) -> Counts:
    """Count attempts, in their order; `best` is the last step before them.

    A time limit counts as a failure only if the attempt has no known step. Attempts that were
    preempted before they began do not count as attempts without progress.
    """
    failures = preemptions = idle = 0
    for word, step in attempts:
        failures += word in ("retryable", "node_failure", "lost")
        failures += word == "walltime" and step is None
        preemptions += word in ("preempted", "requeued")
        preemptions += word == "walltime" and step is not None
        if step is not None and step > best:
            best, idle = step, 0
        elif step is not None:
            idle += 1
    return Counts(failures, preemptions, idle, best)


def limit_reached(counts: Counts, limits: Limits, word: str = "") -> Optional[Decision]:
    """Return the decision to end a run that has reached a limit; None below all limits."""
    if counts.idle >= limits.no_progress:
        text = "no step beyond {} in {} attempts (retries.no_progress)"
        return Decision("no_progress", text.format(counts.best, counts.idle), again=False)
    if not limits.by_others and counts.failures > limits.requeue:
        return Decision(word or "gave_up", f"gave up after {limits.requeue} requeues", again=False)
    if limits.preemptions is not None and counts.preemptions > limits.preemptions:
        text = f"gave up after {limits.preemptions} preemptions (retries.preemptions)"
        return Decision(word or "gave_up", text, again=False)
    return None


_FINAL = frozenset(("no_progress", "fatal", "cancelled", "fenced"))


def decide(
    word: str, counts: Counts, limits: Limits, *, again: str, queued: bool = False
) -> Decision:
    """Return what follows an attempt that ended with this status word.

    `counts`: all attempts since the submission, including this one. `again`: the wording for
    another attempt that follows. `queued`: the scheduler itself has queued the job again.
    """
    if word == "done":
        return Decision(word, "all steps made", again=False)
    if word in _FINAL:
        return Decision(word, "not " + again, again=False)
    if not limits.requeue:
        text = f"not {again} (retries.requeue is 0)"
        if limits.by_others:
            text = "the next job of the chain goes on"
        return Decision(word, text, again=False)
    reached = None if queued else limit_reached(counts, limits, word)
    return reached or Decision(word, again, again=True)
