"""Where ranks meet: each way works under torchrun and without, and no run meets another's ghost."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tests.support.ports import free_port
from tests.train.support.making import trainer_for
from tests.train.support.processes import PROCESSES
from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.errors import PeerError, UsageError, is_collateral
from train.runtime.devices import device_and_backend
from train.runtime.membership import enter, gather
from train.runtime.process_group import open_group
from train.runtime.rank import RankInfo
from train.runtime.rendezvous import AGENT_STORE, await_server, meet

if TYPE_CHECKING:
    from tests.train.conftest import Start

PICTURES = f"{Path(__file__).parents[1] / 'support/pictures.py'}:Pictures"
PATIENCE_S = 300.0
# As long as ranks wait that come in the end, however busy the machine; less than we wait for them.
UNHURRIED_S = 240
# Long enough for two processes to find each other on a busy machine; waited for in vain by the
# wrong forms only.
SHORT_S = 5

Work = Callable[[RankInfo, str, Path], None]


class Meeting:
    """Starts ranks that meet; every one of them is gone when the fixture is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[multiprocessing.process.BaseProcess] = []

    def rank(self, work: Work, rank: int, method: str, *, count: int = 2, restart: int = 0) -> int:
        """Start a rank, and give its number among all that were started."""
        rank_info = RankInfo(rank=rank, world_size=count, launched=True, restart=restart)
        number = len(self.started)
        process = PROCESSES.Process(
            target=_report, args=(work, rank_info, method, self.folder, number)
        )
        process.start()
        self.started.append(process)
        return number

    def said(self, number: int) -> str:
        """Wait for a rank's end; return its output."""
        self.started[number].join(PATIENCE_S)
        assert self.started[number].exitcode is not None, "it hangs"
        return (self.folder / f"said-{number}").read_text()

    def so_far(self, number: int) -> str:
        """Return a rank's output so far."""
        path = self.folder / f"said-{number}"
        return path.read_text() if path.exists() else ""

    def of_two(self, work: Work, method: str, **more: int) -> list[str]:
        """Start both ranks of a run, wait, and return their output."""
        return [self.said(n) for n in [self.rank(work, rank, method, **more) for rank in (0, 1)]]

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.join()


@pytest.fixture
def meeting(tmp_path: Path) -> object:
    folder = tmp_path / "meeting"
    folder.mkdir()
    started = Meeting(folder)
    yield started
    started.end()


def _report(work: Work, rank_info: RankInfo, method: str, folder: Path, number: int) -> None:
    torch.set_num_threads(1)
    # As under torchrun.
    os.environ |= {AGENT_STORE: "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    said = folder / f"said-{number}"
    try:
        work(rank_info, method, said)
    except BaseException as error:
        said.write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


def ours(rank_info: RankInfo, method: str, said: Path) -> None:
    config = Config(strategy="ddp", init_method=method, timeout_s=UNHURRIED_S)
    with open_group(rank_info, config) as group:
        said.write_text(f"sum {group.sum([rank_info.rank + 1.0])[0]}")


def ours_held(rank_info: RankInfo, method: str, said: Path) -> None:
    config = Config(strategy="ddp", init_method=method, timeout_s=UNHURRIED_S)
    with open_group(rank_info, config) as group:
        said.write_text("they met")
        _wait_for((said.parent / "go on").exists)
        said.write_text(f"sum {group.sum([rank_info.rank + 1.0])[0]}")


def ours_killed(rank_info: RankInfo, method: str, said: Path) -> None:
    config = Config(strategy="ddp", init_method=method, timeout_s=UNHURRIED_S)
    with open_group(rank_info, config) as group:
        said.write_text(f"sum {group.sum([rank_info.rank + 1.0])[0]}")
        os.kill(os.getpid(), signal.SIGKILL)


def ours_impatient(rank_info: RankInfo, method: str, said: Path) -> None:
    config = Config(strategy="ddp", init_method=method, timeout_s=1)
    try:
        with open_group(rank_info, config):
            pass
    except Exception as error:
        said.write_text(f"{error}, collateral: {is_collateral(error)}")


def plain_killed(rank_info: RankInfo, method: str, said: Path) -> None:
    """The result of the introductions, with the number of other ranks."""
    url = f"{method}?rank={rank_info.rank}&world_size={rank_info.world_size}"
    store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=SHORT_S)))
    said.write_text(f"the other is there: {store.check([str(1 - rank_info.rank)])}")
    store.set(str(rank_info.rank), "here")
    os.kill(os.getpid(), signal.SIGKILL)


