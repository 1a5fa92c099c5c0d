"""`--profile`: traces of real ranks, and where they say that the time went."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.train.support.ranks import on_ranks
from train.errors import UsageError
from train.profiling import capture, timeline
from train.profiling.capture import Profiler
from train.profiling.timeline import Profile, Split, split
from train.rundir.console import Console
from train.rundir.files import RunDirectory
from train.runtime.rank import RankInfo

LARGE = 1_000_000


def profiler_of(rank: int, run_dir: Path, first: int, last: int) -> Profiler:
    directory = RunDirectory(run_dir, RankInfo(rank=rank, world_size=2, attempt=3))
    return Profiler(Profile(first=first, last=last), directory, Console(rank=rank))


def ddp_steps(rank: int, run_dir: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profiler = profiler_of(rank, run_dir, 3, 4)
    for step in range(1, 7):
        with profiler.step(step):
            with profiler.data():
                batch = torch.randn(32, 64).sort().values
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def talk_beside_work(rank: int, run_dir: Path) -> None:
    """Rank 0 asks for a message, works, and only then lets rank 1 send it."""
    work, numbers = torch.ones(64, 64), torch.ones(LARGE)
    worked = run_dir / "rank 0 has worked"
    run_dir.mkdir(parents=True, exist_ok=True)
    profiler = profiler_of(rank, run_dir, 1, 1)
    with profiler.step(1):
        if rank == 0:
            request = dist.irecv(numbers, src=1)
            assert request is not None
            for _ in range(20):
                work = (work @ work).clamp(-1, 1)
            worked.touch()
            request.wait()
        else:
            while not worked.exists():
                time.sleep(0.002)
            dist.send(numbers, dst=0)


def talk_after_work(rank: int, run_dir: Path) -> None:
    """Rank 0 works as much, and asks for the message after that."""
    work, numbers = torch.ones(64, 64), torch.ones(LARGE)
    profiler = profiler_of(rank, run_dir, 1, 1)
    with profiler.step(1):
        if rank == 0:
            for _ in range(20):
                work = (work @ work).clamp(-1, 1)
            dist.recv(numbers, src=1)
        else:
            dist.send(numbers, dst=0)


def wait_for_the_slow(rank: int, run_dir: Path) -> None:
    """Rank 1 works before it sends; rank 0, which waits for it, waits from before that."""
    work, number = torch.ones(256, 256), torch.ones(4)
    waits = run_dir / "rank 0 waits"
    run_dir.mkdir(parents=True, exist_ok=True)
    profiler = profiler_of(rank, run_dir, 1, 1)
    if rank == 0:
        with profiler.step(1):
            request = dist.irecv(number, src=1)
            assert request is not None
            waits.touch()
            request.wait()
        return
    while not waits.exists():
        time.sleep(0.002)
    with profiler.step(1):
        for _ in range(100):
            work = (work @ work).clamp(-1, 1)
        dist.send(number, dst=0)


def several_traces(rank: int, folder: Path) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for steps in (ddp_steps, talk_beside_work, talk_after_work, wait_for_the_slow):
            steps(rank, folder / steps.__name__)
    return said.getvalue()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of real traces by two ranks, and each rank's output."""
    folder = tmp_path_factory.mktemp("traces")
    return folder, on_ranks(2, several_traces, folder)


def split_of(traced: tuple[Path, list[str]], name: str, rank: int = 0) -> Split:
    path = traced[0] / name / "profile" / "attempt-3" / f"rank-{rank}.json"
    return split(json.loads(path.read_text())["traceEvents"])


@pytest.mark.parametrize("rank", [0, 1])
def test_each_moment_of_the_traced_steps_counts_once(
    traced: tuple[Path, list[str]], rank: int
) -> None:
    parts = split_of(traced, "ddp_steps", rank)
    assert parts.steps == 2
    each = (parts.compute, parts.communication, parts.data, parts.idle)
    assert min(each) > 0
    assert sum(each) == pytest.approx(parts.wall)


def test_the_slowest_operations_come_first(traced: tuple[Path, list[str]]) -> None:
    found = {o.name: o for o in split_of(traced, "ddp_steps").operations}
    assert found["gloo:all_reduce"].calls == 2
    assert found["aten::addmm"].calls == found["aten::linear"].calls == 2
    times = [operation.seconds for operation in found.values()]
    assert times == sorted(times, reverse=True)


