"""What a notebook shows of a run: its curves, and a page with the state."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas
import pytest

from tests.support.told_run import ToldRun, run_at
from toolkit.runs.records.run_directory import read_metrics
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.views import curves
from toolkit.runs.views.goodput import goodput_of
from toolkit.runs.views.notebook import Curve


def write(folder: Path, *records: dict[str, Any]) -> None:
    lines = [json.dumps({"version": 1, "attempt": 0, "restart": 0, **r}) for r in records]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"torn":']))


def test_training_and_evaluation_of_a_step_make_one_row(tmp_path: Path) -> None:
    place = {"epoch": 0, "samples_seen": 64}
    write(
        tmp_path,
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.0, **place},
        {"step": 2, "accuracy": 0.5, **place},
    )
    assert [(r["step"], r["loss"], r.get("accuracy")) for r in read_metrics(tmp_path)] == [
        (1, 2.0, None),
        (2, 1.0, 0.5),
    ]


@pytest.mark.parametrize("start", [{"attempt": 1}, {"restart": 1}])
def test_a_new_start_voids_what_an_earlier_one_wrote_from_its_first_step_on(
    tmp_path: Path, start: dict[str, int]
) -> None:
    old = [{"step": step, "loss": 9.0, "old": True} for step in range(1, 6)]
    write(tmp_path, *old, {"step": 3, "loss": 1.0, **start}, {"step": 4, "loss": 0.5, **start})
    rows = [(row["step"], row["loss"], row.get("old")) for row in read_metrics(tmp_path)]
    assert rows == [(1, 9.0, True), (2, 9.0, True), (3, 1.0, None), (4, 0.5, None)]


@pytest.mark.parametrize(
    ("old", "new"), [((0, 0), (0, 0)), ((0, 1), (0, 0)), ((1, 0), (1, 0)), ((0, 1), (1, 0))]
)
@pytest.mark.parametrize("first", [3, 5])
def test_starts_are_told_apart_whatever_their_numbers(
    tmp_path: Path, old: tuple[int, int], new: tuple[int, int], first: int
) -> None:
    """Torchrun counts no restart where its members change, and rank 0 may be another node's."""
    before = dict(zip(("attempt", "restart"), old, strict=True))
    after = dict(zip(("attempt", "restart"), new, strict=True))
    earlier = [{"step": step, "loss": 9.0, **before} for step in range(1, 6)]
    write(
        tmp_path,
        *(*earlier, {"step": 5, "accuracy": 0.1, **before}),
        *({"step": step, "loss": 1.0, **after} for step in range(first, 6)),
    )
    rows = read_metrics(tmp_path)
    assert [row["loss"] for row in rows] == [9.0] * (first - 1) + [1.0] * (6 - first)
    assert "accuracy" not in rows[-1], "measured in steps that do not count any more"


def test_what_an_earlier_attempt_writes_late_is_left_out(tmp_path: Path) -> None:
    late = [{"step": 2, "loss": 9.0}, {"step": 1, "loss": 9.0}]
    records = [{"step": step, "loss": 1.0, "attempt": 1} for step in (1, 2, 3)]
    write(tmp_path, *records, *late)
    assert [row["loss"] for row in read_metrics(tmp_path)] == [1.0, 1.0, 1.0]


