"""Goodput: where the time of a run went, by what its starts have recorded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT
from tests.support.told_run import run_at
from toolkit.cli.summary import goodput_lines
from toolkit.errors import RunLost
from toolkit.runs.evidence.progress import progress_of
from toolkit.runs.records.scheduler_times import Scheduled, scheduled_in
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.views.goodput import BUCKETS, Goodput, Price, goodput_of

SUBMITTED = 1_000_000.0
PHASES = {"start": 4.0, "imports": 3.0, "process_group": 1.0, "setup": 2.0, "restore": 0.0}


class Recorded:
    """A run directory in the making: what ranks have recorded, in seconds after the submission."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempt = self.restart = 0
        self.times: list[Scheduled] = []

    def scheduled(self, queued: float, eligible: float, started: float) -> None:
        moments = (SUBMITTED + at for at in (queued, eligible, started))
        self.times.append(Scheduled(*moments))

    def _append(self, name: str, at: float, **row: Any) -> None:
        head = {"version": 1, "time": SUBMITTED + at}
        numbers = {"attempt": self.attempt, "restart": self.restart}
        with (self.folder / name).open("a") as file:
            file.write(json.dumps({**head, **numbers, **row}) + "\n")

    def event(self, event: str, at: float, **row: Any) -> None:
        self._append("events.jsonl", at, event=event, **row)

    def start(self, began: float, *, phases: dict[str, float] = PHASES) -> float:
        """Record a start of four ranks; return when it is ready."""
        ready = began + sum(phases.values())
        self.event("start", ready - 0.5, step=0, global_batch=32, world_size=4)
        self.event("ready", ready, step=0, began=SUBMITTED + began, phases=phases)
        return ready

    def steps(self, first: int, last: int, at: float, *, each: float = 1.0) -> float:
        """Record steps that follow each other; return when the last one ends."""
        for step in range(first, last + 1):
            at += each
            self._append("metrics.jsonl", at, step=step, loss=1.0, samples_per_s=32 / each)
        return at

    def goodput(self, until: float | None = None) -> Goodput:
        end = None if until is None else SUBMITTED + until
        return goodput_of(self.folder, submitted=SUBMITTED, until=end, times=self.times)


@pytest.fixture
def run(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def test_a_thinned_record_stands_for_the_steps_before_it(run: Recorded) -> None:
    at = run.steps(1, 10, run.start(0.0))
    run._append("metrics.jsonl", at + 20, step=30, loss=1.0, samples_per_s=32.0, count=20)
    run.event("epoch", at + 20, step=30, seconds=0.0)
    goodput = run.goodput()
    assert goodput.steps == 30
    assert goodput.as_json()["steps_made"] == goodput.as_json()["steps"] == 30
    assert goodput.seconds["productive"] == pytest.approx(30)
    run.restart = 1
    run.steps(21, 22, run.start(at + 30))
    found = run.goodput()
    assert (found.step, found.steps, found.steps_again) == (22, 22, 20)


@pytest.mark.parametrize(("first", "steps"), [(127, 2540), (2667, 2414)])
def test_steps_without_a_record_count(run: Recorded, first: int, steps: int) -> None:
    """A script that records each 127th step only, from the first one on or from a later one."""
    at = run.start(0.0)
    for number in range(20):
        run._append("metrics.jsonl", at + 9 * number, step=first + 127 * number, loss=1.0)
    progress = progress_of(run.folder)
    goodput = run.goodput()
    assert progress is not None and goodput.step == progress.step == first + 127 * 19
    assert goodput.steps == steps
    (line, *_) = goodput_lines("run", goodput)
    assert line.endswith(f"(step {goodput.step}, 1 start)")


def test_a_run_without_records_says_how_steps_are_found(tmp_path: Path) -> None:
    (line,) = goodput_lines("run", goodput_of(tmp_path, submitted=1e9, until=1e9))
    assert line.startswith(
        "run: nothing is recorded; `log_pattern` in the job file finds the steps"
    )


def spent(goodput: Goodput) -> dict[str, float]:
    """Return the buckets that have any time, to the millisecond."""
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.elapsed_s)
    assert [*goodput.seconds] == [*BUCKETS]
    return {name: round(value, 3) for name, value in goodput.seconds.items() if abs(value) > 5e-4}