def plain_store(rank_info: RankInfo, method: str, said: Path) -> None:
    url = f"{method}?rank={rank_info.rank}&world_size={rank_info.world_size}"
    next(rendezvous(url, timeout=timedelta(seconds=SHORT_S)))
    said.write_text("they met")


@pytest.mark.slow
def test_ranks_meet_at_a_port_under_torchrun_where_the_plain_form_hangs(meeting: Meeting) -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    assert all("Error" in said for said in meeting.of_two(plain_store, method))
    assert meeting.of_two(ours, method) == ["sum 3.0"] * 2


def test_a_file_that_a_killed_run_left_is_no_trap(meeting: Meeting, tmp_path: Path) -> None:
    method = f"file://{tmp_path}/here"
    assert meeting.of_two(ours_killed, method) == ["sum 3.0"] * 2
    left = tmp_path / "here.attempt-0.restart-0"
    assert left.stat().st_size
    # A new run's rank 1, started first, learns from the plain form that its rank 0 is there.
    ghost = f"file://{tmp_path}/ghost"
    assert meeting.said(meeting.rank(plain_killed, 0, ghost)) == "the other is there: False"
    assert meeting.said(meeting.rank(plain_killed, 1, ghost)) == "the other is there: True"
    alone = meeting.said(meeting.rank(ours_impatient, 1, method))
    assert alone.startswith("timed out waiting for rank 0 of 2, ")
    assert meeting.of_two(ours, method) == ["sum 3.0"] * 2
    assert not list(tmp_path.glob("here*"))
    # A later try has a file of its own, and takes the earlier ones' away.
    assert meeting.of_two(ours_killed, method) == ["sum 3.0"] * 2
    assert meeting.of_two(ours, method, restart=1) == ["sum 3.0"] * 2
    assert not list(tmp_path.glob("here*"))


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_two_runs_at_one_place_are_all_refused(meeting: Meeting, tmp_path: Path, kind: str) -> None:
    method = place_of(kind, tmp_path)
    # Which run's rank 1 will come is unknown.
    first = meeting.rank(ours, 0, method)
    _wait_until_there(method)
    second = meeting.said(meeting.rank(ours, 0, method))
    if kind == "tcp":
        assert second == (
            f"UsageError: {method}: the port is taken on {socket.gethostname()}, by another run "
            "perhaps; choose another one"
        )
    else:
        assert refused(second)
    assert refused(meeting.said(first))
    # Another number of ranks is another run, too; and RANK may be set wrongly.
    for places in ([(0, 2), (2, 3)], [(0, 3), (1, 3), (1, 3)]):
        folder = tmp_path / f"{len(places)} ranks"
        folder.mkdir()
        method, numbers = place_of(kind, folder), []
        for rank, count in places:
            numbers.append(meeting.rank(ours, rank, method, count=count))
            if rank == 0:  # two that refuse each other before it is there would leave it alone
                _wait_until_there(method)
        said = [meeting.said(number) for number in numbers]
        assert all(map(refused, said)), said


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_ranks_that_have_met_are_not_disturbed(meeting: Meeting, tmp_path: Path, kind: str) -> None:
    method = place_of(kind, tmp_path)
    numbers = [meeting.rank(ours_held, rank, method) for rank in (0, 1)]
    _wait_for(lambda: all(meeting.so_far(number) == "they met" for number in numbers))
    for said in [*meeting.of_two(ours, method), *meeting.of_two(ours, method, count=3)]:
        assert refused(said) or "the port is taken" in said
    (tmp_path / "meeting" / "go on").touch()
    _wait_for(lambda: all(meeting.said(number) == "sum 3.0" for number in numbers))


def test_a_rank_that_died_and_came_again_is_no_other_run(meeting: Meeting, tmp_path: Path) -> None:
    """As where a launcher replaces a single process: a new start of all helps, so none is fatal."""
    method = f"file://{tmp_path}/here"
    early = [meeting.rank(ours, rank, method, count=3) for rank in (0, 1)]
    here = tmp_path / "here.attempt-0.restart-0"
    _wait_for(
        lambda: here.exists() and b"rank 0" in (raw := here.read_bytes()) and b"rank 1" in raw
    )
    meeting.started[early[1]].kill()
    meeting.started[early[1]].join()
    for said in (meeting.said(meeting.rank(ours, 1, method, count=3)), meeting.said(early[0])):
        assert said.startswith("PeerError") and "one of them is left over" in said
    again = [meeting.rank(ours, rank, method, count=3) for rank in range(3)]
    assert [meeting.said(number) for number in again] == ["sum 6.0"] * 3


