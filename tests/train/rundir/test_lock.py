"""One live group of processes per attempt: the second is refused, and no dead one blocks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.train.conftest import PATIENCE_S, ROOT
from train.checkpoints import store
from train.rundir import lock
from train.rundir.console import Console
from train.rundir.lock import NAME, Contender, Holder, Verdict
from train.runtime.rank import RankInfo

if TYPE_CHECKING:
    from tests.train.conftest import Start

FLAGS = ("--task=chars", "--global-batch=12", "--checkpoint-every=20")
ENDLESS = (*FLAGS, "--steps=100000")

# A process that locks a directory if it may, prints the result, and lives until it gets a line.
PROCESS = """
import fcntl, json, os, sys, time
from pathlib import Path
from train.rundir.console import Console
from train.runtime.rank import RankInfo
from train.rundir.lock import Contender

def unsupported(*arguments):
    raise OSError({errno}, "no locks available")

if {errno}:
    fcntl.lockf = unsupported
contender = Contender(Path(sys.argv[1]), RankInfo(**json.loads(sys.argv[2])), Console(rank=1))
while (verdict := contender.look(ended=None)) == "wait":
    time.sleep(0.01)
{then}
print(verdict, flush=True)
sys.stdin.read()
"""


FIRST = RankInfo()


def begin(
    path: Path, rank_info: RankInfo = FIRST, *, then: str = "", error: int = 0
) -> subprocess.Popen[str]:
    code = PROCESS.format(then=then, errno=error)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path), json.dumps(asdict(rank_info))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def living(
    path: Path, rank_info: RankInfo = FIRST, *, error: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the directory; dead at the end, at the latest."""
    with begin(path, rank_info, error=error) as process:
        assert answer(process) == "mine"
        yield process
        process.kill()


def contender(path: Path, rank_info: RankInfo = FIRST, *, elsewhere: bool = False) -> Contender:
    found = Contender(path, rank_info, Console(rank=1))
    if elsewhere:
        found.me = replace(found.me, host="elsewhere", boot="another")
    return found


def decide(contender: Contender, *, ended: tuple[int, int] | None = None) -> list[Verdict]:
    """The verdicts of all polls, each kind once; a lock that was taken is released."""
    deadline = time.monotonic() + PATIENCE_S
    verdicts = [contender.look(ended=ended)]
    while verdicts[-1] == "wait":
        assert time.monotonic() < deadline
        time.sleep(0.01)
        verdicts = ["wait", contender.look(ended=ended)]
    if contender.hold:
        contender.hold.close()
    return verdicts


def recorded(path: Path) -> Holder:
    content = json.loads(path.read_text())
    assert content.pop("version") == 1
    return Holder(**content)


@pytest.mark.slow
def test_a_second_start_is_refused_by_name_and_a_killed_one_is_followed(
    start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    first = start.ranks(2, *ENDLESS, run_dir=run_dir)
    # Its own reads and writes meanwhile do not make it lose its lock.
    first.wait_until(lambda: any(e["event"] == "checkpoint" for e in first.events()))
    held = recorded(run_dir / NAME)
    assert held.pid == first.workers()[0]
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(held.since))
    refusal = (
        f"train: {run_dir} is in use: rank 0 of attempt 0 is process {held.pid} on "
        f"{socket.gethostname()} since {since} UTC; stop that run first, use another --run-dir, or "
        "take the run over from it with TRAIN_ATTEMPT=1\n"
    )
    again = ("--standalone", "--max-restarts=1")
    # torchrun counts a restart of its own, which is no restart of the first one.
    second = start.ranks(1, *ENDLESS, run_dir=run_dir, torchrun=again).finish(1)
    assert second.output().count(refusal) == 2
    assert second.output().count("exitcode  : 2") == 1
    assert start.single(*ENDLESS, run_dir=run_dir).finish(2).output() == refusal
    assert first.process.poll() is None
    assert first.outcome()["status"] == "running"
    assert [e["event"] for e in first.events()].count("start") == 1
    first.end()
    best = store.list_committed(run_dir)[0]
    third = start.single(*FLAGS, f"--steps={best.step + 2}", run_dir=run_dir).finish()
    assert [e["step"] for e in third.events() if e["event"] == "resume"] == [best.step]
    assert third.outcome()["status"] == "done"


def test_a_newer_attempt_is_not_blocked_by_one_that_hangs_and_holds(
    start: Start, tmp_path: Path
) -> None:
    old = start.single(*ENDLESS, run_dir=tmp_path / "run")
    old.wait_for_step(1)
    old.process.send_signal(signal.SIGSTOP)
    new = start.single(*FLAGS, "--steps=2", run_dir=old.run_dir, attempt=1).finish()
    outcome = new.outcome()
    assert (outcome["status"], outcome["attempt"]) == ("done", 1)
    assert recorded(old.run_dir / NAME).pid == new.process.pid
    old.process.send_signal(signal.SIGCONT)
    old.finish(1)
    assert "attempt 0 writes no more: a newer attempt has taken over" in old.output()
    assert new.outcome() == outcome


def test_who_was_given_up_by_torchrun_writes_no_more(start: Start, tmp_path: Path) -> None:
    """Its node was cut off from the others, not from the disk: same attempt, same rendezvous."""
    run = start.single(*ENDLESS, run_dir=tmp_path / "run", TORCHELASTIC_RUN_ID="job-7")
    run.wait_for_step(1)
    assert decide(contender(run.run_dir / NAME, RankInfo(launch="job-7"), elsewhere=True)) == [
        "mine"
    ]
    run.finish(1)
    assert "attempt 0 writes no more: a later start of it has taken over" in run.output()
    assert run.outcome()["status"] == "running"


