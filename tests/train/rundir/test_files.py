"""The small files of the run directory: never torn for a reader, never set back."""

from __future__ import annotations

import fcntl
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from train.rundir import files
from train.rundir.files import Outcome, RunDirectory, may_forestall, may_replace, read_lines
from train.rundir.jsonl import dump
from train.runtime.rank import RankInfo

RUNNING = Outcome(
    status="running",
    attempt=1,
    restart=0,
    step=5,
    steps=9,
    samples_seen=320,
    rank=None,
    reason="training",
)


def outcome(status: str, *, attempt: int = 1, restart: int = 0, rank: int | None = None) -> Outcome:
    return replace(RUNNING, status=status, attempt=attempt, restart=restart, rank=rank)


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        (None, outcome("running"), True),
        (outcome("running"), outcome("done"), True),
        (outcome("running"), outcome("fatal", rank=1), True),
        # The first genuine failure stays.
        (outcome("fatal", rank=1), outcome("fatal", rank=2), False),
        (outcome("fatal", rank=1), outcome("retryable", rank=0), False),
        (outcome("fatal", rank=1), outcome("preempted"), False),
        # All steps were made: what failed beside that changed nothing.
        (outcome("fatal", rank=1), outcome("done"), True),
        # An echo that was faster than its cause gives way.
        (outcome("retryable", rank=0), outcome("fatal", rank=1), True),
        (outcome("retryable", rank=0), outcome("retryable", rank=2), False),
        (outcome("done"), outcome("retryable", rank=1), False),
        # The next start, by torchrun, by a scheduler or by hand.
        (outcome("fatal", rank=1), outcome("running", restart=1), True),
        (outcome("fatal", rank=1), outcome("running", attempt=2), True),
        (outcome("fatal", rank=1), outcome("running"), True),
        (outcome("running", restart=1), outcome("retryable", rank=2), False),
        # Fences.
        (outcome("running", attempt=2), outcome("done"), False),
        (outcome("preempted", attempt=2), outcome("running"), False),
    ],
)
def test_which_outcome_replaces_which(old: Outcome | None, new: Outcome, allowed: bool) -> None:
    assert may_replace(old, new) is allowed


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        (None, outcome("fatal"), True),
        (None, outcome("preempted"), True),
        # The directory's run is still unknown.
        (outcome("running"), outcome("fatal"), False),
        (outcome("running"), outcome("preempted"), False),
        (outcome("preempted"), outcome("fatal"), False),
        (outcome("retryable"), outcome("fatal"), False),
        # torchrun counts restarts, in a stranger's directory too.
        (outcome("running"), outcome("fatal", restart=1), False),
        (outcome("running"), outcome("preempted", restart=1), True),
        (outcome("retryable"), outcome("fatal", restart=1), True),
        (outcome("retryable", restart=1), outcome("fatal"), False),
        # The launcher counts attempts.
        (outcome("running"), outcome("fatal", attempt=2), True),
        (outcome("preempted", restart=3), outcome("preempted", attempt=2), True),
        (outcome("running", attempt=2), outcome("fatal"), False),
        (outcome("done"), outcome("fatal", attempt=2), False),
    ],
)
def test_an_end_before_the_directory_was_claimed_spares_what_may_be_another_run(
    old: Outcome | None, new: Outcome, allowed: bool
) -> None:
    assert may_forestall(old, new) is allowed


def test_outcome_is_written_whole_and_read_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, RankInfo())
    assert directory.read_outcome() is None
    assert directory.write_outcome(RUNNING)
    assert directory.read_outcome() == RUNNING
    assert not directory.write_outcome(outcome("done", attempt=0))
    assert directory.read_outcome() == RUNNING
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]
    assert sorted(json.loads((tmp_path / "outcome.json").read_text())) == sorted(
        [
            "version",
            "status",
            "attempt",
            "restart",
            "step",
            "steps",
            "samples_seen",
            "rank",
            "reason",
            "metrics",
            "time",
        ]
    )


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, RankInfo(attempt=3, restart=1))
    directory.metric(step=1, loss=2.5)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    assert [record["step"] for record in read_lines(path)] == [1]
    directory.metric(step=2, loss=2.0)
    directory.flush()
    records = read_lines(path)
    assert [record["step"] for record in records] == [1, 2]
    assert records[1].items() >= {"version": 1, "attempt": 3, "restart": 1, "loss": 2.0}.items()


def test_only_rank_0_writes_lines(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "not there", RankInfo(rank=1)).event("start", step=0)
    assert list(tmp_path.iterdir()) == []
    assert read_lines(tmp_path / "events.jsonl") == []


def test_json_has_no_numbers_that_json_does_not_know() -> None:
    assert (
        dump({"loss": math.nan, "more": [math.inf, 1.5]}) == '{"loss": null, "more": [null, 1.5]}'
    )


def test_who_hangs_and_keeps_the_lock_keeps_nobody_from_telling_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_WITHIN_S", 0.1)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    directory = RunDirectory(tmp_path, RankInfo(attempt=1))
    assert directory.write_outcome(RUNNING)
    assert directory.read_outcome() == RUNNING
    os.close(held)
    assert directory.write_outcome(outcome("done"))
