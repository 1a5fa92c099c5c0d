"""What people see of a run's log, and which rank they are told has failed first: real torchruns."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT
from toolkit.cli.following import follow_lines
from toolkit.launchers.base import Run, RunState, RunStatus
from toolkit.launchers.failures import Failure, first_failure
from toolkit.launchers.registry import RunRecord
from toolkit.launchers.run_logs import LogView, Span, Tail, all_spans, attempt_spans, follow_files
from toolkit.launchers.sweep_logs import follow_points, read_points

# A script as people write it: no @record. Rank 1 fails, and rank 0 loses it in a collective. None
# ends before both have said why: run.sh would end whoever is late.
PLAIN = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} has begun\\n", end="", flush=True)
dist.barrier()
told = [Path(os.environ["TRAIN_RUN_DIR"], f"told-{n}") for n in (0, 1)]
show = sys.excepthook
def tell(*error):
    show(*error)
    if rank == 1:
        dist.destroy_process_group()
    told[rank].touch()
    while not told[1 - rank].exists():
        time.sleep(0.01)
sys.excepthook = tell
if rank == 1:
    raise ValueError("a sample without a label\\nthe second line")
dist.all_reduce(torch.ones(4))
"""

# A torchrun that ends only when that of the other node has reported, too: run.sh, which ends all as
# soon as it sees one end, comes too late.
REPORTING = f"""#!/bin/bash
{TOOLKIT.parent}/torchrun "$@"
status=$?
touch "$TRAIN_RUN_DIR/reported-$$"
until [ "$(compgen -G "$TRAIN_RUN_DIR/reported-*" | wc -l)" = 2 ]; do sleep 0.05; done
exit "$status"
"""

# All ranks leave error files, and rank 0, which has only lost rank 1, does so first; it ends when
# rank 1 has said why. It all happens twice.
RECORDED = """
import json, os, sys, time
from pathlib import Path
from torch.distributed.elastic.multiprocessing.errors import record
restart, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
told = Path(os.environ["TRAIN_RUN_DIR"], "told-" + restart)
first = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.with_name("0") / "error.json"
def is_later():  # as torchrun dates it, too: in whole seconds
    try:
        said = json.loads(first.read_text())["message"]["extraInfo"]
        return int(time.time()) > int(said["timestamp"])
    except (OSError, ValueError):
        return False
def until(condition):
    while not condition():
        time.sleep(0.01)
def tell(*error):
    sys.__excepthook__(*error)
    if rank == "1":
        told.touch()
    until(told.exists)
sys.excepthook = tell
@record
def main():
    if rank == "0":
        raise RuntimeError("Connection closed by peer [192.0.2.1]:1")
    until(is_later)
    raise ValueError(f"boom {restart} with {os.environ['PROBE_TOKEN']}")
main()
"""

# No torch: torchrun's report alone tells what happened.
KILLED = """
import os, signal, time
if os.environ["RANK"] == "1":
    print("the last words of rank 1", file=__import__("sys").stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
"""

Fail = Callable[..., toolkit.Run]


@pytest.fixture(scope="module")
def fail(tmp_path_factory: pytest.TempPathFactory) -> Fail:
    """Run a script on this machine until it has failed."""

    def run(script: str, *, command: tuple[str, ...] = (), **keys: object) -> toolkit.Run:
        folder = tmp_path_factory.mktemp("run")
        (folder / "script.py").write_text(script)
        job = {"name": "probe", "stop": {"grace": "5s"}, "env": {"OMP_NUM_THREADS": "1"}} | keys
        job |= {"command": command} if command else {"script": str(folder / "script.py")}
        profile = toolkit.LocalProfile(name="here", runs_dir=str(folder / "runs"))
        made = toolkit.submit(toolkit.JobSpec.model_validate(job), to=profile)
        assert made.wait(180).state is toolkit.RunState.FAILED
        return made

    return run


