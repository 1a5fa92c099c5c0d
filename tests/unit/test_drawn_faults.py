"""The faults of `make chaos` and `make faults`: the table, the draws, and that the checks bite."""

import json
from pathlib import Path

import pytest

from tests.system.chaos.counted import word
from tests.system.chaos.fault_table import (
    BEGIN,
    END,
    HEAD,
    NOT_RUN,
    PAGE,
    quoted,
    row,
    rows,
    written,
)
from tests.system.chaos.faults import FAULTS
from tests.system.chaos.frame import Trial
from tests.system.chaos.play import Broken, Course, draw, last_words, told_right
from toolkit.runs.state import RunState, RunStatus


def test_the_table_of_faults_has_exactly_the_faults_of_the_data() -> None:
    page = PAGE.read_text()
    assert HEAD in page
    assert list(rows(page)) == [fault.what for fault in FAULTS]
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)


def test_a_row_that_was_run_again_is_replaced_and_the_others_stay() -> None:
    first, second = FAULTS[:2]
    old = row(second, "old", "old", "old")
    page = written(f"above\n{BEGIN}\n{HEAD}{old}\n{END}\nbelow\n", {})
    new = row(first, "new", "new", "new")
    assert rows(written(page, {first.what: new})) == {
        **{fault.what: row(fault, NOT_RUN, NOT_RUN, NOT_RUN) for fault in FAULTS},
        first.what: new,
        second.what: old,
    }
    assert page.startswith("above\n") and page.endswith(f"{END}\nbelow\n")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("FAILED: out of time", "`out of time`"),
        ("`release` lets it go", "`` `release` lets it go ``"),
        ("by `cancel`", "`` by `cancel` ``"),
        ("say `go` to it", "``say `go` to it``"),
    ],
)
def test_a_reason_is_one_span_of_code_wherever_it_has_a_backtick(reason: str, code: str) -> None:
    assert quoted(reason) == code


def test_seed_and_number_say_what_is_played() -> None:
    assert draw(7, 3) == draw(7, 3)
    played = [draw(7, number) for number in range(300)]
    drawn = {blow.fault.what for score in played for blow in score.blows}
    assert drawn == {fault.what for fault in FAULTS if fault.drawn}
    assert len({str(score) for score in played}) == len(played)


class Finished(Trial):
    """A run that has left files in a folder."""

    @property
    def run_dir(self) -> Path:
        return self.folder


def test_a_last_line_of_a_rank_that_no_log_has_is_found(tmp_path: Path) -> None:
    notes, log = tmp_path / "0-61000-1.jsonl", tmp_path / "logs/attempt-0/node-0.log"
    log.parent.mkdir(parents=True)
    note = json.dumps({"restart": 0, "numbers": [1]}) + "\n"
    notes.write_text(note * 2)
    log.write_text(word(notes, 0, 1) + word(notes, 0, 2))

    class Silent:
        def logs(self) -> list[str]:
            return []

    trial = Finished(run=Silent(), folder=tmp_path)  # type: ignore[arg-type]  # it is only asked for logs
    last_words(trial)
    notes.write_text(note * 3)
    with pytest.raises(Broken, match="notes its step 3"):
        last_words(trial)


def test_a_reason_that_no_fault_explains_is_found() -> None:
    (cancel,) = (fault for fault in FAULTS if fault.what == "scancel")
    ended = RunStatus(state=RunState.CANCELLED)
    said = "cancelled: by scancel; not queued again"
    told_right(Course(hits=[cancel], first_end=ended, reasons=[said]), [said, "done: all"])
    with pytest.raises(Broken, match="no reason tells of it"):
        told_right(Course(hits=[cancel], first_end=ended, reasons=["fatal: odd"]), ["fatal: odd"])
    with pytest.raises(Broken, match="a reason that no fault explains: 'fatal: odd'"):
        told_right(Course(hits=[cancel], first_end=ended, reasons=[said]), [said, "fatal: odd"])
