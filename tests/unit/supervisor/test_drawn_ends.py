"""Drawn attempts end as the scripts of version 0.2 ended them, by their policy in sh."""

import random

import pytest

from tests.conftest import ROOT
from tests.unit.supervisor.drawn_evidence import Given
from toolkit.supervisor.evidence.first_error import Failure
from toolkit.supervisor.evidence.outcome import Outcome
from toolkit.supervisor.policy import Limits, Made, Verdict, count, decide, judge

FAILURES = [
    Failure(kind, step, message)
    for kind in ("error", "fault", "bare", "unsure")
    for step in ("7", "7+", "-")
    for message in ("ValueError: /a 1", "ValueError: /b 2", "signal 9")
]
VARIANTS = [
    (requeue, preemptions, chain)
    for requeue in (0, 2)
    for preemptions in (None, 1)
    for chain in (False, True)
]

RECORDED = (ROOT / "tests/data/supervisor/ends.txt").read_text().splitlines()
"""Of each attempt: how it ended, and what followed."""

OF_EACH = len(RECORDED) // 2 // len(VARIANTS)


def draw(dice: random.Random, disk: str) -> tuple[Given, list[Made]]:
    """Return an attempt that has ended, and the attempts before it."""
    number = dice.choice([0, 0, 1, 2, 3])
    given = Given(status=dice.choice([0, 1, 2, 75, 126, 127, 137]))
    if dice.random() < 0.7:
        status = dice.choice(["running", "done", "fatal", "retryable", "preempted"])
        rank = dice.choice(["", "0"])
        reason = dice.choice(['"it" \\ was', "bad flag"])
        given.outcome = Outcome(status, str(number), "7", rank, reason)

    def rarely(value: str) -> str:
        return value if dice.random() < 0.12 else ""

    given.stopping = dice.choice(["", "", "walltime"])
    given.disk = rarely(disk)
    given.began = dice.random() < 0.5
    over = rarely("attempt 9 has taken over")
    given.taken_over = Verdict("fenced", over) if over else None
    if dice.random() < 0.1:
        given.in_job = dice.choice(FAILURES)
    given.workers = dice.choice([[], [], [1], [2, 1], [93]])
    given.idle = dice.random() < 0.05
    word = rarely(dice.choice(["node_failure", "preempted", "cancelled", "walltime"]))
    given.stopper = Verdict(word, "by that") if word else None
    memory = rarely(dice.choice(["yes", "yesnode 1"]))
    given.memory = memory.removeprefix("yes") if memory else None
    given.killed_on = rarely("node2") or None
    obstacle = rarely(dice.choice(["fatal", "retryable"]))
    given.obstacle = Verdict(obstacle, "obstacle") if obstacle else None
    given.error = dice.choice([None, *FAILURES])
    given.earlier = dice.choice([None, given.error, *FAILURES[:4]])
    words = ["retryable", "lost", "node_failure", "preempted", "walltime"]
    before = [Made(dice.choice(words), dice.choice([None, 3, 7, 9])) for _ in range(number)]
    return given, before


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=map(str, VARIANTS))
def test_each_drawn_attempt_ends_as_recorded(variant: int) -> None:
    requeue, preemptions, chain = VARIANTS[variant]
    limits = Limits(requeue, preemptions=preemptions, by_others=chain and not requeue)
    for number in range(OF_EACH):
        given, before = draw(random.Random(f"{variant}/{number}"), f"RUNS/{number}")
        verdict = judge(given)
        step = given.outcome.step if given.outcome else ""
        attempts = [*before, Made(verdict.word, int(step) if step else None)]
        follows = decide(verdict.word, count(attempts), limits, again="queued again")
        at = 2 * (variant * OF_EACH + number)
        assert [
            f"{verdict.word}: {verdict.why}",
            f"{follows.word}: {follows.text}" + "!" * follows.again,
        ] == RECORDED[at : at + 2], (number, given)