def test_operations_count_their_own_time_only() -> None:
    """Made by hand, in microseconds: linear() only calls t() and addmm()."""
    parts = split(
        [
            event("train step 7", 0, 100, "user_annotation"),
            event("aten::linear", 10, 60, "cpu_op"),
            event("aten::t", 12, 20, "cpu_op"),
            event("aten::transpose", 14, 19, "cpu_op"),
            event("aten::addmm", 22, 57, "cpu_op"),
            event("aten::addmm", 70, 75, "cpu_op"),
            event("aten::relu", 30, 42, "cpu_op", 2),  # inside addmm's time, by another thread
        ]
    )
    assert [(o.name, o.calls, round(1e6 * o.seconds)) for o in parts.operations] == [
        ("aten::addmm", 2, 40),
        ("aten::relu", 1, 12),
        ("aten::linear", 1, 7),
        ("aten::transpose", 1, 5),
        ("aten::t", 1, 3),
    ]


def test_fetching_is_data_although_operators_do_it(traced: tuple[Path, list[str]]) -> None:
    path = traced[0] / "ddp_steps/profile/attempt-3/rank-0.json"
    events = json.loads(path.read_text())["traceEvents"]
    unmarked = split([event for event in events if event["name"] != timeline.DATA])
    marked = split(events)
    assert unmarked.data == 0
    assert unmarked.compute > marked.compute
    assert marked.wall == unmarked.wall


def test_communication_under_compute_is_hidden_and_not_counted_twice(
    traced: tuple[Path, list[str]],
) -> None:
    beside, after = split_of(traced, "talk_beside_work"), split_of(traced, "talk_after_work")
    assert 0.9 * beside.compute < beside.hidden <= beside.compute
    assert after.hidden < 0.1 * after.compute
    for parts in (beside, after):
        each = (parts.compute, parts.communication, parts.data, parts.idle)
        assert sum(each) == pytest.approx(parts.wall)
        assert parts.communication > 0


@pytest.mark.parametrize("thread", [1, 2], ids=["from this thread", "on a thread of gloo's"])
def test_a_message_is_under_way_until_it_ends_whatever_runs_beside_it(thread: int) -> None:
    """Made by hand, in microseconds: 40 of compute, 20 of them beside the message's 50."""
    parts = split(
        [
            event("train step 7", 0, 100, "user_annotation"),
            event("gloo:recv", 10, 60, "user_annotation", thread),
            event("aten::mm", 20, 40, "cpu_op"),
            event("aten::mm", 70, 90, "cpu_op"),
        ]
    )
    names = ("compute", "communication", "idle", "hidden")
    assert [round(1e6 * getattr(parts, name)) for name in names] == [40, 30, 30, 20]


def test_waiting_for_a_slow_rank_is_communication(traced: tuple[Path, list[str]]) -> None:
    fast = split_of(traced, "wait_for_the_slow")
    slow = split_of(traced, "wait_for_the_slow", rank=1)
    assert fast.communication > fast.compute
    # What the slow one has done meanwhile counts as work, for itself only.
    assert fast.communication > slow.compute > 0


def test_rank_0_says_where_the_time_went(traced: tuple[Path, list[str]]) -> None:
    (said, silent), folder = traced[1], traced[0] / "ddp_steps/profile/attempt-3"
    assert silent == ""
    ddp = said.splitlines()[: said.splitlines().index(next_profile(said))]
    assert ddp[0].startswith("profile of 2 steps on rank 0, ")
    assert [line.split()[0] for line in ddp[1:5]] == ["compute", "communication", "data", "idle"]
    assert ddp[-1] == f"  traces: {folder}/rank-*.json, for ui.perfetto.dev"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json", "rank-1.json"]


def next_profile(said: str) -> str:
    return [line for line in said.splitlines() if line.startswith("profile of")][1]


def event(name: str, start: float, end: float, category: str, thread: int = 1) -> dict[str, object]:
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": thread, **times}


def test_beside_a_gpu_only_its_kernels_compute() -> None:
    """Made by hand, in microseconds, as CUPTI reports two streams."""
    parts = split(
        [
            event("train step 7", 0, 100, "user_annotation"),
            event("data", 0, 30, "user_annotation"),
            event("aten::mm", 30, 90, "cpu_op"),  # launches, and waits for room in the queue
            event("c10d::allreduce_", 35, 95, "cpu_op"),
            event("Memcpy HtoD (Pinned -> Device)", 20, 35, "gpu_memcpy", 7),
            event("gemm", 40, 60, "kernel", 7),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 80, "kernel", 20),
            event("gemm", 75, 85, "kernel", 7),
            event("gemm", 110, 120, "kernel", 7),  # after the traced step
        ]
    )
    in_us = {name: round(1e6 * getattr(parts, name), 3) for name in ("compute", "communication",
             "data", "idle", "hidden", "wall")}  # fmt: skip
    assert in_us == {
        "compute": 30,
        "communication": 15,
        "data": 35,
        "idle": 20,
        "hidden": 15,
        "wall": 100,
    }
    assert [(o.name[:4], o.calls) for o in parts.operations] == [
        ("gemm", 2),
        ("nccl", 1),
        ("Memc", 1),
    ]


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def on_gpu(
    call: str, at: float, name: str, category: str, start: float, end: float, *, stream: int
) -> list[dict[str, object]]:
    """What torch writes of a piece of a GPU's work: the call, the piece, and an arrow."""
    number = int(at)
    given = {"External id": number, "cbid": 211, "correlation": number}
    done = {"device": 0, "context": 1, "stream": stream, "correlation": number}
    arrow = {"id": number, "pid": 0, "tid": stream, "cat": "ac2g", "name": "ac2g"}
    return [
        event(call, at, at + 5, "cuda_runtime") | {"args": given},
        arrow | {"ph": "s", "ts": at, "pid": 4711},
        event(name, start, end, category, stream) | {"pid": 0, "args": done},
        arrow | {"ph": "f", "ts": start, "bp": "e"},
    ]


