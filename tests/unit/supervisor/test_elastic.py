"""A job with a variable number of nodes: the others do not wait for one that is gone."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from tests.conftest import Until
from toolkit.supervisor import elastic, node
from toolkit.supervisor.attempt import Attempt
from toolkit.supervisor.elastic import Members
from toolkit.supervisor.evidence import first_error
from toolkit.supervisor.process import Signals
from toolkit.supervisor.schedulers import slurm
from toolkit.supervisor.signs_of_life import SILENT_LOOKS, SignsOfLife

SLEEPS = "import time; print(flush=True); time.sleep(600)"


class Site:
    """A Slurm whose nodes have an address of this machine."""

    def __init__(self, job_id: str, address: tuple[str, int]) -> None:
        self.job_id, self.address = job_id, address

    def address_of(self, node: str) -> tuple[str, int]:
        return self.address


def members(folder: Path, address: tuple[str, int] = ("127.0.0.1", 1)) -> Members:
    site = cast(Any, Site(f"test{os.getpid()}", address))
    return Members(site, Attempt(str(folder), 0, 0), "script", "log")


@pytest.fixture
def rank(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A rank of the job."""
    with started(tmp_path) as one:
        yield one


@contextlib.contextmanager
def started(
    tmp_path: Path, program: str = SLEEPS, **more: str
) -> Iterator["subprocess.Popen[str]"]:
    environ = {
        **os.environ,
        "RANK": "0",
        "TORCHELASTIC_RUN_ID": f"test{os.getpid()}-0",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
        **more,
    }
    argv = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None and one.stdout.readline()
        yield one
        one.kill()


def test_a_rank_that_met_the_lost_node_is_killed_with_the_reason(
    rank: "subprocess.Popen[str]", tmp_path: Path, until: Until
) -> None:
    ours = members(tmp_path)
    until(lambda: elastic._age_s(str(rank.pid)) > 0.1, "the rank has an age")
    ours.go_on_without("n2", silent_s=10)
    assert rank.wait(60) == -signal.SIGKILL
    error = json.loads((tmp_path / "error.json").read_text())["message"]
    assert error["message"] == "NodeLost: n2 is lost; the ranks start again without it"


def test_a_program_left_by_an_earlier_rank_is_not_taken_for_the_oldest_rank(
    tmp_path: Path, until: Until
) -> None:
    with started(tmp_path, TRAIN_RANK_PIDS="7 1") as left, started(tmp_path) as rank:
        until(lambda: elastic._age_s(str(rank.pid)) > 0.1, "the rank has an age")
        members(tmp_path).go_on_without("n2", silent_s=10)
        assert rank.wait(60) == -signal.SIGKILL
        assert left.poll() is None


def test_a_rank_that_has_replaced_its_program_is_killed(tmp_path: Path, until: Until) -> None:
    again = "import os, sys; os.environ['TRAIN_RANK_PIDS'] = f'{os.getpid()} 1'; "
    again += f"os.execv(sys.executable, [sys.executable, '-S', '-c', {SLEEPS!r}])"
    with started(tmp_path, program=again) as rank:
        until(lambda: elastic._age_s(str(rank.pid)) > 0.1, "the rank has an age")
        members(tmp_path).go_on_without("n2", silent_s=10)
        assert rank.wait(60) == -signal.SIGKILL