def test_a_straggler_of_the_same_torchrun_is_no_other_run() -> None:
    rank_info = RankInfo(rank=1, world_size=2, launched=True, launch="job-7")
    store = HashStore()
    assert enter(PrefixStore("train/0", store), rank_info) is None
    with pytest.raises(PeerError, match="one of them is left over from an earlier start"):
        gather(store, dataclasses.replace(rank_info, restart=1), "tcp://here:1")


def test_ranks_meet_at_a_port_that_count_restarts_differently(meeting: Meeting) -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    ranks = [meeting.rank(ours, rank, method, restart=rank) for rank in (0, 1)]
    assert [meeting.said(number) for number in ranks] == ["sum 3.0"] * 2


def place_of(kind: str, folder: Path) -> str:
    return f"file://{folder}/here" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"


def refused(said: str) -> bool:
    return bool(re.match(r"UsageError: --init-method .* two runs meet at the same place, ", said))


class Turns:
    """Lets the operations of some threads on their store come in an order of the test's choice."""

    def __init__(self, order: Sequence[int], members: int) -> None:
        self.order = list(order)
        self.members = members
        self.ready: dict[int, Callable[[], bool]] = {}
        self.changed = threading.Condition()

    def take(self, member: int, may: Callable[[], bool], operation: Callable[[], Any]) -> Any:
        with self.changed:
            self.ready[member] = may
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.next() == member, PATIENCE_S)
            del self.ready[member]
            if member in self.order:
                self.order.remove(member)
            return operation()

    def next(self) -> int | None:
        """The ranks that continue, once all have an operation to run."""
        if len(self.ready) < self.members:
            return None
        able = [member for member in self.ready if self.ready[member]()]
        return next((member for member in [*self.order, *sorted(able)] if member in able), None)

    def leave(self) -> None:
        with self.changed:
            self.members -= 1
            self.changed.notify_all()


class Stepwise:
    """A store for one thread that waits for its turn before each operation."""

    def __init__(self, store: Store, turns: Turns, member: int) -> None:
        self.store, self.turns, self.member = store, turns, member

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self.store, name)
        return lambda *given: self.turns.take(
            self.member,
            lambda: name != "wait" or self.store.check(given[0]),
            lambda: operation(*given),
        )