@pytest.fixture(scope="module", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("PROBE_TOKEN", "s3cretvalue")
        yield


@pytest.fixture(scope="module")
def plain(fail: Fail, tmp_path_factory: pytest.TempPathFactory) -> toolkit.Run:
    folder = tmp_path_factory.mktemp("reporting")
    (folder / "torchrun").write_text(REPORTING)
    (folder / "torchrun").chmod(0o755)
    env = {"OMP_NUM_THREADS": "1", "PATH": f"{folder}:{os.environ['PATH']}"}
    return fail(PLAIN, resources={"nnodes": 2}, env=env)


@pytest.fixture(scope="module")
def recorded(fail: Fail) -> toolkit.Run:
    return fail(
        RECORDED,
        resources={"nproc_per_node": 2},
        retries={"in_job": 1},
        secrets=["PROBE_TOKEN"],
    )


def copy_of(run: toolkit.Run, folder: Path) -> Path:
    assert run.run_dir is not None
    shutil.copytree(run.run_dir, folder / "copy")
    return folder / "copy"


def program(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([TOOLKIT, *argv], capture_output=True, text=True, check=False, cwd=ROOT)


def failure_of(run: toolkit.Run) -> Failure:
    found = run.failure()
    assert found is not None
    return found


# ---- Which rank has failed first


def test_a_plain_script_has_its_first_traceback_shown_last(plain: toolkit.Run) -> None:
    failure = failure_of(plain)
    assert (failure.kind, failure.rank, failure.node) == ("exception", 1, "node-1")
    assert failure.traceback[0] == "Traceback (most recent call last):"
    assert failure.traceback[-2:] == ("ValueError: a sample without a label", "the second line")
    done = program("logs", str(plain.run_dir))
    assert done.returncode == 0
    assert done.stdout.splitlines() == list(plain.logs())
    *_, said, last = done.stderr.splitlines()
    assert (said, last) == failure.traceback[-2:]
    assert re.match(
        r"first failure, in attempt 0, \d\d:\d\d:\d\d: rank 1 on node-1: ValueError: a sample",
        done.stderr,
    )
    assert "all_reduce" in done.stdout  # rank 0's traceback, which is another one
    assert "all_reduce" not in done.stderr


def test_status_names_the_rank_in_a_line(plain: toolkit.Run) -> None:
    said = "rank 1 on node-1: ValueError: a sample without a label"
    assert f"first failure: {said}\n" in program("status", str(plain.run_dir)).stdout
    shown = json.loads(program("status", str(plain.run_dir), "--json").stdout)["failure"]
    assert (shown["summary"], shown["rank"], shown["node"]) == (said, 1, "node-1")


def test_following_and_waiting_end_with_the_same_traceback(plain: toolkit.Run) -> None:
    for argv in (["logs", "-f"], ["wait"]):
        done = program(*argv, str(plain.run_dir))
        *_, said, last = [line for line in done.stderr.splitlines() if "FAILED" not in line]
        assert (said, last) == failure_of(plain).traceback[-2:]


def test_error_files_of_the_last_restart_count_and_earlier_ones_are_named(
    recorded: toolkit.Run,
) -> None:
    failure = failure_of(recorded)
    assert (failure.kind, failure.rank, failure.restart) == ("exception", 1, 1)
    assert failure.message == "ValueError: boom 1 with ***PROBE_TOKEN***"
    assert failure.traceback[-1] == failure.message
    (earlier,) = failure.earlier
    assert (earlier.rank, earlier.restart) == (1, 0)
    assert earlier.message == "ValueError: boom 0 with ***PROBE_TOKEN***"
    lines = list(failure.lines())
    assert lines[0].startswith("earlier failure, in attempt 0, restart 0, ")
    assert lines[1].startswith("first failure, in attempt 0, restart 1")


def test_in_job_restarts_stand_in_their_order(recorded: toolkit.Run) -> None:
    text = "\n".join(recorded.logs(ranks=[1]))
    assert 0 < text.index("boom 0") < text.index("boom 1")
    assert "s3cretvalue" not in text


def test_a_killed_rank_is_told_by_its_signal_and_its_last_words(fail: Fail) -> None:
    run = fail(KILLED, resources={"nproc_per_node": 2})
    failure = failure_of(run)
    assert (failure.kind, failure.rank) == ("signal", 1)
    assert str(failure) == "rank 1 on node-0: killed by SIGKILL"
    assert failure.traceback == ("the last words of rank 1",)
    assert run.run_dir is not None
    (run.run_dir / "logs/attempt-0/oom-0").write_text("here\n")
    assert failure_of(run).message.endswith("killed a process there for want of memory")


def test_a_program_that_is_no_python_is_told_by_its_status(fail: Fail) -> None:
    run = fail("", command=("bash", "-c", "echo no such model >&2; exit 3"))
    assert str(failure_of(run)) == "rank 0 on node-0: exit status 3: no such model"


def test_a_script_that_python_cannot_read_is_told_too(fail: Fail) -> None:
    failure = failure_of(fail("x = (\n"))
    assert failure.message == "SyntaxError: '(' was never closed"
    assert failure.traceback[1] == "    x = ("


def test_a_rank_whose_torchrun_was_ended_before_it_could_report_is_found(
    plain: toolkit.Run, tmp_path: Path
) -> None:
    """As when srun ends all, because another node has failed of it first."""
    run_dir = copy_of(plain, tmp_path)
    log = run_dir / "logs/attempt-0/node-1.log"
    before, *reported = re.split(r"(?m)^E\d{4} ", log.read_text())  # by the month and the day
    assert reported
    log.write_text(before)
    found = first_failure(run_dir)
    assert found is not None
    assert (found.rank, found.message) == (1, "ValueError: a sample without a label")
    # A traceback that was printed hours before, and survived, is no failure.
    (stderr,) = run_dir.glob("logs/attempt-0/node-1/*/attempt_0/0/stderr.log")
    os.utime(stderr, (0, 0))
    found = first_failure(run_dir)
    assert found is not None
    assert (found.rank, found.kind) == (0, "echo")
    assert "rank 0 on node-0 has lost another rank, which left no word" in str(found)


@pytest.mark.parametrize("word", ["cancelled", "preempted", "walltime", "done"])
def test_what_was_stopped_has_not_failed(word: str, plain: toolkit.Run, tmp_path: Path) -> None:
    run_dir = copy_of(plain, tmp_path)
    (run_dir / "logs/attempt-0/reason").write_text(f"{word}: by somebody\n")
    assert first_failure(run_dir) is None


def test_an_attempt_that_only_gave_up_leaves_the_failure_of_the_one_before(
    plain: toolkit.Run, tmp_path: Path
) -> None:
    run_dir = copy_of(plain, tmp_path)
    newest = run_dir / "logs/attempt-1"
    newest.mkdir()
    assert first_failure(run_dir) is None  # it has begun, and not failed
    (newest / "reason").write_text("gave_up: after 3 requeues\n")
    found = first_failure(run_dir)
    assert found is not None
    assert found.attempt == 0


def test_a_container_in_another_time_zone_does_not_change_who_was_first(tmp_path: Path) -> None:
    """torchrun reports local time, and dates in error files are of no zone."""
    attempt = tmp_path / "logs/attempt-0"
    for rank, error in ((0, "ValueError: first"), (1, None)):
        folder = attempt / f"node-0/x_1/attempt_0/{rank}"
        folder.mkdir(parents=True)
        if error:
            stamp = {"timestamp": "1795304824", "py_callstack": ""}
            said = {"message": {"message": error, "extraInfo": stamp}}
            (folder / "error.json").write_text(json.dumps(said))
    ninety_minutes_west = 1795304824 - 5400
    lines = []
    for rank, code, after in ((1, -9, 30), (0, 1, 0)):
        date = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(ninety_minutes_west + after))
        path = attempt / f"node-0/x_1/attempt_0/{rank}/error.json" if rank == 0 else "<N/A>"
        lines += [
            f"  time      : {date}",
            "  host      : elsewhere.example.org",
            f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : {code} (pid: 5) ",
            f"  error_file: {path}",
            "  traceback : Signal",
        ]
    (attempt / "node-0.log").write_text("\n".join(lines))
    found = first_failure(tmp_path)
    assert found is not None
    assert (found.rank, found.message) == (0, "ValueError: first")


# ---- Which lines are shown


def test_lines_are_filtered_by_rank_and_pattern(plain: toolkit.Run) -> None:
    assert list(plain.logs(grep="has begun")) == [
        "[rank 0] rank 0 has begun",
        "[rank 1] rank 1 has begun",
    ]
    assert list(plain.logs(ranks=[1], grep="^.rank 1. rank . has")) == ["[rank 1] rank 1 has begun"]
    assert all(line.startswith("[rank 0] ") for line in plain.logs(ranks=[0]))
    both = program("logs", str(plain.run_dir), "--rank", "0", "--rank", "1", "--grep", "begun")
    assert len(both.stdout.splitlines()) == 2
    none = program("logs", str(plain.run_dir), "--rank", "7")
    assert (none.returncode, none.stdout) == (0, "")
    assert f"no such line in what {plain.name} has printed\n" in none.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--grep", "a["], "--grep a[: no regular expression: unterminated character set at pos"),
        (["--attempt", "3"], "--attempt 3: there are 0 to 0 of it\n"),
        (["--rank", "-1"], "Error: Invalid value for '--rank'"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_status_2(
    plain: toolkit.Run, argv: list[str], message: str
) -> None:
    done = program("logs", str(plain.run_dir), *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_secret_cannot_be_looked_for(recorded: toolkit.Run) -> None:
    assert list(recorded.logs(grep="s3cret")) == []


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
    path.write_text("new\n")  # somebody has emptied it
    assert list(tail.new_lines(path)) == ["new"]
    path.write_bytes(b"new\n\xff\n" + b"x" * (3 << 20))
    assert list(tail.new_lines(path)) == ["\ufffd"]
    assert [len(line) for line in tail.last_words()] == [3 << 20]
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
    """A point whose states are told one after the other."""

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
    """Its points are asked all at once."""

    parts: Sequence[Point] = ()

    @property
    def points(self) -> Sequence[Point]:
        return self.parts

    def sum_of(self, found: Sequence[RunStatus]) -> RunStatus:
        return RunStatus(state=RunState.RUNNING, reason=f"{len(found)} points")


def spans_of(run: Run, view: LogView) -> list[Span]:
    assert isinstance(run, Point)
    return run.spans(view)


def test_the_points_of_a_sweep_are_followed_until_all_have_ended(tmp_path: Path) -> None:
    waiting, running, over = RunState.PENDING, RunState.RUNNING, RunState.SUCCEEDED
    parts = [
        Point(tmp_path, 0, running, running, over),
        Point(tmp_path, 1, waiting, waiting, running, over),
        *(Point(tmp_path, number, waiting, waiting, waiting, over) for number in range(2, 300)),
    ]
    sweep = Sweep(tmp_path, 999, running)
    sweep.parts = parts
    said: list[str] = []
    found = list(
        follow_points(
            sweep,
            LogView(follow=True),
            spans_of,
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
    assert list(read_points(parts[:2], LogView(), spans_of)) == found
