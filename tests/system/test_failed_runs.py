"""What people see of a run that has failed, and which rank was the first to: real torchruns."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT
from toolkit.runs.evidence.failure import Failure, first_failure

# A script as people write it: no @record. Rank 1 fails, and rank 0 loses it in a collective. None
# ends before both have printed their errors: run.sh would end the later one.
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
# rank 1 has printed its error. All of this happens twice.
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

# No torch: the only evidence is torchrun's report.
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


@pytest.mark.slow
def test_a_killed_rank_is_told_by_its_signal_and_its_last_words(fail: Fail) -> None:
    run = fail(KILLED, resources={"nproc_per_node": 2})
    failure = failure_of(run)
    assert (failure.kind, failure.rank) == ("signal", 1)
    assert str(failure) == "rank 1 on node-0: killed by SIGKILL"
    assert failure.traceback == ("the last words of rank 1",)
    assert run.run_dir is not None
    (run.run_dir / "logs/attempt-0/oom-0").write_text("here\n")
    assert failure_of(run).message.endswith("killed a process there for want of memory")


@pytest.mark.slow
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


def test_what_is_done_has_not_failed(plain: toolkit.Run, tmp_path: Path) -> None:
    run_dir = copy_of(plain, tmp_path)
    (run_dir / "logs/attempt-0/reason").write_text("done: all steps made\n")
    assert first_failure(run_dir) is None


@pytest.mark.parametrize("word", ["cancelled", "preempted", "walltime"])
@pytest.mark.parametrize("kind", ["echo", "signal"])
def test_what_was_stopped_has_not_failed(
    word: str, kind: str, plain: toolkit.Run, tmp_path: Path
) -> None:
    """Its ranks were killed, or have lost each other; none has raised anything of its own."""
    run_dir = copy_of(plain, tmp_path)
    (run_dir / "logs/attempt-0/reason").write_text(f"{word}: by somebody\n")
    lost = "RuntimeError: Connection closed by peer" if kind == "echo" else ""
    for stderr in run_dir.glob("logs/attempt-0/node-*/*/attempt_0/0/stderr.log"):
        stderr.write_text(f"Traceback (most recent call last):\n  x\n{lost}\n" if lost else "")
    assert first_failure(run_dir) is None


@pytest.mark.parametrize("word", ["cancelled", "preempted", "walltime"])
def test_an_exception_that_a_rank_raises_while_it_is_stopped_is_told(
    word: str, plain: toolkit.Run, tmp_path: Path
) -> None:
    run_dir = copy_of(plain, tmp_path)
    (run_dir / "logs/attempt-0/reason").write_text(f"{word}: by somebody\n")
    found = first_failure(run_dir)
    assert found is not None
    assert found.message == "ValueError: a sample without a label"


@pytest.mark.parametrize("outcome", ["fatal", "retryable"])
def test_what_failed_while_it_was_being_stopped_is_told(
    outcome: str, plain: toolkit.Run, tmp_path: Path
) -> None:
    """The script of a job without restarts knows only that it was stopped."""
    run_dir = copy_of(plain, tmp_path)
    (run_dir / "logs/attempt-0/reason").write_text("walltime: out of time\n")
    (run_dir / "outcome.json").write_text(json.dumps({"status": outcome, "attempt": 0}))
    assert first_failure(run_dir) is not None


def test_an_attempt_that_only_gave_up_leaves_the_failure_of_the_one_before(
    plain: toolkit.Run, tmp_path: Path
) -> None:
    run_dir = copy_of(plain, tmp_path)
    newest = run_dir / "logs/attempt-1"
    newest.mkdir()
    assert first_failure(run_dir) is None  # it is running, and has not failed
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
    assert f"no such line in the output of {plain.name}\n" in none.stderr


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
