"""`make bench-goodput`: its schedule, the choice of rounds, and the summary."""

import itertools
import json
from pathlib import Path

from benchmarks.goodput import (
    EVERY,
    LEAD_S,
    PACE_S,
    SCHEDULE,
    STEPS,
    TIME_LEFT_S,
    Record,
    Round,
    median_round,
    missed,
    newest_step,
    schedule_table,
    summary,
)
from tests.conftest import ROOT
from toolkit.runs.views.goodput import BUCKETS, Goodput, Span


def played(productive_s: float, elapsed_s: float, *, again: int = 0, by_hand: int = 0) -> Round:
    seconds = dict.fromkeys(BUCKETS, 0.0)
    seconds |= {"productive": productive_s, "queue": 2.0}
    seconds |= {"requeue": elapsed_s - productive_s - 2}
    goodput = Goodput(
        elapsed_s=elapsed_s,
        seconds=seconds,
        steps=STEPS,
        steps_again=again,
        starts=3,
        ranks=2,
        rank_s=None,
        productive_rank_s=None,
        spans=(Span(0, "queue", 0.0, 2.0),),
    )
    return Round(goodput, by_hand, ())


def test_the_page_has_the_schedule() -> None:
    assert schedule_table() in (ROOT / "docs/reference/goodput.md").read_text()


def test_no_run_is_over_before_the_last_fault_however_late_slurm_warns() -> None:
    last_s = SCHEDULE[-1].at_s + EVERY * PACE_S
    assert last_s + TIME_LEFT_S - LEAD_S <= STEPS * PACE_S
    for fault, following in itertools.pairwise(SCHEDULE):
        assert fault.at_s + fault.heals_after_s < following.at_s


def test_the_round_with_the_median_goodput_is_shown_whole() -> None:
    low, middle, high = played(100, 400), played(100, 300), played(100, 200)
    assert median_round([high, low, middle]) is middle
    assert median_round([high, low]) is low


def test_the_summary_has_a_line_for_each_contender_and_names_what_is_missed() -> None:
    shown = {"toolkit": played(180, 240, again=50), "plain": played(200, 250, again=150, by_hand=1)}
    assert [" ".join(line.split()) for line in summary(shown)] == [
        "goodput ETTR Google NVIDIA pace elapsed again starts by hand",
        "toolkit 75.0% 75.0% 75.6% 100.0% 73.3% 240.0 s 50 3 0",
        "plain 80.0% 80.0% 80.6% 100.0% 70.4% 250.0 s 150 3 1",
        "missed: goodput 75.0%, plain 80.0%",
    ]
    assert list(missed({"toolkit": played(180, 240), "plain": played(160, 230)})) == [
        "missed: 240.0 s, plain 230.0 s"
    ]
    assert list(missed({"plain": played(160, 230)})) == []


def test_the_newest_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    assert newest_step(tmp_path) is None
    rows = [json.dumps({"time": 10.0 + step, "step": step}) for step in range(1, 501)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + '\n{"time": 999')
    assert newest_step(tmp_path) == Record(step=500, time=510.0)
