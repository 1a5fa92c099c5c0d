"""How a run's log is read and followed: by attempt, node, rank, and point of a sweep."""

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from toolkit.cli.output import follow_lines
from toolkit.errors import LauncherError
from toolkit.runs.records.log_reader import (
    LogView,
    Span,
    Tail,
    all_spans,
    attempt_spans,
    follow_files,
    follow_points,
    read_points,
)
from toolkit.runs.records.registry import RunRecord
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus
from toolkit.text import untrusted


@pytest.fixture
def three_attempts(tmp_path: Path) -> Path:
    """As Slurm leaves them: two attempts in the job's log, and one that was made by hand."""
    log, by_hand = tmp_path / "logs/job.log", tmp_path / "by-hand.out"
    for number in range(3):
        (tmp_path / f"logs/attempt-{number}").mkdir(parents=True)
    log.write_text("zero\nstill zero\nfirst\n")
    by_hand.write_text("of another job\nsecond\n")
    (tmp_path / "logs/attempt-0/log").write_text(f"0 {log}\n")
    (tmp_path / "logs/attempt-1/log").write_text(f"16 {log}\n")
    (tmp_path / "logs/attempt-2/log").write_text(f"15 {by_hand}\n")
    return tmp_path


def read(spans: list[Span]) -> list[str]:
    return list(follow_files(lambda: spans, ended=lambda: True))


def test_each_attempt_is_read_from_where_its_lines_begin(three_attempts: Path) -> None:
    assert read(attempt_spans(three_attempts, 0)) == ["zero", "still zero"]
    assert read(attempt_spans(three_attempts, 1)) == ["first"]
    assert read(attempt_spans(three_attempts, 2)) == ["second"]
    assert read(attempt_spans(three_attempts, 3)) == []
    whole = read(all_spans(three_attempts, three_attempts / "logs/job.log"))
    assert whole == ["zero", "still zero", "first", "of another job", "second"]


