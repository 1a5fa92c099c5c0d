"""What stands in a report, whoever has written the run directory. Browsers: tests/system."""

import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.support.told_run import ToldRun, run_at
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus


class _Page(HTMLParser):
    """The elements of a page, and its text without scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.data = ""
        self.feed(html)
        self.close()
        assert not self.open, "each element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self.tags[-1][1].get("type") == "application/json":
                self.data += data
        elif not self.open or self.open[-1] != "style":
            self.text += data


def record(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a") as file:
        file.write("".join(json.dumps({"version": 1, **row}) + "\n" for row in rows))


def train(folder: Path, *, steps: int = 20, first: int = 1, at: float = 10.0, **row: Any) -> None:
    """Record a start of two ranks, and steps of a second."""
    record(folder, "events.jsonl", {"time": at, "event": "start", "world_size": 2, **row})
    record(
        folder,
        "metrics.jsonl",
        *(
            {"time": at + step, "step": step, "loss": 1 / step, "lr": 0.1, **row}
            for step in range(first, steps + 1)
        ),
    )
    (folder / "outcome.json").write_text(json.dumps({"status": "done", "steps": steps}))


def ended(run: ToldRun, **told: Any) -> ToldRun:
    run.told = RunStatus(state=RunState.SUCCEEDED, **told)
    return run


def test_stalls_are_shown_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    train(tmp_path)
    (tmp_path / "logs/attempt-0").mkdir(parents=True)
    folder = tmp_path / "logs/attempt-1/watchdog"
    why = "no step for 8 s: rank 1 on n2 is stopped <by> SIGSTOP"
    record(folder, "stalls.jsonl", {"stalled": False})
    record(folder, "stalls.jsonl", {"time": 9.0, "stalled": True, "why": why, "asked": "stall-7"})
    for node, rank, state in (("n1", 0, "S"), ("n2", 1, "T")):
        stack = [["/home/me/train.py", 34, "main"]] if state == "S" else []
        found = {"rank": rank, "pid": 5, "state": state, "stack": stack}
        answer = {"version": 1, "node": node, "world": 2, "ranks": [found]}
        (folder / f"answer-stall-7-{node}-5.json").write_text(json.dumps(answer))
    page = _Page(ended(run_at(tmp_path)).report().html)
    assert f"attempt 1: {why}" in page.text
    assert 'rank 0 on n1\n  File "/home/me/train.py", line 34, in main' in page.text
    assert "rank 1 on n2, stopped" in page.text
    assert page.text.count("attempt 1: ") == 1


def test_ranks_are_shown_with_what_each_takes_of_a_step(tmp_path: Path) -> None:
    train(tmp_path)
    folder = tmp_path / "logs/attempt-0/watchdog"
    for at, slow in ((30.0, 0.0), (60.0, 0.1)):
        waits = [[rank, 0.05 if rank == 39 else 0.3, "n<1>"] for rank in range(1, 40)]
        record(folder, "ranks.jsonl", {"time": at, "waits": [[0, slow, "n0"], *waits]})
    page = _Page(ended(run_at(tmp_path)).report().html)
    rows = page.text.partition("own part of a step")[2].split("\n")
    # 0.95 of a step; the time of the first of 20 is not known.
    assert [row for row in rows if row][:2] == ["0n05.0%0.902 s", "39n<1>5.0%0.902 s"]
    assert "8 more ranks wait longer" in page.text
    drawn = json.loads(page.data)["ranks"]
    assert [series["label"] for series in drawn["series"]][:2] == ["rank 0", "rank 1"]
    assert drawn["series"][0]["values"] == [0.0, 0.1]
    assert len(drawn["series"]) == 8


def test_a_page_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    train(tmp_path, steps=15)
    train(tmp_path, first=11, at=40, attempt=1)
    run = ended(run_at(tmp_path))
    page = _Page(run.report().html)
    goodput = run.goodput()
    shown = {
        bucket: float(attributes["data-seconds"] or 0)
        for (_, attributes), bucket in zip(
            [tag for tag in page.tags if "data-seconds" in tag[1]],
            [name for name, seconds in goodput.seconds.items() if seconds > 0],
            strict=True,
        )
    }
    assert shown == {name: seconds for name, seconds in goodput.seconds.items() if seconds > 0}
    (drawn,) = json.loads(page.data)["runs"]
    assert drawn["curves"]["loss"]["step"] == list(range(1, 21))
    assert drawn["curves"]["loss"]["value"] == pytest.approx([1 / n for n in range(1, 21)])
    assert drawn["curves"]["loss"]["time"][0] == 11, "in seconds since the submission"
    for text in ("20 of 20", f"{goodput.share:.1%}", "attempt 1", "last 0.05 at step 20"):
        assert text in page.text


def test_spans_of_the_timeline_fill_it(tmp_path: Path) -> None:
    train(tmp_path, steps=15)
    train(tmp_path, first=11, at=40, attempt=1)
    styles = [str(t[1].get("style")) for t in _Page(ended(run_at(tmp_path)).report().html).tags]
    spans = [re.fullmatch(r"left:([\d.]+)%;width:([\d.]+)%", style) for style in styles]
    end = 0.0
    for span in filter(None, spans):
        assert float(span[1]) == pytest.approx(end, abs=0.01)
        end = float(span[1]) + float(span[2])
    assert end == pytest.approx(100, abs=0.01)


EVIL = "</script><script>alert(1)</script><!--\u2028&\"'"


def test_nothing_that_a_run_has_written_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "s3cr3t-of-the-run")
    rows: list[dict[str, Any]] = [
        {"time": 5, "step": 1, EVIL: 1.0, "loss": 2},
        {"time": 6, "step": 2, "loss": EVIL},
    ]
    record(tmp_path, "metrics.jsonl", *rows)
    record(tmp_path, "events.jsonl", {"time": 4, "event": "environment", "torch": EVIL})
    attempt = tmp_path / "logs/attempt-0"
    attempt.mkdir(parents=True)
    (attempt / "reason").write_text(f"fatal: {EVIL} s3cr3t-of-the-run")
    (attempt / "nodes").write_text(EVIL)
    (tmp_path / "job.yaml").write_text(f"name: '{EVIL}'\nenv: {{KEY: s3cr3t-of-the-run}}\n")
    token = "hf_abcdefghijklmnopqrstuvwxyz0123"
    (tmp_path / "x.sbatch").write_text(f"{EVIL}\nexport HF_TOKEN={token}\n")
    clean = len(_Page(ended(run_at(tmp_path / "none")).report().html).tags)
    run = ended(run_at(tmp_path, name="digits"), reason=f"{EVIL} s3cr3t-of-the-run")
    made = run.report()
    page = _Page(made.html)
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 2
    assert len(page.tags) > clean
    assert page.text.count("<script>alert(1)</script>") >= 5
    assert EVIL.replace("\u2028", "\\u2028") in json.loads(page.data)["runs"][0]["curves"]
    for secret in ("s3cr3t-of-the-run", token):
        assert secret not in made.html
    policy = next(t[1]["content"] for t in page.tags if t[1].get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'")
    assert not re.search(
        r"""(?:src|href|action)\s*=\s*["']?[^"']*//""", re.sub(r"(?s)<script>.*", "", made.html)
    )


