"""What `toolkit status` and `toolkit top` say of a run whose ranks are watched."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.told_run import ToldRun, run_at
from toolkit.cli.summary import GoodputSoFar, summary_lines, summary_of, top_lines, top_rows
from toolkit.runs.state import RunState, RunStatus

SLOW = "rank 3 on n2 is slower than the others"
HANGS = "no step for 8 s: rank 1 on n2 is stopped"


def watched(run_dir: Path, name: str, *lines: dict[str, Any]) -> ToldRun:
    folder = run_dir / "logs/attempt-0/watchdog"
    folder.mkdir(parents=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_at(run_dir)


@pytest.mark.parametrize(
    ("name", "line", "key"),
    [
        ("stragglers.jsonl", {"rank": 3, "why": SLOW}, "straggler"),
        ("stalls.jsonl", {"stalled": True, "why": HANGS}, "stall"),
    ],
)
def test_what_a_watchdog_has_named_is_shown_while_the_run_goes_on(
    name: str, line: dict[str, Any], key: str, tmp_path: Path
) -> None:
    run = watched(tmp_path, name, line)
    assert f"{key + ':':<10} {line['why']}" in list(summary_lines(summary_of(run)))
    (row,) = top_lines(top_rows([(run, run.status())], {}))
    assert line["why"] in row
    run.told = RunStatus(state=RunState.SUCCEEDED)
    assert summary_of(run)[key] is None


def test_how_long_the_ranks_wait_for_each_other_is_shown_while_the_run_goes_on(
    tmp_path: Path,
) -> None:
    first = {"time": 1.0, "waits": [[0, 0.5, "n1"], [1, 0.5, "n2"]]}
    odd = {"time": 2.0, "waits": [[0, 2.0, "n1"], [-1, 0.5, "n2"], 7, [0, "x", "n"], [0, 0.1]]}
    then = {"time": 3.0, "waits": [[0, 0.234, "n1"], [1, 0.01, "n2\x1b[2J"], [2, 0.2, "n2"]]}
    run = watched(tmp_path, "ranks.jsonl", first, odd, then, {"time": "then", "waits": []})
    line = r"ranks:     wait for others 1% (rank 1 on n2\x1b[2J) to 23% (rank 0 on n1) of the time"
    assert line in list(summary_lines(summary_of(run)))
    run.told = RunStatus(state=RunState.SUCCEEDED)
    assert summary_of(run)["ranks"] is None


def test_a_node_without_a_sign_of_life_is_named_while_others_show_theirs(tmp_path: Path) -> None:
    folder = tmp_path / "logs/attempt-0"
    folder.mkdir(parents=True)
    (folder / "nodes").write_text("n1\nn2\nn3\n")
    run = run_at(tmp_path)
    for number, ago_s in enumerate((0, 330, 20)):
        (folder / f"alive-{number}").write_text("7\n")
        os.utime(folder / f"alive-{number}", (5000 - ago_s, 5000 - ago_s))
    line = "no sign of life from n2 for 5 min 30 s; Slurm waits SlurmdTimeout for a lost node"
    assert f"nodes:     {line}" in list(summary_lines(summary_of(run)))
    (folder / "ended-1").write_text("0\n")
    assert summary_of(run)["nodes"] is None
    run.told = RunStatus(state=RunState.SUCCEEDED)
    assert summary_of(run)["nodes"] is None


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("stragglers.jsonl", {"rank": 3, "why": SLOW}, {"rank": None}),
        ("stalls.jsonl", {"stalled": True, "why": HANGS}, {"stalled": False}),
    ],
)
def test_what_is_over_is_not_shown(
    name: str, first: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    summary = summary_of(watched(tmp_path, name, first, then))
    assert summary["straggler"] is summary["stall"] is None


def test_what_a_run_without_a_step_waits_for_is_shown_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("resources: {nnodes: 2}\n")
    (tmp_path / "logs/attempt-0/node-0/17_x").mkdir(parents=True)
    run = run_at(tmp_path)
    words = "torchrun on 1 of 2 nodes: node 1"
    assert f"waits for: {words}" in list(summary_lines(summary_of(run)))
    (row,) = top_lines(top_rows([(run, run.status())], {}))
    assert f"waits for {words}" in row
    run.told = RunStatus(state=RunState.PENDING)
    assert summary_of(run)["waits_for"] is None


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"equal": True, "missing": "", "accepted": []}, None),
        (
            {"equal": True, "missing": "", "accepted": ["batch-norm", 7]},
            "equal to one process, except for accepted differences: batch-norm",
        ),
        (
            {"equal": False, "missing": "random\x1b[2J", "accepted": []},
            r"none: random\x1b[2J",
        ),
        (
            {"version": 2},
            "proof.json is of version 2, and this toolkit reads 1; upgrade the toolkit",
        ),
        ([1], None),
    ],
)
def test_in_what_a_run_does_not_train_as_one_process_is_shown(
    record: object, text: str | None, tmp_path: Path
) -> None:
    (tmp_path / "proof.json").write_text(json.dumps(record))
    summary = summary_of(run_at(tmp_path))
    assert summary["proof"] == text
    assert (f"proof:     {text}" in list(summary_lines(summary))) is (text is not None)


def test_the_goodput_so_far_is_shown_and_not_computed_anew_at_once(tmp_path: Path) -> None:
    began = time.time() - 100
    steps = [{"time": began + 50 + n, "step": n, "seconds": 1.0} for n in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    run, goodput = run_at(tmp_path, created=began), GoodputSoFar()
    lines = summary_lines(summary_of(run, None, goodput))
    (line,) = (one for one in lines if one.startswith("goodput"))
    pattern = r"goodput:   [34]\d% so far; most of the rest: queue \([345]\d%\)"
    assert re.fullmatch(pattern, line)
    (tmp_path / "metrics.jsonl").write_text("")
    assert summary_of(run, None, goodput)["goodput"]["share"] == pytest.approx(0.4, abs=0.1)
    (tmp_path / "metrics.jsonl").unlink()
    assert summary_of(run)["goodput"] is None
    run.told = RunStatus(state=RunState.SUCCEEDED)
    assert summary_of(run, None, goodput)["goodput"] is None
