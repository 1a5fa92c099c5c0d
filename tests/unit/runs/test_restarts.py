"""What has interrupted a run: the restarts of torchrun, and attempts that others have followed."""

import json
import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.told_run import run_at
from toolkit.cli.summary import point_text, rows_of, summary_of
from toolkit.runs.evidence.restarts import count_restarts, in_words, restarts_in
from toolkit.runs.state import RunState, RunStatus
from toolkit.text.secret_scan import Mask

NOON = datetime(2026, 11, 28, 12).timestamp()


def start(attempt: Path, restart: int, *, at: float, node: str = "node-0", error: str = "") -> None:
    """Leave what torchrun leaves of a start of a rank, at so many seconds past noon."""
    rank = attempt / f"{node}/7_x/attempt_{restart}/0"
    rank.mkdir(parents=True)
    (rank / "stderr.log").touch()
    if error:
        content = {"message": {"message": error, "extraInfo": {"timestamp": str(NOON + at + 5)}}}
        (rank / "error.json").write_text(json.dumps(content))
        os.utime(rank / "error.json", (NOON + at + 5,) * 2)
    os.utime(rank.parent, (NOON + at,) * 2)


def ended(attempt: Path, *, at: float, reason: str) -> None:
    for name, text in (("exit_status", "1"), ("reason", reason)):
        (attempt / name).write_text(f"{text}\n")
        os.utime(attempt / name, (NOON + at,) * 2)


@pytest.fixture
def attempts(tmp_path: Path) -> list[Path]:
    """The folders of two attempts."""
    folders = [tmp_path / f"logs/attempt-{number}" for number in range(2)]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def test_a_run_without_interruptions_has_none(attempts: list[Path], tmp_path: Path) -> None:
    start(attempts[0], 0, at=0)
    attempts[1].rmdir()
    assert (restarts_in(tmp_path), in_words([])) == ([], "")
    assert restarts_in(tmp_path / "nothing") == []


def test_a_rank_that_torchrun_has_started_again_is_named(
    attempts: list[Path], tmp_path: Path
) -> None:
    attempts[1].rmdir()
    start(attempts[0], 0, at=0)
    start(attempts[0], 1, at=70)
    failed = "failed (exitcode: -9) local_rank: 0 (pid: 9)"
    log = f"[rank 0] x\nE1128 12:00:10.500000 7 torch/x.py:1] {failed}\n"
    (attempts[0] / "node-0.log").write_text(f"{log}Exxxx failed (exitcode: 1)\n")
    os.utime(attempts[0], (NOON + 70,) * 2)
    (one,) = restarts_in(tmp_path)
    assert (one.attempt, one.restart, one.time, one.away_s) == (0, 0, NOON + 10.5, 59.5)
    assert in_words([one]) == (
        "1 restart: local rank 0 on node-0: killed by SIGKILL at 12:00, 59.5 s until the next start"
    )


def test_a_rank_that_was_killed_is_named_before_one_that_has_lost_it(
    attempts: list[Path], tmp_path: Path
) -> None:
    attempts[1].rmdir()
    lost = "RuntimeError: Connection reset by peer"
    for node, code, second, error in (("node-0", 1, "11", lost), ("node-1", -9, "10", "")):
        start(attempts[0], 0, at=0, node=node, error=error)
        start(attempts[0], 1, at=70, node=node)
        failed = f"failed (exitcode: {code}) local_rank: 0 (pid: 9)"
        log = f"E1128 12:00:{second}.500000 7 torch/x.py:1] {failed}\n"
        (attempts[0] / f"{node}.log").write_text(log)
    os.utime(attempts[0], (NOON + 70,) * 2)
    (one,) = restarts_in(tmp_path)
    assert (one.why, one.away_s) == ("local rank 0 on node-1: killed by SIGKILL", 59.5)


def test_an_exception_is_named_before_what_torchrun_has_logged(
    attempts: list[Path], tmp_path: Path
) -> None:
    attempts[1].rmdir()
    start(attempts[0], 0, at=0, error="ValueError: bad luck with a-secret-value")
    start(attempts[0], 1, at=70)
    (one,) = restarts_in(tmp_path, Mask([("KEY", "a-secret-value")]))
    assert "ValueError: bad luck with ***KEY***" in one.why


def test_attempts_that_others_have_followed_are_told_with_their_reasons(
    attempts: list[Path], tmp_path: Path
) -> None:
    start(attempts[0], 0, at=0)
    ended(attempts[0], at=30, reason="preempted: Slurm has taken the nodes; queued again")
    start(attempts[1], 0, at=150)
    (one,) = restarts_in(tmp_path)
    assert str(one) == (
        "preempted: Slurm has taken the nodes at 12:00, 2 min 0 s until the next start"
    )
    assert in_words([one, one]) == f"2 restarts, 4 min 0 s in all; the last: {one}"