def test_files_that_lead_elsewhere_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of another user")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("job.yaml", "run.sh", "metrics.jsonl", "events.jsonl"):
        (folder / name).symlink_to(tmp_path / "secret")
    (folder / "logs").symlink_to(tmp_path)
    assert "of another user" not in ended(run_at(folder)).report().html


def test_a_run_that_has_left_nothing_has_a_page_that_says_so(tmp_path: Path) -> None:
    page = _Page(ended(run_at(tmp_path)).report().html)
    assert (
        "no steps are recorded, so the report has no curves; `log_pattern` in the job" in page.text
    )
    assert "goodput" not in page.text
    page = _Page(ended(run_at(None)).report().html)
    assert "its run directory cannot be seen from here" in page.text


def test_a_page_says_what_was_started_how_it_went_and_what_came_last(tmp_path: Path) -> None:
    train(tmp_path, steps=15)
    (tmp_path / "job.yaml").write_text("name: j\nmodule: train\nargs: [--text, a b, --lr, '0.1']\n")
    log = tmp_path / "logs/attempt-0/node-0.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"[rank 0] line {n}\n" for n in range(100_000)))
    page = _Page(ended(run_at(tmp_path)).report().html)
    assert "python -m train --text 'a b' --lr 0.1" in page.text
    assert re.search(r"after [^,]+, at step 15 of 15", page.text)
    lines = [line for line in page.text.splitlines() if line.startswith("[rank 0] line ")]
    assert lines == [f"[rank 0] line {n}" for n in range(99_980, 100_000)]


def test_the_page_of_a_point_shows_its_own_arguments_and_variables(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: j\nscript: a.py\nargs: [--lr, '1']\n"
        "sweep: {grid: {--lr: ['1', '2'], env.SEED: ['0', '1']}}\n"
    )
    folder = tmp_path / "0003-lr=2-seed=1"
    train(folder)
    point = ended(run_at(folder, name="sweep/0003-lr=2-seed=1"))
    point.settings = {"--lr": "2", "env.SEED": "1"}
    assert "SEED=1 a.py --lr 2" in _Page(point.report().html).text