def test_metrics_are_a_data_frame_and_a_list_without_pandas(tmp_path: Path) -> None:
    write(tmp_path, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0})
    frame = run_at(tmp_path).metrics()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["loss"]) == [2.0, 1.0]
    code = (
        "import sys; sys.modules['pandas'] = None\n"  # as where it is not installed
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'pandas' else find(name, *a)\n"
        "from pathlib import Path\n"
        "from toolkit.runs.records.run_directory import read_metrics, table\n"
        "print([row['loss'] for row in table(read_metrics(Path(sys.argv[1])))])"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "[2.0, 1.0]\n"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> _Tags:
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def test_the_page_shows_state_progress_figures_and_the_curve(tmp_path: Path) -> None:
    write(tmp_path, *({"step": step, "loss": 3.0 / step} for step in range(1, 51)))
    (tmp_path / "outcome.json").write_text(json.dumps({"status": "running", "steps": 200}))
    page = run_at(tmp_path)._repr_html_()
    tags = read(page)
    assert {"progress", "svg", "polyline"} <= set(tags.seen)
    assert "RUNNING" in tags.text
    assert "50 of 200 steps" in tags.text
    assert "step 50, loss 0.06" in tags.text


def test_the_page_escapes_what_a_run_says_and_hides_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-in-a-reason")
    (tmp_path / "job.yaml").write_text("secrets: [WANDB_API_KEY]\n")
    run = run_at(tmp_path, name="<b>bold</b>")
    run.told = RunStatus(state=RunState.FAILED, reason="<script> s3cr3t-in-a-reason &")
    page = run._repr_html_()
    assert "script" not in read(page).seen
    assert "b" not in read(page).seen
    assert "<script> ***WANDB_API_KEY*** &" in read(page).text
    assert "s3cr3t" not in page


def test_the_page_of_a_sweep_has_a_row_per_point(tmp_path: Path) -> None:
    parts = []
    for number, loss in enumerate((0.5, 0.25)):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        write(folder, {"step": 7, "loss": loss})
        parts.append(run_at(folder, name=f"sweep/{number}"))
    run = run_at(tmp_path)
    run.members = parts
    tags = read(run._repr_html_())
    assert tags.seen.count("tr") == 3
    assert "0 of 2 points" in tags.text
    assert "loss 0.25" in tags.text
    frame = run.metrics()
    assert list(frame["point"]) == ["0", "1"]
    assert list(frame["loss"]) == [0.5, 0.25]


def test_a_run_that_is_far_away_still_has_a_page() -> None:
    class Away(ToldRun):
        def status(self) -> RunStatus:
            from toolkit.errors import LauncherError

            raise LauncherError("nobody answers")

    page = Away(run_at(None).record)._repr_html_()
    assert "UNKNOWN" in read(page).text
    assert "nobody answers" in read(page).text


def test_a_long_curve_is_drawn_small_with_its_true_extremes() -> None:
    loss = curves.Curve()
    for step in range(1, 100_001):
        loss.add(step, 0.0, 7.0 if step == 50_001 else 1.0)
    curve = Curve.of(loss)
    assert curve is not None
    assert len(curve.points.split()) <= 1100
    assert (curve.lowest, curve.highest, curve.first, curve.last) == ("1", "7", 1, 100_000)
    loss.cut(2)
    assert Curve.of(loss) is None


def test_waiting_shows_a_bar_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outcome.json").write_text(json.dumps({"status": "running", "steps": 4}))

    class Going(ToldRun):
        asked = 0

        def status(self) -> RunStatus:
            self.asked += 1
            write(tmp_path, {"step": self.asked, "loss": 1.0})
            return RunStatus(state=RunState.SUCCEEDED if self.asked == 4 else RunState.RUNNING)

    run = Going(run_at(tmp_path).record)
    assert run.wait(progress=True).state is RunState.SUCCEEDED
    assert "digits (steps)" in capsys.readouterr().err
    again = Going(run_at(tmp_path).record)
    again.wait()
    assert capsys.readouterr().err == ""  # nobody looks


def test_a_start_that_first_evaluates_repeats_no_step(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    rows += [{"step": 2, "attempt": 1, "test_loss": 0.5}, {"step": 3, "attempt": 1, "loss": 0.9}]
    at, first = 1.79e9, {"attempt": 0, "restart": 0}
    rows = [{"time": at + 10 * number, **first, **row} for number, row in enumerate(rows)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [row.get("loss") for row in read_metrics(tmp_path)] == [2.0, 1.0, 0.9]
    assert goodput_of(tmp_path, submitted=at).steps_again == 0