def test_whose_draft_a_newer_attempt_removes_says_that_it_is_fenced(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from train import __main__\n"
        "from train.checkpoints import store\n"
        "complete = store.write_manifest\n"
        "def wait(*arguments):\n"
        "    while not Path('go').exists():\n"
        "        time.sleep(0.01)\n"
        "    complete(*arguments)\n"
        "store.write_manifest = wait\n"
        "__main__.enter()\n"
    )
    old = start.single(*ENDLESS, run_dir=tmp_path / "run", script="slow.py")
    draft = store.Position(attempt=0, step=20).draft(old.run_dir)
    old.wait_until(lambda: (draft / store.tensor_file(0)).exists())
    start.single(*FLAGS, "--steps=2", run_dir=old.run_dir, attempt=1).finish()
    assert not draft.exists()
    (tmp_path / "go").touch()
    old.finish(1)
    assert "attempt 0 writes no more: a newer attempt has taken over" in old.output()


def test_a_holder_that_lives_is_seen_here_and_from_other_machines(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with living(path, RankInfo(attempt=2)):
        elsewhere = contender(path, RankInfo(attempt=2), elsewhere=True)
        assert decide(elsewhere) == ["wait", "taken"]
        assert elsewhere.holder == recorded(path)
        assert decide(contender(path, RankInfo(attempt=1))) == ["wait", "taken"]
        assert decide(contender(path, RankInfo(attempt=2, launch="another"))) == ["wait", "taken"]
        assert decide(contender(path, RankInfo(attempt=3))) == ["mine"]


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(handle: int, command: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_a_holder_that_lives_is_seen_by_the_time_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    path = tmp_path / NAME
    with living(path, error=error):
        # Each machine has locks of its own, and grants this one.
        assert decide(contender(path, elsewhere=True)) == ["wait", "taken"]
        no_locks(monkeypatch)
        assert decide(contender(path)) == ["wait", "taken"]


def test_the_same_rendezvous_on_the_same_machine_is_no_reason_to_run_twice(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with living(path, RankInfo(launch="job-7")):
        assert decide(contender(path, RankInfo(launch="job-7", restart=1))) == ["wait", "taken"]
        assert decide(contender(path, RankInfo(launch="job-7"), elsewhere=True)) == ["mine"]


def test_a_killed_holder_is_followed_at_once_though_its_children_live(tmp_path: Path) -> None:
    path = tmp_path / NAME
    child = "if (child := os.fork()) == 0: sys.stdin.read(); os._exit(0)"
    with begin(path, then=f"{child}\nprint(child)") as process:
        child_pid = int(answer(process))
        assert answer(process) == "mine"
        process.kill()
        process.wait()
        assert decide(contender(path)) == ["mine"]
        os.kill(child_pid, 0)


@pytest.mark.parametrize(
    ("rank_info", "ended", "at_once"),
    [
        (FIRST, None, False),
        (FIRST, (0, 1), False),
        (RankInfo(launch="job-8"), None, False),
        # Its record shows that waiting is needless.
        (FIRST, (0, 0), True),
        (RankInfo(launch="job-7"), None, True),
        (RankInfo(attempt=1), None, True),
    ],
)
def test_a_machine_without_power_blocks_for_a_while_at_most(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank_info: RankInfo,
    ended: tuple[int, int] | None,
    at_once: bool,
) -> None:
    """A server that has not heard of its end may hold its lock for ever."""
    monkeypatch.setattr(lock, "PATIENCE_S", 0.3)
    path = tmp_path / NAME
    dead = replace(Holder.here(RankInfo(launch="job-7")), host="node7", boot="before")
    path.write_text(json.dumps({"version": 1, **asdict(dead)}))
    server = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    argv, pipe = [sys.executable, "-c", server, str(path)], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        assert answer(process) == "locked"
        assert decide(contender(path, rank_info), ended=ended) == (
            ["mine"] if at_once else ["wait", "mine"]
        )


def test_without_locks_a_killed_holder_blocks_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / NAME
    with living(path, error=errno.ENOLCK):
        pass
    monkeypatch.setattr(lock, "PATIENCE_S", 0.3)
    no_locks(monkeypatch)
    next_one = Contender(path, RankInfo(), Console(rank=0))
    assert decide(next_one) == ["wait", "mine"]
    said = capsys.readouterr()
    assert said.out.endswith("waiting 0.3 s for a sign of its life\n")
    assert said.err == (
        f"train: warning: {tmp_path} knows no file locks; a second start of this attempt is "
        "noticed by the time of holder.json only\n"
    )


@pytest.mark.parametrize("left", [None, "", "{", '{"version": 1}'])
def test_of_many_that_come_at_once_one_stays(tmp_path: Path, left: str | None) -> None:
    path = tmp_path / NAME
    if left is not None:
        path.write_text(left)
    with ExitStack() as stack:
        started = [stack.enter_context(begin(path)) for _ in range(5)]
        assert sorted(map(answer, started)) == ["mine", *["taken"] * 4]
        for process in started:
            process.kill()


def test_who_has_opened_a_file_that_is_replaced_now_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / NAME
    with ExitStack() as stack:
        in_time = lock._lock

        def lock_too_late(handle: int) -> lock.Lock:
            monkeypatch.undo()
            stack.enter_context(living(path))
            return in_time(handle)

        monkeypatch.setattr(lock, "_lock", lock_too_late)
        assert decide(contender(path)) == ["wait", "taken"]


def test_who_is_replaced_knows_at_once(tmp_path: Path) -> None:
    first, second = contender(tmp_path / NAME), contender(tmp_path / NAME, RankInfo(attempt=1))
    assert first.look(ended=None) == second.look(ended=None) == "mine"
    assert first.hold and second.hold
    with closing(first.hold), closing(second.hold):
        assert first.hold.lost()
        assert not second.hold.lost()
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME]