def outcomes(
    places: Sequence[tuple[int, int]], order: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Let ranks (of so many) gather, in a given order of their operations; say how each ended."""
    monkeypatch.setattr("train.runtime.membership.PrefixStore", lambda _, stepwise: stepwise)
    turns, shared = Turns(order, len(places)), HashStore()
    ends = [""] * len(places)

    def come(member: int) -> None:
        rank, count = places[member]
        try:
            rank_info = RankInfo(rank=rank, world_size=count, launched=True)
            gather(Stepwise(shared, turns, member), rank_info, "here")  # type: ignore[arg-type]
            ends[member] = "met"
        except UsageError as error:
            ends[member] = "refused" if "at the same place" in str(error) else str(error)
        finally:
            turns.leave()

    threads = [threading.Thread(target=come, args=[member]) for member in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return ends


def test_honest_ranks_meet_in_whatever_order_their_operations_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders = set(itertools.permutations([0, 1] * 4))
    assert len(orders) == 70
    for order in orders:
        assert outcomes([(0, 2), (1, 2)], order, monkeypatch) == ["met", "met"], order


@pytest.mark.parametrize("places", [[(0, 2), (0, 2)], [(0, 2), (1, 3)], [(0, 2), (1, 2), (1, 2)]])
def test_no_order_of_operations_lets_two_runs_meet(
    places: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    members, draw = list(range(len(places))) * 4, random.Random(0)
    allowed = [["refused"] * len(places)]
    if len(places) == 3:
        # A third comes when two have met.
        allowed += [["met", "met", "refused"], ["met", "refused", "met"]]
    for _ in range(60):
        draw.shuffle(members)
        assert outcomes(places, members, monkeypatch) in allowed, members


def peers(
    ranks: Sequence[int], count: int, method: str, rounds: int, spread_s: float, folder: Path
) -> None:
    """Be some ranks, each a thread, that meet again and again; write what keeps them from it."""

    # Torch looks up a name for each address, and a name server may be slow to know none.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

    def be(rank: int) -> None:
        rank_info, draw = RankInfo(rank=rank, world_size=count, launched=True), random.Random(rank)
        for number in range(rounds):
            time.sleep(draw.uniform(0, spread_s))
            try:
                with meet(rank_info, method, timedelta(seconds=PATIENCE_S)):
                    pass
            except Exception as error:
                text = f"rank {rank}, round {number}: {type(error).__name__}: {error}"
                (folder / f"error-{rank}").write_text(text)
                return

    threads = [threading.Thread(target=be, args=[rank], daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (folder / f"ended-{ranks[0]}").touch()


@pytest.mark.parametrize("kind", ["file", "tcp"])
@pytest.mark.parametrize(
    "count, rounds, spread_s",
    [(32, 5, 0.0), pytest.param(256, 100, 3.0, marks=pytest.mark.nightly)],
)
def test_honest_ranks_are_never_refused(
    tmp_path: Path, kind: str, count: int, rounds: int, spread_s: float
) -> None:
    """Nor is a run whose ranks come while those of the run before it are still leaving."""
    method, parts = place_of(kind, tmp_path), [range(n, count, 4) for n in range(4)]
    processes = [
        PROCESSES.Process(target=peers, args=(part, count, method, rounds, spread_s, tmp_path))
        for part in parts
    ]
    for process in processes:
        process.start()
    try:
        _wait_for(
            lambda: len(list(tmp_path.glob("ended-*"))) == 4 or any(tmp_path.glob("error-*")),
            PATIENCE_S + 20 * rounds,
        )
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [path.read_text() for path in tmp_path.glob("error-*")] == []


def _wait_for_port(port: int) -> None:
    def open_() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    _wait_for(open_)


def _wait_until_there(method: str) -> None:
    """Wait for a rank 0 that waits for others."""
    if method.startswith("tcp"):
        # The port is the first run's as soon as its rank 0 serves it.
        _wait_for_port(int(method.rpartition(":")[2]))
    else:
        # Torch's store notes something of its own there before the rank does.
        here = Path(method.removeprefix("file://") + ".attempt-0.restart-0")
        _wait_for(lambda: here.exists() and b"rank 0" in here.read_bytes())


def _wait_for(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_rank_that_never_comes_is_waited_for_as_long_as_was_asked(
    meeting: Meeting, tmp_path: Path, kind: str
) -> None:
    method = place_of(kind, tmp_path)
    # Torch alone would wait for half an hour; and another start may help.
    said = meeting.said(meeting.rank(ours_impatient, 0, method))
    assert said.endswith(", collateral: True")
    if kind == "file":
        assert said.startswith("timed out waiting for rank 1 of 2, ")


def limits(rank: int, folder: Path) -> set[float]:
    """How long each group of some ranks waits for one of them, in seconds."""
    axes = {"pp": 2, "dp_shard": 2, "sync_batch_norm": True}
    trainer_for(rank, 4, folder, task=PICTURES, micro_batch=2, timeout_s=77, **axes)
    return {
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in distributed_c10d._world.pg_map
        if group is not dist.group.WORLD
    }


def test_ranks_of_a_mesh_wait_for_each_other_as_long_as_was_asked(tmp_path: Path) -> None:
    # Torch gives their groups half an hour, whatever the time-out of the default group.
    assert on_ranks(4, limits, tmp_path) == [{77.0}] * 4


def test_a_backend_that_is_not_there_is_named_with_those_that_are() -> None:
    absent = [b for b in ("nccl", "mpi") if not dist.is_backend_available(b)]
    if not absent:
        pytest.skip("this build of torch has all backends")
    message = f"--backend {absent[0]}: this build of torch {torch.__version__} has no such backend;"
    with pytest.raises(UsageError, match=f"^{re.escape(message)} it has gloo"):
        device_and_backend(RankInfo(), absent[0])
    # Before anything is waited for.
    config = Config(strategy="ddp", backend=absent[0], init_method="tcp://127.0.0.1:1")  # type: ignore[arg-type]
    with (
        pytest.raises(UsageError, match=f"^{re.escape(message)}"),
        open_group(RankInfo(world_size=2, launched=True), config),
    ):
        pass


def test_a_rank_that_sees_only_its_own_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with srun --gpus-per-task=1, if the number of ranks per node is unknown."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = {}
    for gpus in (1, 4):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        rank_info = RankInfo(rank=7, world_size=8, local_rank=3, launched=True)
        seen[gpus] = str(device_and_backend(rank_info, "gloo")[0])
    assert seen == {1: "cuda:0", 4: "cuda:3"}


def test_a_hook_that_the_backend_cannot_do_is_refused_before_the_ranks_meet() -> None:
    if torch.cuda.is_available():
        pytest.skip("here `auto` is nccl, which can")
    config = Config(strategy="ddp", comm_hook="bf16", init_method="tcp://127.0.0.1:1")
    with (
        pytest.raises(UsageError, match=r"^--comm-hook bf16 needs --backend nccl, "),
        open_group(RankInfo(world_size=2, launched=True), config),
    ):
        pass


@pytest.mark.slow
def test_runs_are_started_by_hand_and_by_torchrun_at_a_place_of_their_choice(
    start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    flags = ("--task=digits", "--checkpoint-every=0")
    # Numbered by hand, or by srun; no MASTER_ADDR.
    by_hand = [
        start.single(
            *flags,
            "--steps=2",
            f"--init-method=file://{tmp_path}/here",
            run_dir=run_dir,
            RANK=str(rank),
            WORLD_SIZE="2",
        )
        for rank in (0, 1)
    ]
    for run in by_hand:
        run.finish()
    port = free_port()
    method = f"--init-method=tcp://127.0.0.1:{port}"
    run = start.ranks(2, *flags, "--steps=4", method, run_dir=run_dir).finish()
    assert run.outcome()["status"] == "done"
    starts = [event for event in run.events() if event["event"] == "start"]
    assert [event["world_size"] for event in starts] == [2, 2]
    assert sorted(run.losses()) == [1, 2, 3, 4]


def test_ranks_meet_whose_torchruns_count_restarts_differently(
    start: Start, tmp_path: Path
) -> None:
    """After a failure the one counts a restart, the other has only seen that ranks come and go."""
    port = free_port()
    runs = [
        start.single(
            "--task=digits",
            "--steps=2",
            "--timeout-s=60",
            run_dir=tmp_path / "run",
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RESTART_COUNT=str(rank),
            TORCHELASTIC_USE_AGENT_STORE="False",
        )
        for rank in (0, 1)
    ]
    for run in runs:
        run.finish()
    assert runs[0].outcome()["status"] == "done"


def test_a_port_that_was_taken_since_torchrun_chose_it_ends_no_run_for_good(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()  # as the supervisor has
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        run = start.single(
            "--task=digits",
            "--steps=2",
            run_dir=tmp_path / "run",
            RANK="0",
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(other.getsockname()[1]),
            TORCHELASTIC_USE_AGENT_STORE="False",
        )
        run.finish(status=1)  # 2 would be: another start would end like this one
    assert "has taken the port since torchrun chose it" in run.output()
    assert run.outcome()["status"] == "retryable"


def test_a_port_that_a_connection_had_for_an_instant_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = socket.socket()
    other.bind(("127.0.0.1", 0))
    other.listen()
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    given |= {"MASTER_PORT": str(other.getsockname()[1]), AGENT_STORE: "False"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: other.close())
    monkeypatch.setattr("train.runtime.rendezvous.time", clock)
    with meet(RankInfo(launched=True), "env://", timedelta(seconds=PATIENCE_S)) as store:
        store.set("key", "value")
        assert other.fileno() == -1, "the port was taken at first"


def test_a_rank_that_comes_first_knocks_until_the_store_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    first = RankInfo(rank=1, world_size=2, launched=True)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # taken, and not listening: it refuses
        host, port = server.getsockname()

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                server.listen()

        # Its clock stands still: however long this takes, it does not give up.
        clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=pause)
        monkeypatch.setattr("train.runtime.rendezvous.time", clock)
        await_server(host, port, first, timedelta(seconds=PATIENCE_S))
        assert len(pauses) == 3
        socket.create_connection((host, port)).close()


def test_rank_0_knocks_nowhere() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        rank_info = RankInfo(rank=0, world_size=2, launched=True)
        host, port = server.getsockname()
        await_server(host, port, rank_info, timedelta(seconds=PATIENCE_S))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
