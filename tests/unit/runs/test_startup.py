"""What an attempt waits for that has made no step, by what torchrun has left."""

import json
import os
from pathlib import Path

import pytest

from toolkit.runs.evidence.progress import progress_of
from toolkit.runs.evidence.startup import waits_for

NOW = 1_000_000.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory of four nodes, whose first attempt has begun."""
    (tmp_path / "job.yaml").write_text("name: a\nmodule: train\nresources: {nnodes: 4}\n")
    attempt(tmp_path, 0)
    return tmp_path


def attempt(run_dir: Path, number: int, *nodes: str) -> Path:
    folder = run_dir / f"logs/attempt-{number}"
    (folder / "watchdog").mkdir(parents=True)
    if nodes:
        (folder / "nodes").write_text("".join(f"{node}\n" for node in nodes))
    return folder


def start_torchrun(run_dir: Path, node: str, number: int = 0) -> Path:
    """Make the folder that torchrun makes for its logs, and return that of its ranks' ones."""
    logs = run_dir / f"logs/attempt-{number}/{node}/17_x1"
    logs.mkdir(parents=True)
    return logs / "attempt_0"


def test_nodes_without_torchrun_are_named(run_dir: Path) -> None:
    assert waits_for(run_dir, None) == "torchrun on 4 of 4 nodes: node 0, node 1, node 2, node 3"
    (run_dir / "logs/attempt-0/nodes").write_text("gpu01\ngpu02\ngpu07\ngpu08\n")
    for node in ("node-0", "node-2"):
        start_torchrun(run_dir, node)
    assert waits_for(run_dir, None) == "torchrun on 2 of 4 nodes: gpu02, gpu08"


def test_many_nodes_are_not_all_named(run_dir: Path) -> None:
    (run_dir / "job.yaml").write_text("resources: {nnodes: {min: 300, max: 400}}\n")
    start_torchrun(run_dir, "node-1")
    words = "torchrun on 299 of 300 nodes: node 0, node 2, node 3, node 4, …"
    assert waits_for(run_dir, None) == words


def test_pods_without_torchrun_are_counted(run_dir: Path) -> None:
    start_torchrun(run_dir, "digits-worker-1")
    assert waits_for(run_dir, None) == "torchrun on 3 of 4 nodes"


def test_nodes_that_have_not_met_wait_for_the_rendezvous(run_dir: Path) -> None:
    for node in range(4):
        start_torchrun(run_dir, f"node-{node}")
    assert waits_for(run_dir, None) == "the rendezvous of 4 nodes"


def test_ranks_that_were_started_wait_for_their_first_step(run_dir: Path) -> None:
    (start_torchrun(run_dir, "node-0") / "0").mkdir(parents=True)
    folder = run_dir / "logs/attempt-0/node-0/17_x1/attempt_0"
    os.utime(folder, (NOW - 90, NOW - 90))
    words = "the first step; its ranks started 1 min 30 s ago"
    assert waits_for(run_dir, None, now=NOW) == words
    assert waits_for(run_dir, None, now=NOW - 600) == "the first step; its ranks started 0.0 s ago"
    again = folder.with_name("attempt_1")
    (again / "0").mkdir(parents=True)
    os.utime(again, (NOW - 5, NOW - 5))
    assert waits_for(run_dir, None, now=NOW) == "the first step; its ranks started 5.0 s ago"


def test_what_has_made_a_step_waits_for_nothing_until_the_next_attempt(run_dir: Path) -> None:
    (start_torchrun(run_dir, "node-0") / "0").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text(
        json.dumps({"time": NOW, "step": 3, "attempt": 0}) + "\n"
    )
    assert waits_for(run_dir, progress_of(run_dir, now=NOW)) is None
    attempt(run_dir, 1, "a", "b", "c", "d")
    words = "torchrun on 4 of 4 nodes: a, b, c, d"
    assert waits_for(run_dir, progress_of(run_dir, now=NOW)) == words


@pytest.mark.parametrize(
    ("job", "waits"),
    [("script: a.py", False), ("{script: a.py, log_pattern: x}", True), ("module: mine", False)],
)
def test_a_script_that_may_never_record_a_step_does_not_wait_for_one(
    job: str, waits: bool, run_dir: Path
) -> None:
    (run_dir / "job.yaml").write_text(job)
    (start_torchrun(run_dir, "node-0") / "0").mkdir(parents=True)
    assert (waits_for(run_dir, None) is not None) == waits
    (run_dir / "events.jsonl").write_text('{"event": "start"}\n')  # by telemetry.py
    assert waits_for(run_dir, None) is not None


@pytest.mark.parametrize(
    "line", ['{"version": 2, "time": 1, "step": 3}', '{"step": 3, "time": 1}', '{"step": 3}']
)
def test_a_step_that_cannot_be_told_to_be_of_this_attempt_is_not_waited_for(
    line: str, run_dir: Path
) -> None:
    (run_dir / "metrics.jsonl").write_text(f"{line}\n")
    attempt(run_dir, 1)
    ranks = start_torchrun(run_dir, "node-0", 1)
    (ranks / "0").mkdir(parents=True)
    os.utime(run_dir / "metrics.jsonl", (NOW - 100, NOW - 100))
    os.utime(ranks, (NOW - 90, NOW - 90))
    words = "the first step; its ranks started 1 min 30 s ago"
    assert waits_for(run_dir, progress_of(run_dir, now=NOW), now=NOW) == words
    os.utime(run_dir / "metrics.jsonl", (NOW - 80, NOW - 80))
    assert waits_for(run_dir, progress_of(run_dir, now=NOW), now=NOW) is None


def test_one_node_has_nobody_to_meet(run_dir: Path) -> None:
    (run_dir / "job.yaml").write_text("name: a\n")
    assert waits_for(run_dir, None) == "torchrun"
    start_torchrun(run_dir, "node-0")
    assert waits_for(run_dir, None) == "the start of its ranks"


@pytest.mark.parametrize("job", ["{", "resources: 7", "resources: {nnodes: -4}", "nnodes: x", ""])
def test_a_job_file_that_says_nothing_gives_no_number(job: str, run_dir: Path) -> None:
    (run_dir / "job.yaml").write_text(job)
    assert waits_for(run_dir, None) == "torchrun"


def test_before_the_first_attempt_nothing_is_said(tmp_path: Path) -> None:
    assert waits_for(tmp_path, None) is None


def test_names_of_others_do_no_harm(run_dir: Path) -> None:
    (run_dir / "logs/attempt-0/nodes").write_text("a\x1b[31m\nb\nc\nd\n")
    assert "\x1b" not in (waits_for(run_dir, None) or "")