def test_a_mirror_of_a_run_directory_is_read_like_the_directory(
    three_attempts: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mirror = tmp_path_factory.mktemp("mirror") / "run"
    shutil.copytree(three_attempts, mirror)
    log = three_attempts / "logs/job.log"
    log.write_text("of nobody")  # the noted path is one of another machine
    assert read(attempt_spans(mirror, 1)) == ["first"]
    assert [span.path for span in all_spans(mirror, mirror / "logs/job.log")] == [
        mirror / "logs/job.log",
        three_attempts / "by-hand.out",
    ]


def test_nodes_and_attempts_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for attempt in (0, 2, 10):
        folder = tmp_path / f"logs/attempt-{attempt}"
        folder.mkdir(parents=True)
        for node in (2, 10):
            (folder / f"node-{node}.log").write_text(f"{attempt}/{node}\n")
    spans = all_spans(tmp_path, tmp_path / "logs/launcher.log")
    assert read(spans) == ["0/2", "0/10", "2/2", "2/10", "10/2", "10/10"]


def test_a_follower_takes_whole_lines_and_the_torn_one_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail()
    assert list(tail.new_lines(path)) == []  # not there yet
    path.write_text("one\ntw")
    assert list(tail.new_lines(path)) == ["one"]
    path.write_text("one\ntwo\nthree")
    assert list(tail.new_lines(path)) == ["two"]
    path.write_text("new\n")  # another process has truncated it
    assert list(tail.new_lines(path)) == ["new"]
    path.write_bytes(b"new\n\xff\n" + b"x" * (3 << 18))
    assert list(tail.new_lines(path)) == ["\ufffd"]
    assert [len(line) for line in tail.last_words()] == [3 << 18]
    assert list(tail.last_words()) == []


def test_following_is_over_though_the_file_never_appears(tmp_path: Path) -> None:
    answers = iter([False, False, True])
    spans = [Span(path=tmp_path / "never")]
    assert list(follow_files(lambda: spans, ended=lambda: next(answers), pause_s=0)) == []


def test_a_view_takes_the_lines_of_its_ranks_only() -> None:
    lines = ["[rank 1] a", "[rank 10] b", "x [rank 1] c", "[rank 1]d", "e"]
    assert list(LogView(ranks=frozenset([1])).of_ranks(iter(lines))) == ["[rank 1] a"]
    assert list(LogView().of_ranks(iter(lines))) == lines


def test_a_line_whose_end_torchrun_has_passed_on_by_itself_is_whole_again() -> None:
    lines = ["[rank 0] a[rank 0] ", "[rank 1] b[rank 0] ", "[rank 1] ", "[rank 1] of [rank 0] c"]
    whole = ["[rank 0] a", "[rank 1] b", *lines[2:]]
    assert list(LogView().of_ranks(iter(lines))) == whole
    assert list(LogView(ranks=frozenset([1])).of_ranks(iter(lines))) == whole[1:]


class Point(Run):
    """A point with a given sequence of states."""

    def __init__(self, folder: Path, number: int, *states: RunState) -> None:
        name = f"probe-1/{number:04}-a={number}"
        uri = f"slurm://c/7_{number}"
        super().__init__(RunRecord(uri=uri, name=name, job="probe", profile={}, created=0.0))
        self.log = folder / f"{number}.log"
        self.states = list(states)
        self.opened = 0

    def status(self) -> RunStatus:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state is RunState.RUNNING:
            with self.log.open("a") as file:
                file.write("one\n" if not self.log.read_text() else "two\ntorn")
        return RunStatus(state=state)

    def spans(self, _: LogView) -> list[Span]:
        self.opened += 1
        return [Span(path=self.log)]

    def _lines(self, _: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        for reason in ("Priority", "Priority", "Resources"):
            on_status(RunStatus(state=RunState.PENDING, reason=reason))
        on_status(RunStatus(state=RunState.RUNNING))
        yield "begun"
        on_status(RunStatus(state=RunState.PENDING, reason="Resources"))
        on_status(RunStatus(state=RunState.UNKNOWN, reason="no answer"))
        on_status(RunStatus(state=RunState.FAILED))

    def cancel(self) -> None:
        raise AssertionError


def test_a_follower_is_told_what_the_run_waits_for_each_time_that_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Point(tmp_path, 7, RunState.PENDING)
    assert list(follow_lines(run)) == ["begun"]
    said = [
        "PENDING (Priority)",
        "PENDING (Resources)",
        "PENDING (Resources)",
        "UNKNOWN (no answer)",
    ]
    assert capsys.readouterr().err.splitlines() == [f"{run.name}: {line}" for line in said]


# ---- A sweep


class Sweep(Point):
    """All points are queried together."""

    members: Sequence[Point] = ()

    @property
    def points(self) -> Sequence[Point]:
        return self.members

    def sum_of(self, found: Sequence[RunStatus]) -> RunStatus:
        return RunStatus(state=RunState.RUNNING, reason=f"{len(found)} points")


def test_the_points_of_a_sweep_are_followed_until_all_have_ended(tmp_path: Path) -> None:
    waiting, running, over = RunState.PENDING, RunState.RUNNING, RunState.SUCCEEDED
    parts = [
        Point(tmp_path, 0, running, running, over),
        Point(tmp_path, 1, waiting, waiting, running, over),
        *(Point(tmp_path, number, waiting, waiting, waiting, over) for number in range(2, 300)),
    ]
    sweep = Sweep(tmp_path, 999, running)
    sweep.members = parts
    spans = {point.uri: point.spans for point in parts}
    said: list[str] = []
    found = list(
        follow_points(
            sweep,
            LogView(follow=True),
            spans,
            lambda status: said.append(status.reason),
            ask_every_s=0,
        )
    )
    assert found == [
        "[0000-a=0] one",
        "[0000-a=0] two",
        "[0000-a=0] torn",
        "[0001-a=1] one",
    ]
    assert said == ["300 points"] * 4
    # One that waits is looked at when it begins to, and when it has ended: never in between.
    assert max(point.opened for point in parts[2:]) == 2
    assert list(read_points(parts[:2], LogView(), spans)) == found


def test_a_disk_that_fails_is_an_error_and_not_the_end_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(untrusted, "open_untrusted", lambda *_, **__: Failing(b"x\n"))
    with pytest.raises(LauncherError, match="cannot be read: Input/output error"):
        list(Tail().new_lines(tmp_path / "job.log"))