def test_what_the_supervisor_has_judged_counts_before_what_a_rank_has_left(
    attempts: list[Path], tmp_path: Path
) -> None:
    start(attempts[0], 0, at=0, error="ValueError: echo")
    start(attempts[1], 0, at=150)
    for reason, why in {
        "retryable: torchrun was killed on n1; queued again": "torchrun was killed on n1",
        "retryable: queued again": "ValueError: echo",
    }.items():
        ended(attempts[0], at=30, reason=reason)
        assert restarts_in(tmp_path)[0].why.startswith("failed: ")
        assert restarts_in(tmp_path)[0].why.endswith(why)


@pytest.mark.parametrize("names", [("node-0", "node-1"), ("x-worker-0", "x-worker-1")])
def test_nodes_that_fail_in_turn_are_counted_together(
    names: tuple[str, str], attempts: list[Path], tmp_path: Path
) -> None:
    """Each node counts its own failures only, and repeats its last number after those of others."""
    attempts[1].rmdir()
    one, two = names
    start(attempts[0], 0, at=0, node=one, error="ValueError: one")
    start(attempts[0], 0, at=60.5, node=two, error="ValueError: two")
    start(attempts[0], 1, at=90, node=one, error="ValueError: three")
    start(attempts[0], 1, at=120.2, node=two)
    start(attempts[0], 2, at=120, node=one)
    found = restarts_in(tmp_path)
    assert [(one.restart, one.time - NOON, one.away_s) for one in found] == [
        (0, 5, 55.5),
        (1, 65.5, 24.5),
        (2, 95, 25),
    ]
    assert [one.why.partition("ValueError: ")[2] for one in found] == ["one", "two", "three"]
    assert count_restarts(tmp_path) == 3
    (tmp_path / "logs/attempt-1").mkdir()
    assert count_restarts(tmp_path) == 4


def test_list_and_the_points_of_a_sweep_tell_how_often_the_ranks_were_started_again(
    attempts: list[Path], tmp_path: Path
) -> None:
    start(attempts[0], 0, at=0)
    start(attempts[0], 1, at=70)
    run, sweep, untouched = run_at(tmp_path), run_at(tmp_path / "none"), run_at(None)
    sweep.members = [run]
    run.told = untouched.told = RunStatus(state=RunState.SUCCEEDED)
    for brief in (True, False):
        rows = rows_of([run, untouched], brief=brief)
        assert [row["restarts"] for row in rows] == [{"count": 2}, None]
    (point,) = summary_of(sweep)["points"]
    assert point["restarts"] == {"count": 2}
    assert point_text(point) == "2 restarts"


def test_torn_and_foreign_lines_are_no_restart(attempts: list[Path], tmp_path: Path) -> None:
    start(attempts[0], 0, at=0)
    start(attempts[0], 3, at=50)  # torchrun's folders in between are gone
    ended(attempts[0], at=30, reason="")
    (attempts[0] / "node-0.log").write_text(
        "E9999 99:99:99.9 7 x] failed (exitcode: -9) local_rank: 0 (pid: 1)\n"
    )
    found = restarts_in(tmp_path)
    assert [one.attempt for one in found] == [0, 0]
    assert all(one.away_s >= 0 for one in found)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Europe/Berlin", "Asia/Kolkata"])
def test_the_clock_of_the_nodes_may_have_another_zone(
    zone: str, attempts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts[1].rmdir()
    start(attempts[0], 0, at=-7200)
    start(attempts[0], 1, at=70)
    failed = "failed (exitcode: -9) local_rank: 0 (pid: 9)"
    (attempts[0] / "node-1.log").write_text(f"E1128 12:00:10.500000 7 torch/x.py:1] {failed}\n")
    os.utime(attempts[0], (NOON,) * 2)
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        (one,) = restarts_in(tmp_path)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert (one.why, one.away_s) == ("local rank 0 on node-1: killed by SIGKILL", 59.5)


def test_a_script_that_was_killed_with_its_node_ended_at_its_last_sign_of_life(
    attempts: list[Path], tmp_path: Path
) -> None:
    start(attempts[0], 0, at=0)
    (attempts[0] / "alive-0").touch()
    os.utime(attempts[0] / "alive-0", (NOON + 1800,) * 2)
    os.utime(attempts[0] / "node-0/7_x/attempt_0/0/stderr.log", (NOON + 1790,) * 2)
    start(attempts[1], 0, at=45000)
    assert restarts_in(tmp_path)[0].away_s == 43200
    (attempts[0] / "reason").write_text("node_failure: down: n1; killed before it could say so\n")
    os.utime(attempts[0] / "reason", (NOON + 44980,) * 2)  # by the next script
    assert restarts_in(tmp_path)[0].away_s == 43200


def test_a_log_that_was_deleted_hides_no_restart(attempts: list[Path], tmp_path: Path) -> None:
    attempts[1].rmdir()
    start(attempts[0], 0, at=0)
    start(attempts[0], 1, at=70)
    (attempts[0] / "log").write_text(f"0 {tmp_path}/logs/job.log\n")
    assert [one.why for one in restarts_in(tmp_path)] == ["unknown"]
