"""How a run ended, from the files that it left."""

import json
from pathlib import Path

import pytest

import toolkit
from toolkit.errors import LauncherError
from toolkit.runs.records import run_directory
from toolkit.runs.state import RunState
from toolkit.supervisor.policy import sentence


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return run_directory.make(tmp_path, "run")


def attempt(run_dir: Path, number: int, exit_status: int | None = None) -> None:
    folder = run_dir / f"logs/attempt-{number}"
    folder.mkdir()
    if exit_status is not None:
        (folder / "exit_status").write_text(f"{exit_status}\n")


def said(run_dir: Path, status: str, number: int = 0) -> None:
    outcome = {"version": 1, "status": status, "attempt": number, "reason": f"because {status}"}
    (run_dir / "outcome.json").write_text(json.dumps(outcome))


def test_the_resolved_job_is_the_job_when_it_is_read_again(run_dir: Path) -> None:
    job = toolkit.JobSpec(
        name="probe",
        module="train",
        args=("1e-3", "no", "012", "\u2028", "ü", "a\nb"),
        env={"LR": "1e-3", "EMPTY": ""},
    )
    run_directory.write_inputs(run_dir, job, script="#!/bin/bash\n", file_name="run.sh")
    assert toolkit.load(run_dir / "job.yaml") == job


@pytest.mark.parametrize(
    ("status", "reason", "state"),
    [
        ("done", "", RunState.SUCCEEDED),
        ("retryable", "retryable: rank 1: x; gave up after 2 requeues", RunState.FAILED),
        ("preempted", "cancelled: by scancel; not queued again", RunState.CANCELLED),
        ("preempted", "walltime: out of time", RunState.PREEMPTED),
        ("preempted", "terminated: by Slurm", RunState.CANCELLED),
        ("preempted", "no_progress: out of time; no step beyond 5", RunState.FAILED),
        ("preempted", "fatal: the same failure twice at step 2: Aborted", RunState.FAILED),
    ],
)
def test_the_reason_of_the_last_attempt_is_told(
    run_dir: Path, status: str, reason: str, state: RunState
) -> None:
    attempt(run_dir, 0, exit_status=1)
    (run_dir / "logs/attempt-0/reason").write_text("done: x\n" if status == "done" else reason)
    said(run_dir, status)
    found = run_directory.ended_status(run_dir)
    assert (found.state, found.reason) == (state, sentence(reason))


@pytest.mark.parametrize(
    "reason", ["walltime: out of time", "terminated: by Slurm", "cancelled: by toolkit cancel"]
)
def test_what_failed_while_it_was_being_stopped_has_failed(run_dir: Path, reason: str) -> None:
    """Of a job without restarts, whose script knows only that it was stopped."""
    attempt(run_dir, 0, exit_status=1)
    (run_dir / "logs/attempt-0/reason").write_text(f"{reason}\n")
    said(run_dir, "fatal")
    found = run_directory.ended_status(run_dir)
    assert (found.state, found.reason) == (RunState.FAILED, "because fatal")


def test_the_last_reason_is_that_of_the_newest_attempt_that_has_ended(run_dir: Path) -> None:
    for number in range(12):
        attempt(run_dir, number)
    for number in (9, 10):
        (run_dir / f"logs/attempt-{number}/reason").write_text(f"walltime: {number}\n")
    assert run_directory.last_reason(run_dir) == "walltime: 10"


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("done", RunState.SUCCEEDED),
        ("preempted", RunState.PREEMPTED),
        ("retryable", RunState.FAILED),
        ("fatal", RunState.FAILED),
    ],
)
def test_the_outcome_decides_and_not_the_exit_status(
    run_dir: Path, status: str, state: RunState
) -> None:
    attempt(run_dir, 0, exit_status=1)
    said(run_dir, status)
    found = run_directory.ended_status(run_dir)
    assert found.state is state
    assert found.reason == ("" if status == "done" else f"because {status}")


def test_a_run_that_was_killed_without_a_word_has_failed(run_dir: Path) -> None:
    attempt(run_dir, 0)
    said(run_dir, "running")
    assert run_directory.ended_status(run_dir).state is RunState.FAILED


def test_a_status_from_the_future_is_never_success(run_dir: Path) -> None:
    attempt(run_dir, 0)
    said(run_dir, "splendid")
    found = run_directory.ended_status(run_dir)
    assert (found.state, found.lost) == (RunState.UNKNOWN, True)


@pytest.mark.parametrize("status", ["preempted", "done"])
def test_the_outcome_of_an_earlier_attempt_is_not_this_ones(run_dir: Path, status: str) -> None:
    attempt(run_dir, 0, exit_status=1)
    said(run_dir, status, number=0)
    for number in range(1, 11):  # ten comes after nine
        attempt(run_dir, number, exit_status=4 if number == 10 else 1)
    found = run_directory.ended_status(run_dir)
    assert found.state is RunState.FAILED
    assert found.reason == f"exit status 4; see {run_dir / 'logs/attempt-10'}"


def test_without_an_outcome_the_exit_status_decides(run_dir: Path) -> None:
    attempt(run_dir, 0, exit_status=0)
    assert run_directory.ended_status(run_dir).state is RunState.SUCCEEDED


def test_a_run_that_left_nothing_is_unknown_for_ever(run_dir: Path) -> None:
    found = run_directory.ended_status(run_dir)
    assert (found.state, found.lost) == (RunState.UNKNOWN, True)


def test_a_cancelled_run_is_cancelled_unless_it_was_done_before(run_dir: Path) -> None:
    attempt(run_dir, 0, exit_status=1)
    run_directory.request_cancel(run_dir)
    assert run_directory.ended_status(run_dir).state is RunState.CANCELLED
    said(run_dir, "done")
    assert run_directory.ended_status(run_dir).state is RunState.SUCCEEDED


def test_an_existing_run_directory_is_never_taken(run_dir: Path) -> None:
    with pytest.raises(LauncherError, match="exists already; it holds another run"):
        run_directory.make(run_dir.parent, run_dir.name)


def test_the_newest_whole_metrics_line_is_read(run_dir: Path) -> None:
    assert run_directory.last_metrics(run_dir) is None
    lines = [json.dumps({"step": step, "pad": "x" * 100}) for step in range(2000)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 2000, "lo')
    metrics = run_directory.last_metrics(run_dir)
    assert metrics is not None
    assert metrics["step"] == 1999