def test_a_trace_from_a_gpu_says_what_its_streams_did() -> None:
    """Made by hand in the form, and with the names, that torch writes with CUPTI and NCCL."""
    copy, launch = "cudaMemcpyAsync", "cudaLaunchKernel"
    events = [
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        event("PyTorch Profiler (0)", -50, 1100, "Trace") | {"pid": "Spans"},
        event("train step 5", 0, 1000, "user_annotation"),
        event("data", 10, 110, "user_annotation"),
        event("aten::to", 20, 100, "cpu_op"),
        *on_gpu(copy, 30, "Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 40, 90, stream=7),
        event("aten::mm", 115, 128, "cpu_op"),
        *on_gpu(launch, 120, "ampere_sgemm_128x64_tn", "kernel", 130, 430, stream=7),
        event("c10d::allreduce_", 195, 230, "cpu_op"),
        event("record_param_comms", 198, 225, "cpu_op"),
        event("nccl:all_reduce", 200, 220, "user_annotation"),
        *on_gpu("cudaLaunchKernelExC", 205, ALL_REDUCE, "kernel", 330, 630, stream=24),
        # The annotations once more, around what the GPU did meanwhile.
        event("train step 5", 40, 700, "gpu_user_annotation", 7) | {"pid": 0},
        event("nccl:all_reduce", 330, 630, "gpu_user_annotation", 24) | {"pid": 0},
        # No batch: a parameter from the host's memory.
        *on_gpu(copy, 640, "Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 650, 700, stream=9),
        event("cudaStreamSynchronize", 700, 900, "cuda_runtime") | {"args": {"correlation": 700}},
        *on_gpu(copy, 895, "Memcpy PtoP (Device -> Device)", "gpu_memcpy", 905, 925, stream=7),
    ]
    parts = split(json.loads(json.dumps(events)))
    names = ("compute", "communication", "data", "idle", "hidden", "wall")
    found = {name: round(1e6 * getattr(parts, name)) for name in names}
    assert found == {
        "compute": 350,
        "communication": 220,
        "data": 100,
        "idle": 330,
        "hidden": 100,
        "wall": 1000,
    }
    assert parts.steps == 1
    assert [(o.name.split("(")[0], o.calls, round(1e6 * o.seconds)) for o in parts.operations] == [
        ("ampere_sgemm_128x64_tn", 1, 300),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1, 300),
        ("aten::to", 1, 80),
        ("Memcpy HtoD ", 1, 50),
        ("Memcpy HtoD ", 1, 50),
        ("Memcpy PtoP ", 1, 20),
    ]


def test_no_profile_costs_no_object_and_no_file(tmp_path: Path) -> None:
    profiler = Profiler(None, RunDirectory(tmp_path, RankInfo()), Console(rank=0))
    assert profiler.step(1) is profiler.step(2) is profiler.data()
    with profiler.step(1), profiler.data():
        pass
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_early_has_the_trace_of_its_last_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler = profiler_of(0, tmp_path, 2, 9)
    for step in (1, 2, 3):
        with profiler.step(step):
            torch.ones(8).sum()
    assert not (tmp_path / "profile").exists()
    profiler.close()
    assert (tmp_path / "profile/attempt-3/rank-0.json").exists()
    assert "profile of 2 steps" in capsys.readouterr().out


def test_a_trace_that_cannot_be_written_ends_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").write_text("a file where the folder belongs")
    profiler = profiler_of(1, tmp_path, 1, 1)
    with profiler.step(1):
        pass
    assert f"no trace in {tmp_path}/profile/attempt-3/rank-1.json" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "10-13", "13:10", "0:3", "a:b", "1:2:3"])
def test_a_profile_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="10:13"):
        Profile.parse(text)


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(capture).failed == doctest.testmod(timeline).failed == 0
    assert Profile.parse("5") == Profile(first=5, last=5)
