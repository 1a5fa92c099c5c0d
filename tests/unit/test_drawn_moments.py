"""Faults in the first seconds of runs: the draws, and that the checks bite."""

import pytest

from tests.system.chaos.first_seconds import HITS, Hit, Moment, Played, draw, right_words
from tests.system.chaos.play import Broken
from tests.system.chaos.starts import PHASES


def test_each_fault_is_drawn_once_in_each_phase_before_any_comes_again() -> None:
    pairs = [(hit.what, phase) for hit in HITS for phase in hit.phases]
    drawn = [draw(7, number) for number in range(len(pairs))]
    assert sorted((m.blows[0].hit.what, m.blows[0].phase) for m in drawn) == sorted(pairs)
    assert {m.blows[0].hit.what for m in drawn[: len(HITS)]} == {hit.what for hit in HITS}
    assert {blow.phase for m in drawn for blow in m.blows} == set(PHASES)
    assert str(drawn[3]) == str(draw(7, 3)) != str(draw(8, 3))


def of(what: str) -> Hit:
    (found,) = (hit for hit in HITS if hit.what == what)
    return found


@pytest.mark.parametrize(
    ("what", "reasons", "status"),
    [
        ("requeue", ["preempted: Slurm has taken the nodes; queued again"], ""),
        ("preemption", ["requeued: by an operator; queued again"], ""),
        ("TERM to the steps", ["retryable: exit status 1; queued again"], ""),
        ("TERM to the script", ["cancelled: by scancel; not queued again"], ""),
        ("cable cut", ["done: all steps made"], ""),
        ("slurmd killed", ["lost: so", "node_failure: so"], ""),
        ("preemption, grace", [""], ""),
        ("scancel", ["terminated: by Slurm; killed soon after"], "cancelled: by scancel"),
        ("scancel", ["cancelled: by scancel"], ""),
        ("toolkit cancel", ["cancelled: by scancel"], "cancelled: by scancel"),
    ],
)
def test_the_judge_sees_a_wrong_reason(what: str, reasons: list[str], status: str) -> None:
    hit, moment = of(what), Moment(number=0, blows=(), nodes=1, records=True, holds=False)
    blow = draw(7, 0).blows[0].of(hit)
    played = Played(moment=moment, struck=[(blow, {0, 1}, "script")], reasons=reasons)
    if not hit.ends:
        played.reasons.append("done: all steps made")
    with pytest.raises(Broken):
        right_words(played, hit.ends, status)