def test_a_run_without_faults(run: Recorded) -> None:
    at = run.start(30)
    at = run.steps(1, 60, at)
    at += 1.5
    run.event("checkpoint", at, step=60, stall_seconds=1.5, seconds=9)
    at += 5
    run.event("epoch", at, step=60, seconds=5)
    at = run.steps(61, 100, at)
    run.event("done", at, step=100)
    found = run.goodput(at + 2)
    assert spent(found) == {
        "productive": 100,
        "queue": 30,
        "start": 4,
        "imports": 3,
        "process group": 1,
        "setup": 2,
        "checkpoint": 1.5,
        "evaluation": 5,
        "other": 2,
    }
    assert (found.steps, found.steps_again, found.starts, found.ranks) == (100, 0, 1, 4)
    assert found.share == pytest.approx(100 / 148.5)
    assert found.definitions == {
        "goodput (Google)": pytest.approx(100 / 118.5),
        "ETTR (Meta)": pytest.approx(100 / 148.5),
        "uptime (NVIDIA)": pytest.approx(1 - 1.5 / 118.5),
    }
    figures = found.as_json()
    assert figures["rank_hours_productive"] == pytest.approx(4 * 100 / 3600)
    # Until its last record: the rest belongs to nobody.
    assert figures["rank_hours"] == pytest.approx(4 * 116.5 / 3600)


def test_the_schedulers_times_divide_what_lies_before_an_attempt(run: Recorded) -> None:
    run.scheduled(1, 11, 31)
    at = run.steps(1, 10, run.start(35))
    run.attempt = 1
    # The nodes are lost: Slurm notices it after 20 s, and lets the job start 6 s later.
    run.scheduled(at + 20, at + 26, at + 36)
    run.event("done", run.steps(11, 20, run.start(at + 40)), step=20)
    found = run.goodput()
    times = spent(found)
    # Until Slurm had the job, 1 s after its submission began, it waited for nobody's nodes.
    assert (times["held"], times["queue"], times["allocation"]) == (10 + 6, 1 + 20 + 10, 4 + 4)
    assert times["requeue"] == 20
    after_queue = found.elapsed_s - 35
    assert found.definitions["goodput (Google)"] == pytest.approx(20 / after_queue)
    later = 20 + 20 + 10  # the second start is downtime, and all before it
    assert found.definitions["uptime (NVIDIA)"] == pytest.approx(1 - later / after_queue)
    held = found.elapsed_s - 31 - 36  # the nodes are the run's from their allocation on
    assert found.rank_s == pytest.approx(4 * held)


def test_times_of_the_scheduler_that_cannot_be_are_cut(run: Recorded) -> None:
    run.scheduled(100, 50, 25)  # in no order, and partly after the attempt's beginning
    run.scheduled(3, 3, 3000)  # of an attempt that has recorded nothing
    run.event("done", run.steps(1, 10, run.start(30)), step=10)
    assert spent(run.goodput())["queue"] == 30
    run.times.clear()
    assert spent(run.goodput())["queue"] == 30


def test_a_restart_in_the_job_waits_for_no_scheduler(run: Recorded) -> None:
    run.scheduled(0, 0, 5)
    at = run.steps(1, 10, run.start(5))
    run.restart = 1
    run.event("done", run.steps(11, 20, run.start(at + 7)), step=20)
    times = spent(run.goodput())
    assert (times["queue"], times["restart"]) == (5, 7)


SAID = (
    "JobId=12 JobName=digits Requeue=1 Restarts=0 BatchFlag=1 RunTime=00:00:01 SubmitTime={} "
    "EligibleTime={} AccrueTime=3 StartTime={} EndTime=99 Deadline=N/A NodeList=node[1-2]\n"
)
"""As `scontrol -o show job` of Slurm 22.05 and 26.05 has it."""


@pytest.mark.parametrize(
    ("text", "times"),
    [
        (SAID.format(7, 8, 9), [Scheduled(7, 8, 9)]),
        (SAID.format(7, "N/A", 9), []),
        (SAID.format(7, 8, "2026-11-27T09:00:00"), []),
        (SAID.format(7, 8, "9" * 400), []),
        ("slurm_load_jobs error: Unable to contact slurm controller\n", []),
        ("", []),
    ],
)
def test_the_times_that_a_script_has_noted(
    tmp_path: Path, text: str, times: list[Scheduled]
) -> None:
    logs = tmp_path / "logs/attempt-0"
    logs.mkdir(parents=True)
    (logs / "scheduled").write_text(text)
    assert scheduled_in(tmp_path) == times


def test_steps_after_the_last_checkpoint_are_lost_and_gaps_have_names(run: Recorded) -> None:
    at = run.start(0)
    at = run.steps(1, 25, at)
    run.event("error", at + 20, step=25)  # a rank hung
    run.restart = 1
    began = at + 20 + 6
    at = run.start(began, phases={"imports": 3.0, "restore": 1.0})
    at = run.steps(21, 50, at)  # from the checkpoint of step 20
    run.attempt, run.restart = 1, 0
    at = run.start(at + 90)
    at = run.steps(41, 60, at)
    found = run.goodput()
    assert spent(found) == {
        "productive": 60,
        "lost work": 5 + 10,
        "stall": 20,
        "restart": 6,
        "requeue": 90,
        "start": 8,
        "imports": 9,
        "process group": 2,
        "setup": 4,
        "restore": 1,
    }
    assert (found.steps, found.steps_again, found.starts) == (60, 15, 3)
    down = 15 + 20 + 6 + 90 + (3 + 1) + 10
    assert found.definitions["uptime (NVIDIA)"] == pytest.approx(1 - down / found.elapsed_s)


