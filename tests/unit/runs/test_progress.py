"""How far a run is, by its last records."""

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.runs.evidence import progress
from toolkit.runs.evidence.progress import ProgressReader, progress_of

NOW = 1_000_000.0


def write(folder: Path, *steps: tuple[int, float], steps_in_all: Any = 100, **more: Any) -> None:
    """Write steps, each with its time, seconds before `NOW`."""
    lines = [{"time": NOW - ago, "step": step, "loss": 1 / step, **more} for step, ago in steps]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    outcome = {"status": "running", "steps": steps_in_all}
    (folder / "outcome.json").write_text(json.dumps(outcome))


def test_what_is_left_follows_from_the_speed_of_the_last_steps(tmp_path: Path) -> None:
    write(tmp_path, *((step, 42 - 2 * step) for step in range(1, 21)))
    found = progress_of(tmp_path, now=NOW)
    assert found is not None
    assert (found.step, found.steps_planned, found.step_s, found.left_s) == (20, 100, 2, 160)
    assert found.spread_s == 0
    assert str(found) == "step 20/100 (20%), loss 0.05, 2 s per step, 2 min 40 s left"


def test_a_speed_that_varies_gives_a_spread(tmp_path: Path) -> None:
    ago, steps = 0.0, []
    for step in range(40, 0, -1):
        steps.append((step, ago))
        ago += 3 if step > 20 else 1
    write(tmp_path, *reversed(steps))
    found = progress_of(tmp_path, now=NOW)
    assert found is not None and found.spread_s is not None
    assert found.left_s == pytest.approx(60 * (20 * 3 + 19) / 39)
    assert found.spread_s == pytest.approx(60, rel=0.1), "half of 3 s less 1 s, for 60 steps"
    assert "left (± 1 min" in str(found)


def test_a_new_start_has_its_own_speed_and_is_named(tmp_path: Path) -> None:
    write(tmp_path, (1, 1000), (2, 900))
    write(tmp_path, (3, 10), attempt=2, restart=1)
    found = progress_of(tmp_path, now=NOW)
    assert found is not None and found.step_s is None and found.left_s is None
    assert str(found) == "step 3/100 (3%), loss 0.3333, attempt 2, restart 1"


@pytest.mark.parametrize("first", [29, 30])
def test_a_start_of_the_same_number_has_its_own_speed_too(tmp_path: Path, first: int) -> None:
    """Torchrun counts no restart where its members change."""
    write(tmp_path, *((step, 900 - step) for step in range(20, 31)))
    write(tmp_path, *((step, 3 * (40 - step)) for step in range(first, 41)))
    found = progress_of(tmp_path, now=NOW)
    assert found is not None
    assert (found.step, found.step_s, found.spread_s) == (40, 3, 0)


def test_silence_is_told_after_a_minute_and_ten_steps(tmp_path: Path) -> None:
    write(tmp_path, (1, 140), (2, 130))
    for later, told in ((0, True), (-75, False)):
        found = progress_of(tmp_path, now=NOW + later)
        assert found is not None and found.is_silent is told
        assert ("no step for 2 min 10 s" in str(found)) is told


def test_without_a_number_of_steps_nothing_is_said_of_the_rest(tmp_path: Path) -> None:
    write(tmp_path, (1, 2), (2, 1), steps_in_all=None)
    found = progress_of(tmp_path, now=NOW)
    assert found is not None and str(found) == "step 2, loss 0.5, 1 s per step"


@pytest.mark.parametrize(
    "text", ["", "{", "[]\n7\n", '{"step": 1}\n', '{"step": "x", "time": 1}\n', "\x00\xff"]
)
def test_what_is_no_record_is_no_progress(text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    assert progress_of(tmp_path) is None
    assert progress_of(tmp_path / "nowhere") is None


def test_a_clock_that_was_set_back_gives_no_speed(tmp_path: Path) -> None:
    write(tmp_path, (1, 5), (2, 50))
    found = progress_of(tmp_path, now=NOW - 60)
    assert found is not None and (found.step_s, found.left_s, found.silent_s) == (None, None, 0)


def test_a_reader_goes_on_where_it_was_and_says_the_same_as_a_new_one(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path)
    assert reader.progress(now=NOW) is None
    write(tmp_path, *((step, 42 - step) for step in range(1, 21)))
    assert reader.progress(now=NOW) == progress_of(tmp_path, now=NOW)
    write(tmp_path, *((step, 22 - step) for step in range(15, 22)), restart=1)  # made again
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 22, "ti')
    found = reader.progress(now=NOW)
    assert found == progress_of(tmp_path, now=NOW)
    assert found is not None and (found.step, found.restart) == (21, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'me": {NOW}, "restart": 1}}\n')
    found = reader.progress(now=NOW)
    assert found is not None and (found.step, found.step_s) == (22, 1.0)


def test_a_reader_begins_anew_after_much_output_or_a_file_that_shrank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LAST_BYTES", 1000)
    reader = ProgressReader(tmp_path)
    write(tmp_path, (1, 500), (2, 499))
    reader.progress(now=NOW)
    write(tmp_path, *((step, 500 - step) for step in range(3, 400)))
    found = reader.progress(now=NOW)
    assert found is not None and (found.step, found.step_s) == (399, 1.0)
    (tmp_path / "metrics.jsonl").write_text("")
    write(tmp_path, (1, 9), (2, 7))
    found = reader.progress(now=NOW)
    assert found is not None and (found.step, found.step_s) == (2, 2.0)
    (tmp_path / "metrics.jsonl").unlink()
    assert reader.progress(now=NOW) is None


def test_the_number_of_steps_may_stand_in_the_records(tmp_path: Path) -> None:
    write(tmp_path, (1, 9), (2, 7), steps_in_all=None, steps=12)
    found = progress_of(tmp_path, now=NOW)
    assert found is not None and (found.steps_planned, found.left_s) == (12, 20.0)


def test_rates_that_the_newest_records_have_are_shown_as_their_median(tmp_path: Path) -> None:
    write(tmp_path, (1, 900), samples_per_s=9e9, tokens_per_s=1.0)
    write(tmp_path, (2, 30), (3, 20), (4, 10), samples_per_s=4096.4, mfu=0.4126, restart=1)
    write(tmp_path, (5, 0), samples_per_s=1.5e6, mfu=1e300, restart=1)
    found = progress_of(tmp_path, now=NOW)
    assert found is not None
    assert (found.samples_per_s, found.tokens_per_s, found.mfu) == (4096.4, None, 0.4126)
    assert str(found) == (
        "step 5/100 (5%), loss 0.2, 10 s per step, 4.1k samples/s, MFU 41.3%, "
        "15 min 50 s left, attempt 0, restart 1"
    )
    write(tmp_path, (6, 0), samples_per_s=-1, tokens_per_s=1.25e6, restart=2)
    found = progress_of(tmp_path, now=NOW)
    assert found is not None and found.samples_per_s is None
    assert "1.25M tokens/s" in str(found)
