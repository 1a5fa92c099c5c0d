"""What a run that goes on asks of the file server on which many nodes share its directory."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from tests.support.file_operations import operations_in
from tests.support.watchdog import program
from toolkit.supervisor import pod
from toolkit.supervisor.node import Node, Options
from toolkit.supervisor.policy import Limits
from toolkit.supervisor.process import Signals
from toolkit.supervisor.supervised import Policy

MINUTES = 10
MOST_OPENED = 8
"""Files that a node may open in a minute."""


class Clock:
    """A clock that the test turns; it begins in the middle of a minute."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_800_000_030.0
        patch.setattr(time, "time", lambda: self.now_s)
        patch.setattr(time, "monotonic", lambda: self.now_s)

    def minutes(self, count: int, step_s: float) -> Iterator[float]:
        """Yield the time, so many seconds apart."""
        for _ in range(int(count * 60 / step_s)):
            self.now_s += step_s
            yield self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(scope="module")
def watchdog() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "stragglers", program("stragglers"))
        yield program("watchdog")


def ranks_of(node: int) -> list[dict[str, Any]]:
    """Return the ranks of a node of two ranks, of two such nodes."""
    numbers = (2 * node, 2 * node + 1)
    return [{"rank": one, "pid": 100 + one, "world": 4, "error_file": ""} for one in numbers]


def watchdog_of(
    watchdog: ModuleType, folder: Path, node: int, limit_s: float | None, patch: pytest.MonkeyPatch
) -> Any:
    """Return a node's watchdog, whose ranks have begun 20 steps, rank 3 always last."""
    patch.setenv("SLURMD_NODENAME", f"n{node + 1}")
    own = watchdog.Watchdog(folder / "own", folder / "logs/attempt-0", limit_s, select.poll())
    own.ranks = lambda: ranks_of(node)
    return own


def arrivals(rank: dict[str, Any], _: Path) -> dict[str, Any]:
    late_s = 0.4 if rank["rank"] == 3 else 0.0
    times = [1e9 + step + (late_s if step % 2 else 0.5) for step in range(40)]
    kinds = [step % 2 for step in range(40)]
    return {"rank": rank["rank"], "arrivals": [1, times, [] if rank["rank"] else kinds, []]}