def test_hours_are_those_of_the_ranks_that_each_start_had(run: Recorded) -> None:
    """An elastic run goes on with fewer, and a requeued one holds no nodes meanwhile."""
    at = run.steps(1, 10, run.start(50, phases={}))
    run.restart = 1
    run.event("start", at + 5, step=0, global_batch=32, world_size=2)
    at = run.steps(11, 20, at + 5)
    run.attempt, run.restart = 1, 0
    run.event("start", at + 100, step=0, global_batch=32, world_size=8)
    run.steps(21, 30, at + 100)
    figures = run.goodput().as_json()
    assert figures["rank_hours_productive"] == pytest.approx((4 + 2 + 8) * 10 / 3600)
    assert figures["rank_hours"] == pytest.approx((4 * 10 + 2 * (5 + 10) + 8 * 10) / 3600)


def test_a_price_makes_money_of_hours(run: Recorded) -> None:
    run.steps(1, 1800, run.start(50, phases={}))
    told = run_at(run.folder)
    told.record = replace(
        told.record,
        profile={"price": {"rank_hour": 2.5, "currency": "EUR"}},
        created=SUBMITTED,
    )
    told.told = RunStatus(state=RunState.SUCCEEDED)
    last = list(goodput_lines("run", told.goodput()))[-1]
    assert last == "  5.00 EUR for 2 rank hours; 5.00 EUR for steps that count"
    assert told.goodput().as_json()["price"] == {"rank_hour": 2.5, "currency": "EUR"}
    assert "<dt>cost</dt><dd>5.00 EUR</dd>" in told.report().html


@pytest.mark.parametrize(
    "price",
    [
        *(None, 3, {}),
        {"rank_hour": "2", "currency": "EUR"},
        {"rank_hour": -1, "currency": "EUR"},
        {"rank_hour": 1, "currency": 7},
        {"rank_hour": float("inf"), "currency": "EUR"},
    ],
)
def test_what_is_no_price_costs_nothing(price: Any) -> None:
    assert Price.of({"price": price}) is None


def test_starts_of_the_same_number_are_told_apart(run: Recorded) -> None:
    """Torchrun counts no restart where a pod leaves and another one joins."""
    at = run.steps(1, 40, run.start(10))
    at = run.start(at + 10)
    run.event("resume", at, step=30)
    run.steps(31, 60, at)
    found = run.goodput()
    assert (found.starts, found.steps, found.steps_again) == (2, 60, 10)
    assert (found.seconds["lost work"], found.seconds["restart"]) == (10, 10)


def test_a_restart_that_is_not_counted_is_a_restart(run: Recorded) -> None:
    """Its processes have measured from the attempt's beginning, as the first ones did."""
    at = run.steps(1, 40, run.start(10))
    run.start(10, phases={**PHASES, "start": at + 20 - 10})
    run.steps(41, 60, at + 20 + 6)
    found = run.goodput()
    assert spent(found)["restart"] == 20
    assert spent(found)["start"] == PHASES["start"]
    assert spent(found)["productive"] == 60


def test_a_lower_restart_can_follow_a_higher_one(run: Recorded) -> None:
    """Rank 0 is then on a node whose torchrun has seen fewer failures."""
    run.restart = 1
    at = run.steps(1, 40, run.start(10))
    run.restart = 0
    run.steps(31, 60, run.start(at + 10))
    found = run.goodput()
    assert (found.starts, found.steps, found.steps_again) == (2, 60, 10)
    assert found.seconds["restart"] == 10


def test_the_first_step_of_a_start_may_compile(run: Recorded) -> None:
    at = run.start(0)
    at = run.steps(1, 1, at, each=31)
    at = run.steps(2, 10, at)
    assert spent(run.goodput())["productive"] == 10
    assert spent(run.goodput())["first step"] == 30


def test_a_script_that_writes_steps_alone_has_goodput_too(run: Recorded) -> None:
    """One that knows neither phases nor rates: the time between two steps is the later one's."""
    for step in range(1, 11):
        run._append("metrics.jsonl", 50 + 2 * step, step=step, loss=1.0)
    found = run.goodput(75)
    assert spent(found) == {"productive": 18, "queue": 52, "other": 5}
    assert found.ranks is None and found.as_json()["rank_hours"] is None