@pytest.mark.parametrize(
    ("name", "best"),
    [("test_accuracy", [2, 0, 1]), ("test_loss", [1, 0, 2]), ("other", [0, 1, 2])],
)
def test_the_best_run_comes_first_and_one_without_the_measure_last(
    tmp_path: Path, name: str, best: list[int]
) -> None:
    runs: list[Run] = []
    for number, value in enumerate((0.5, 0.25, 0.75, math.nan)):
        rows = [{"step": 1, "time": 11.0, "loss": 1.0}]
        rows[0] |= {} if math.isnan(value) else {name: value}
        record(tmp_path / str(number), "metrics.jsonl", *rows)
        runs.append(ended(run_at(tmp_path / str(number), name=f"run-{number}")))
    data = json.loads(_Page(toolkit.report(runs).html).data)
    assert [run["name"] for run in data["runs"]] == [f"run-{n}" for n in [*best, 3]]


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    runs: list[Run] = []
    for number, lr in enumerate(("0.1", "0.01")):
        folder = tmp_path / str(number)
        train(folder, steps=10 + number)
        args = f"[--task, digits, --lr, '{lr}', --flag, --seed={number}]"
        (folder / "job.yaml").write_text(f"name: j{number}\nargs: {args}\nimage: same\n")
        runs.append(ended(run_at(folder, name=f"run-{number}")))
    made = toolkit.report(runs)
    page = _Page(made.html)
    assert made.title == "2 runs"
    axes = {axis["name"]: axis["values"] for axis in json.loads(page.data)["axes"]}
    # The best one first.
    assert axes == {"--lr": ["0.01", "0.1"], "--seed": ["1", "0"], "loss": ["0.09090909", "0.1"]}
    assert [run["name"] for run in json.loads(page.data)["runs"]] == [
        "lr=0.01 seed=1",
        "lr=0.1 seed=0",
    ]
    assert "2 runs: 2 SUCCEEDED. By loss, lowest first." in page.text
    assert [t[1]["data-run"] for t in page.tags if "data-run" in t[1]] == ["0", "1"]
    assert "same" not in page.text


def test_a_sweep_is_the_comparison_of_its_points(tmp_path: Path) -> None:
    points: list[Run] = []
    for number in range(3):
        train(tmp_path / str(number))
        points.append(ended(run_at(tmp_path / str(number), name=f"sweep/{number}")))
        points[-1].settings = {"--lr": str(number)}

    class Sweep(ToldRun):
        members: Sequence[Run] = points

    page = _Page(Sweep(run_at(tmp_path).record).report().html)
    data = json.loads(page.data)
    assert [run["name"] for run in data["runs"]] == ["lr=0", "lr=1", "lr=2"]
    assert data["axes"][0] == {"name": "--lr", "values": ["0", "1", "2"]}


@pytest.mark.parametrize("runs", [1, 40])
def test_a_page_of_many_points_stays_below_a_megabyte(tmp_path: Path, runs: int) -> None:
    for number in range(runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(1, 40_000 // runs):
                figures = {f"figure_{i}": 1 / (step + i) for i in range(6)}
                file.write(json.dumps({"time": 1.7e9 + step, "step": step, **figures}) + "\n")
    made = toolkit.report([ended(run_at(tmp_path / str(number))) for number in range(runs)])
    assert len(made.html.encode()) < 1_000_000


def test_no_runs_and_too_many_are_refused(tmp_path: Path) -> None:
    for runs in ([], [run_at(tmp_path)] * 201):
        with pytest.raises(toolkit.InputError, match=f"{len(runs)} runs; a report is of 1 to 200"):
            toolkit.report(runs)


def test_a_report_replaces_a_report_and_nothing_else(tmp_path: Path) -> None:
    made = ended(run_at(tmp_path)).report()
    path = tmp_path / "page.html"
    assert made.save(path) == path
    assert made.save(path).read_text() == made.html
    thesis = tmp_path / "thesis.html"
    thesis.write_text("<!DOCTYPE html>mine")
    with pytest.raises(toolkit.InputError, match="exists and is not a report; name another file"):
        made.save(thesis)
    assert thesis.read_text() == "<!DOCTYPE html>mine"
    (tmp_path / "link.html").symlink_to(thesis)
    with pytest.raises(toolkit.InputError, match="is a link"):
        made.save(tmp_path / "link.html")
    with pytest.raises(toolkit.InputError, match="cannot be written: No such file"):
        made.save(tmp_path / "none" / "page.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "page.html", "thesis.html"]


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(tmp_path: Path) -> None:
    made = ended(run_at(tmp_path)).report()
    page = _Page(made._repr_html_())
    ((tag, attributes),) = page.tags
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert attributes["srcdoc"] == made.html