@pytest.mark.parametrize("limit_s", [None, 120.0])
def test_a_node_whose_run_goes_on_opens_few_files_and_lists_no_folder(
    tmp_path: Path,
    clock: Clock,
    watchdog: ModuleType,
    limit_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With and without `stall_timeout`: the task of the step, and the watchdog beside torchrun."""
    logs = tmp_path / "logs/attempt-0"
    logs.mkdir(parents=True)
    environ = {"SLURM_NODEID": "1", "SLURM_STEP_ID": "7", "SLURMD_NODENAME": "n2"}
    node = Node(Options(logs=str(logs), command=["torchrun"]), Signals([signal.SIGCHLD]), environ)
    beside = watchdog_of(watchdog, tmp_path, 1, limit_s, monkeypatch)
    monkeypatch.setattr(watchdog, "arrivals", arrivals)
    poll_s = watchdog.POLL_LEARNED_S if limit_s is None else watchdog.POLL_S
    torchrun = cast("subprocess.Popen[bytes]", type("Running", (), {"pid": os.getpid()})())
    for _ in clock.minutes(2, 5.0):  # what was written when the attempt began is new for a moment
        beside.look()
    with operations_in(tmp_path) as done:
        for now_s in clock.minutes(MINUTES, poll_s):
            beside.look()
            node.look(torchrun, now_s)
    assert done.listed == []
    assert 0 < len(done.opened) <= MINUTES * MOST_OPENED


def test_the_watchdog_of_rank_0_lists_one_folder_only_while_arrivals_are_missing(
    tmp_path: Path, clock: Clock, watchdog: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    nodes = [watchdog_of(watchdog, tmp_path, node, None, monkeypatch) for node in (0, 1)]
    monkeypatch.setattr(watchdog, "arrivals", arrivals)
    found: list[int] = []
    monkeypatch.setattr(nodes[0], "judge", lambda begun: found.append(len(begun)))
    for _ in clock.minutes(2, 5.0):
        for each in nodes:
            each.look()
    found.clear()
    with operations_in(tmp_path) as done:
        for _ in clock.minutes(MINUTES, watchdog.POLL_LEARNED_S):
            for each in nodes:
                each.look()
    assert found == [4] * MINUTES, "all ranks, once a minute"
    folder = str(tmp_path / "logs/attempt-0/watchdog/arrivals")
    assert set(done.listed) == {folder}
    assert len(done.listed) <= 2 * MINUTES
    assert len(done.opened) == 4 * MINUTES, "one file written, and one read, of each node"


def test_arrivals_of_another_time_or_other_ranks_are_not_compared(
    tmp_path: Path, clock: Clock, watchdog: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (watchdog_of(watchdog, tmp_path, n, None, monkeypatch) for n in (0, 1))
    monkeypatch.setattr(watchdog, "arrivals", arrivals)
    found: list[list[int]] = []
    monkeypatch.setattr(first, "judge", lambda begun: found.append(sorted(begun)))

    def minute(*nodes: Any) -> None:
        for _ in clock.minutes(1, 5.0):
            for each in nodes:
                each.look()

    minute(first, second)
    found.clear()
    minute(first)
    assert found == [], "the other node is silent; what it wrote a minute ago is older"
    minute(first, second)
    assert found == [[0, 1, 2, 3]] * 2, "late in one minute, and in time in the next"
    found.clear()
    first.ranks = lambda: [{**each, "pid": each["pid"] + 50} for each in ranks_of(0)]
    first.look()
    assert first.judge_s is None, "the ranks have just started again"


def pod_here(folder: Path, patch: pytest.MonkeyPatch) -> pod.PodStart:
    """Return a pod of four whose torchrun runs."""
    for name, value in {
        "TRAIN_RUN_DIR": str(folder),
        "HOSTNAME": "digits-1",
        "JOB_COMPLETION_INDEX": "1",
    }.items():
        patch.setenv(name, value)
    patch.delenv("TORCH_LOGS_OUT", raising=False)
    (folder / "cgroup").mkdir()
    options = pod.Options(
        policy=Policy("digits", 3, Limits(2), grace_s=60, stall="learned"),
        command=["torchrun"],
        nodes=4,
        marks=True,
        cgroups=str(folder / "cgroup"),
    )
    made = pod.PodStart(options, Signals([signal.SIGCHLD]))
    made._open_attempt()
    made._check_earlier_starts()
    for number in range(4):
        torchrun = folder / f"logs/attempt-0/digits-{number}/id"
        (torchrun / "attempt_0/0").mkdir(parents=True)
        (torchrun.parent / "a-folder-of-another-kind").mkdir()
        os.utime(torchrun / "attempt_0", (time.time() + 1,) * 2)  # a kernel's clock may lag
    (folder / "logs/attempt-0/digits-1/torchrun.log").write_text("begins\n")
    return made


def test_a_pod_whose_run_goes_on_opens_nothing_and_lists_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = pod_here(tmp_path, monkeypatch)
    for _ in range(14):
        own._look()
    with operations_in(tmp_path / "logs") as done:
        for _ in range(100):
            own._look()
    assert (done.opened, done.listed) == ([], [])


@pytest.mark.parametrize("sign", ["torchrun.log", "id/attempt_1"])
def test_a_pod_looks_for_repeated_failures_when_a_start_may_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    own = pod_here(tmp_path, monkeypatch)
    for _ in range(30):
        own._look()
    looked: list[bool] = []
    monkeypatch.setattr(own.repetitions, "in_job", lambda **_: looked.append(True))
    own._look()
    assert looked == []
    path = tmp_path / "logs/attempt-0/digits-1" / sign
    if path.suffix:
        path.write_text("begins\nfailed (exitcode: 1) local_rank: 0\n")
    else:
        path.mkdir()
    for _ in range(pod.LOOK_S * 20):
        own._look()
    assert len(looked) == 13, "the errors of ranks may come a minute late"