def test_an_attempt_s_begin_is_in_whole_seconds_and_may_be_before_the_submission(
    run: Recorded,
) -> None:
    at = run.start(-0.7)
    run.steps(1, 3, at, each=0.1)
    found = run.goodput()
    assert found.elapsed_s == pytest.approx(at + 0.3)
    assert found.seconds["productive"] == pytest.approx(0.3)
    assert found.seconds["start"] == pytest.approx(PHASES["start"] - 0.7)


def test_the_end_is_the_outcome_s(run: Recorded) -> None:
    at = run.steps(1, 10, run.start(0))
    outcome = {"status": "done", "time": SUBMITTED + at + 7}
    (run.folder / "outcome.json").write_text(json.dumps(outcome))
    assert spent(run.goodput())["other"] == 7


def test_of_a_run_that_has_not_begun_all_is_other(run: Recorded) -> None:
    """Nothing says that it waits in a queue: it may fail before it records anything."""
    assert spent(run.goodput(60)) == {"other": 60}
    assert run.goodput().share == 0


def test_a_run_whose_directory_is_gone_has_no_goodput_and_no_metrics(tmp_path: Path) -> None:
    run = run_at(tmp_path / "gone")
    assert len(run.metrics()) == 0  # a point that waits has no directory yet
    run.told = RunStatus(state=RunState.UNKNOWN, reason="it is gone", lost=True)
    for ask in (run.goodput, run.metrics):
        with pytest.raises(RunLost, match="it is gone"):
            ask()
    assert "it is gone" in run.report().html


def test_a_clock_that_was_set_back_makes_no_time(run: Recorded) -> None:
    at = run.steps(1, 10, run.start(100))
    run.attempt = 1
    run.steps(11, 20, run.start(at - 60))
    found = run.goodput()
    assert min(found.seconds.values()) >= 0
    assert found.elapsed_s == pytest.approx(120)
    assert spent(found)["productive"] <= 20


def test_what_is_no_record_is_left_out(run: Recorded) -> None:
    at = run.steps(1, 10, run.start(0))
    before = run.goodput()
    odd = [
        "{torn",
        "[]",
        '{"time": "soon", "event": "error"}',
        '{"time": 1e400, "event": "start"}',
        json.dumps({"time": SUBMITTED + at, "event": "epoch", "seconds": "nan"}),
        json.dumps({"time": SUBMITTED + at, "event": "epoch", "seconds": -5}),
        '{"time": ' + "1" * 100_000 + "}",
        "\x00",
    ]
    with (run.folder / "events.jsonl").open("a") as file:
        file.write("\n".join(odd) + "\n")
    assert run.goodput() == before


def test_a_link_is_not_followed(run: Recorded, tmp_path: Path) -> None:
    run.steps(1, 10, run.start(0))
    (tmp_path / "elsewhere").mkdir()
    for name in ("events.jsonl", "metrics.jsonl"):
        (run.folder / name).rename(tmp_path / "elsewhere" / name)
        (run.folder / name).symlink_to(tmp_path / "elsewhere" / name)
    assert run.goodput(5).starts == 0


numbers = st.one_of(st.none(), st.integers(-5, 40), st.floats(), st.text(max_size=3))
moments = st.one_of(st.floats(SUBMITTED - 500, SUBMITTED + 500), numbers)
rows = st.fixed_dictionaries(
    {},
    optional={
        "time": moments,
        "attempt": numbers,
        "restart": numbers,
        "step": numbers,
        "event": st.sampled_from(["start", "ready", "epoch", "checkpoint", "error", "done"]),
        "began": moments,
        "phases": st.dictionaries(st.sampled_from([*PHASES, "x"]), numbers),
        "seconds": numbers,
        "stall_seconds": numbers,
        "global_batch": numbers,
        "world_size": numbers,
        "samples_per_s": numbers,
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(rows, max_size=12), metrics=st.lists(rows, max_size=12))
def test_the_buckets_of_any_run_are_never_negative_and_make_up_its_time(
    events: list[Any], metrics: list[Any], tmp_path: Path
) -> None:
    for name, lines in (("events", events), ("metrics", metrics)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    found = goodput_of(tmp_path, submitted=SUBMITTED, until=SUBMITTED + 100)
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert sum(found.seconds.values()) == pytest.approx(found.elapsed_s)
    assert 0 <= found.share <= 1
    end = 0.0
    for span in found.spans:
        assert span.begin == pytest.approx(end, abs=1e-5), "spans follow each other"
        end = span.begin + span.seconds
    assert end == pytest.approx(found.elapsed_s, abs=1e-5)
    assert all(span.start < max(found.starts, 1) for span in found.spans)
    json.dumps(found.as_json(), allow_nan=False)


def test_the_page_has_every_bucket_as_it_is_shown() -> None:
    page = (ROOT / "docs/reference/goodput.md").read_text()
    rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in BUCKETS.items())
    assert rows in page
