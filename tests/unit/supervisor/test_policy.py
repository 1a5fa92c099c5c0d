"""A test for each row of docs/reference/run-directory.md, "How an attempt ended"."""

from typing import Any

import pytest

from tests.unit.supervisor.drawn_evidence import Given
from toolkit.supervisor.evidence.first_error import Failure
from toolkit.supervisor.evidence.outcome import Outcome
from toolkit.supervisor.policy import Counts, Limits, Made, Verdict, count, decide, judge

FAULT = Failure("fault", "7", "ValueError: bad")
TWICE = "the same failure twice at step 7: ValueError: bad; another start would end like these two"
LOST = Verdict("node_failure", "down: n2")


def outcome(status: str, reason: str = "", rank: str = "", step: str = "7") -> Outcome:
    return Outcome(status=status, attempt="0", step=step, rank=rank, reason=reason)


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"status": 0}, "done: "),
        ({"status": 0, "outcome": outcome("running")}, "done: "),
        ({"outcome": outcome("done"), "stopper": LOST}, "done: "),
        ({"status": 0, "outcome": outcome("preempted")}, "preempted: "),
        ({"status": 0, "stopping": "walltime", "began": False}, "retryable: exit status 0"),
        ({"status": 0, "stopping": "walltime"}, "done: "),
        ({"taken_over": Verdict("fenced", "attempt 1 has taken over"), "in_job": FAULT}, "fenced"),
        ({"in_job": FAULT, "workers": [93]}, f"fatal: {TWICE}"),
        ({"workers": [93], "outcome": outcome("fatal")}, "no_progress: a worker exited with"),
        ({"workers": [93], "outcome": outcome("fatal", "x", "1")}, "no_progress: a worker exited "
         "with status 93 (rank 1: x)"),
        ({"idle": True}, "no_progress: "),
        ({"outcome": outcome("fatal", "bad flag"), "disk": "/r"}, "fatal: bad flag"),
        ({"disk": "/r", "stopper": LOST}, "fatal: no space is left for /r"),
        ({"disk": "/r", "outcome": outcome("preempted")}, "preempted: "),
        ({"stopper": LOST, "memory": "n1"}, "node_failure: down: n2"),
        ({"stopper": LOST, "error": FAULT}, "node_failure: down: n2; meanwhile a rank has raised "
         "ValueError: bad"),
        ({"stopper": LOST, "error": FAULT._replace(kind="bare")}, "node_failure: down: n2"),
        ({"memory": "n1", "outcome": outcome("preempted")}, "fatal: out of memory: n1"),
        ({"memory": ""}, "fatal: out of memory: the kernel killed a process"),
        ({"outcome": outcome("preempted", "stopped by SIGTERM")}, "preempted: stopped by SIGTERM"),
        ({"outcome": outcome("preempted"), "killed_on": "n1", "status": 137},
         "retryable: torchrun was killed on n1 (exit status 137)"),
        ({"obstacle": Verdict("retryable", "no image"), "status": 127}, "retryable: no image"),
        ({"workers": [2]}, "fatal: exit status 2: another start would end like this one"),
        ({"status": 127}, "fatal: exit status 127: another start would end like this one"),
        ({"status": 127, "outcome": outcome("retryable", "x")}, "retryable: x"),
        ({"error": FAULT, "earlier": FAULT}, f"fatal: {TWICE}"),
        ({"error": FAULT, "earlier": FAULT._replace(message="KeyError")}, "retryable: exit status"),
        ({"outcome": outcome("running")}, "retryable: killed"),
        ({"outcome": outcome("retryable", "lost", "3")}, "retryable: rank 3: lost"),
    ],
)  # fmt: skip
def test_the_first_rule_with_an_answer_decides(given: dict[str, Any], verdict: str) -> None:
    assert ": ".join(judge(Given(**given))).startswith(verdict)


def test_nothing_is_asked_for_that_is_not_needed() -> None:
    """Each question may cost a call of the scheduler."""
    asked = []

    class Curious(Given):
        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattribute__(name)

    judge(Curious(workers=[93]))
    assert "exited_with" in asked
    assert not {"stopped", "raised", "out_of_memory", "failed_before"} & set(asked)


@pytest.mark.parametrize(
    ("attempts", "counts"),
    [
        ([], Counts(0, 0, 0, 0)),
        ([("retryable", 5), ("node_failure", 5), ("lost", None)], Counts(3, 0, 1, 5)),
        ([("walltime", None), ("walltime", 3)], Counts(1, 1, 0, 3)),
        ([("preempted", None), ("requeued", 2), ("preempted", 2)], Counts(0, 3, 1, 2)),
        ([("fatal", 9), ("cancelled", 12), ("retryable", 12)], Counts(1, 0, 1, 12)),
    ],
)
def test_attempts_are_counted_by_their_words(
    attempts: list[tuple[str, int | None]], counts: Counts
) -> None:
    assert count([Made(*attempt) for attempt in attempts]) == counts


FAILED, TAKEN = Made("retryable", 5), Made("preempted", 5)


@pytest.mark.parametrize(
    ("attempts", "limits", "follows"),
    [
        ([Made("done")], Limits(2), "done: all steps made"),
        ([Made("fatal")], Limits(2), "fatal: not queued again"),
        ([Made("cancelled")], Limits(2), "cancelled: not queued again"),
        ([FAILED], Limits(0), "retryable: not queued again (retries.requeue is 0)"),
        ([FAILED], Limits(0, by_others=True), "retryable: the next job of the chain goes on"),
        ([FAILED], Limits(1), "retryable: queued again!"),
        ([FAILED, Made("lost", 6)], Limits(1), "lost: gave up after 1 requeues"),
        ([FAILED] * 4, Limits(9), "no_progress: no step beyond 5 in 3 attempts "
         "(retries.no_progress)"),
        ([TAKEN], Limits(1, preemptions=0), "preempted: gave up after 0 preemptions "
         "(retries.preemptions)"),
        ([TAKEN, TAKEN], Limits(1), "preempted: queued again!"),
    ],
)  # fmt: skip
def test_what_follows(attempts: list[Made], limits: Limits, follows: str) -> None:
    decision = decide(attempts[-1].word, count(attempts), limits, again="queued again")
    assert f"{decision.word}: {decision.text}" + "!" * decision.again == follows


def test_a_job_that_is_queued_again_already_has_no_limit() -> None:
    decision = decide(
        "retryable", count([FAILED] * 9), Limits(1), again="queued again", queued=True
    )
    assert decision.again