def test_ranks_that_have_met_without_the_lost_node_go_on(
    rank: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    members(tmp_path).go_on_without("n2", silent_s=3600)
    assert rank.poll() is None


def test_ranks_of_another_attempt_go_on(rank: "subprocess.Popen[str]", tmp_path: Path) -> None:
    ours = members(tmp_path)
    ours.attempt = Attempt(str(tmp_path), 1, 0)
    ours.go_on_without("n2", silent_s=0)
    assert rank.poll() is None


def test_a_node_that_accepts_or_refuses_connections_is_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert not members(tmp_path, address).is_unreachable("n2")
    assert not members(tmp_path, address).is_unreachable("n2")
    assert not members(tmp_path, ("nowhere.invalid", 1)).is_unreachable("n2")


def test_a_node_that_answers_nothing_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_CONNECT_S", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        # The kernel drops further connections to a full backlog: nobody answers them.
        waiting = [socket.socket() for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        assert members(tmp_path, address).is_unreachable("n2")
        for one in waiting:
            one.close()


def test_only_a_silent_node_is_connected_to(tmp_path: Path) -> None:
    asked: list[str] = []

    def is_unreachable(node: str) -> bool:
        asked.append(node)
        return True

    signs = SignsOfLife(str(tmp_path), ["n1", "n2"], lambda node: None, is_unreachable)
    (tmp_path / "alive-1").write_text("100\n")
    for look in range(SILENT_LOOKS - 1):
        (tmp_path / "alive-0").write_text(f"{look}\n")
        assert signs.look([]) is None
    assert asked == []
    lost = signs.look([])
    assert lost is not None
    assert (lost.number, lost.silent_looks, lost.restarted) == (1, SILENT_LOOKS, False)
    assert asked == ["n2"]


# ---- The first node, with the batch script and the rendezvous


SCONTROL = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
[ "$1" != requeue ] || exit "$ACCEPTS"
"""


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> elastic.FirstNode:
    for name in ("scontrol", "scancel"):
        (tmp_path / name).write_text(SCONTROL)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    (tmp_path / "nodes").write_text("n1\nn2\nn3\n")
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "CALLS": str(tmp_path / "calls"),
        "ACCEPTS": "0",
    }
    return elastic.FirstNode(str(tmp_path), environ)


def test_the_first_node_is_lost_if_it_is_silent_and_never_answers(
    first: elastic.FirstNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bool] = []
    now_s = 0

    def is_unreachable(slurm: object, node: str) -> bool:
        assert node == "n1"
        return answers.pop()

    monkeypatch.setattr(elastic, "is_unreachable", is_unreachable)
    for now_s, sign in ((0, "1"), (30, "1"), (61, "2"), (125, "3")):
        (tmp_path / "alive-0").write_text(sign)
        assert not first.look(now_s), "no connection is tried"
    for given, lost in (([False], False), ([False, True], False), ([True] * 3, True)):
        answers[:] = given
        now_s += 61
        assert first.look(now_s) is lost
    assert answers == []
    (tmp_path / "nodes").unlink()
    assert not first.is_unreachable(), "its name is not known"


@pytest.mark.parametrize(
    ("accepts", "calls", "end"),
    [
        (
            "0",
            [
                "scontrol requeue 7",
                "scontrol show config",
                "scontrol update jobid=7 starttime=now+10",
            ],
            "queued again",
        ),
        ("1", ["scontrol requeue 7", "scancel --quiet 7"], "not queued again"),
    ],
)
def test_a_job_without_its_first_node_is_queued_again_or_ended(
    first: elastic.FirstNode, tmp_path: Path, accepts: str, calls: list[str], end: str
) -> None:
    first.slurm.environ["ACCEPTS"] = accepts
    first.logs = str(tmp_path / "logs/attempt-0")
    Path(first.logs).mkdir(parents=True)
    (tmp_path / "outcome.json").write_text('{"status": "running", "attempt": 0, "step": 41}')
    (tmp_path / "nodes").rename(f"{first.logs}/nodes")
    first.queue_again()
    first.queue_again()  # as another node does
    assert (tmp_path / "calls").read_text().splitlines() == calls
    said = f"node_failure: n1, which ran the batch script, is lost; {end}\n"
    assert Path(first.logs, "reason").read_text() == said
    assert Path(first.logs, "failing_node").read_text() == "n1\n"
    assert Path(first.logs, "exit_status").exists() is (end != "queued again")
    assert Path(first.logs, "step").read_text() == "41\n"


@pytest.mark.parametrize("beats", [False, True])
def test_a_first_node_with_a_heartbeat_is_not_lost_though_it_does_not_answer(
    first: elastic.FirstNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    """A firewall, for example, drops connections to slurmd."""
    (tmp_path / "torchrun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "torchrun").chmod(0o755)
    environ = {**first.slurm.environ, "SLURM_NODEID": "1", "SLURM_STEP_ID": "0"}
    environ["SLURMD_NODENAME"] = "n2"
    options = node.Options(str(tmp_path), [str(tmp_path / "torchrun")], elastic=True)
    one = node.Node(options, Signals([signal.SIGCHLD]), environ)
    pauses: list[float] = []

    def pause(_: node.Node, seconds: float) -> None:
        pauses.append(seconds)
        (tmp_path / "alive-0").write_text("101" if beats else "100")

    (tmp_path / "alive-0").write_text("100")
    monkeypatch.setattr(elastic, "is_unreachable", lambda slurm, node: True)
    monkeypatch.setattr(node.Node, "_pause", pause)
    try:
        assert one.run() == 1
    finally:
        signal.set_wakeup_fd(-1)
    assert pauses == [2 * node.LIFE_S]
    assert (tmp_path / "first_lost").exists() is not beats


@pytest.mark.parametrize("step", [None, 120])
def test_the_loss_of_two_nodes_is_no_repeated_failure(tmp_path: Path, step: int | None) -> None:
    folder = tmp_path / "logs/attempt-0/node-0/7-0"
    for number, lost in enumerate(("n2", "n3")):
        start = folder / f"attempt_{number}"
        for rank in ("0", "1"):
            (start / rank).mkdir(parents=True)
        elastic._explain(str(start / "0/error.json"), lost)
        (start / "1/stderr.log").write_text(LOST_ANOTHER)
    (folder / "attempt_2/0").mkdir(parents=True)
    if step:
        outcome = {"status": "running", "attempt": 0, "step": step}
        (tmp_path / "outcome.json").write_text(json.dumps(outcome))
    starts = first_error.Attempt(str(tmp_path), 0, ["n1", "n2", "n3"])
    assert first_error.repeated_failure(starts, str(folder), all_ended=False) is None


LOST_ANOTHER = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4021
"""


# ---- Jobs that join


class Queue:
    """A Slurm in which jobs that join end at once."""

    environ: ClassVar[dict[str, str]] = {"SLURM_JOB_NUM_NODES": "3"}
    node_list, job_id = "n[1-3]", "7"

    def __init__(self) -> None:
        self.job = slurm.Job(node_count=2, nodes="n[1,3]", folder="/home/a b")
        self.submitted: list[tuple[str, ...]] = []
        self.queued: list[str] | None = []

    def show_job(self) -> slurm.Job:
        return self.job

    def hostnames(self, nodes: str) -> list[str]:
        return {"n[1,3]": ["n1", "n3"], "n[1-3]": ["n1", "n2", "n3"]}[nodes]

    def waiting_or_running(self, job_ids: list[str]) -> list[str] | None:
        return self.queued

    def submit(self, *argv: str) -> int:
        self.submitted.append(argv)
        return 100 + len(self.submitted)


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def joined(queue: Queue, tmp_path: Path) -> Members:
    attempt = Attempt(str(tmp_path), 0, 0)
    Path(attempt.logs).mkdir(parents=True)
    return Members(cast(Any, queue), attempt, "script", "log")


def test_jobs_that_end_before_they_join_are_not_submitted_for_ever(
    queue: Queue, joined: Members
) -> None:
    """As with a node without the script's virtual environment."""
    said: list[str] = []
    for _ in range(240):
        joined.look("n1:1", 3, said.append)
    assert len(queue.submitted) == 3
    assert "--chdir=/home/a b" in queue.submitted[0]
    assert said[-1] == "101 102 103: these jobs ended before they joined; none follows"
    assert len(said) == 5


def test_while_the_queue_is_unknown_no_job_joins(queue: Queue, joined: Members) -> None:
    queue.queued = None
    joined.look("n1:1", 3, lambda _: None)
    assert queue.submitted == []


def test_a_restarted_node_that_slurm_has_taken_away_counts_once(
    queue: Queue, joined: Members
) -> None:
    Path(joined.attempt.path("restarted")).write_text("n2\n")
    queue.job = slurm.Job(node_count=3, nodes="n[1-3]")
    joined.look("n1:1", 3, lambda _: None)
    queue.queued, queue.job = ["101"], slurm.Job(node_count=2, nodes="n[1,3]")
    joined.look("n1:1", 3, lambda _: None)
    assert len(queue.submitted) == 1
