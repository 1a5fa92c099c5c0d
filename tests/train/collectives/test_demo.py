"""`python -m train.collectives`: its statements are true, and it detects wrong results."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import io
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from tests.train.conftest import Start
from tests.train.support.ranks import on_ranks
from train.collectives import demo, options
from train.collectives.demo import Ranks, WrongResult
from train.collectives.operations import COLLECTIVES, Call, Collective
from train.collectives.options import NAMES, SIZED, Options, parse
from train.collectives.session import run
from train.errors import EXIT_FAILED, EXIT_USAGE, UsageError
from train.rundir.console import Console
from train.runtime.rank import RankInfo

ALONE = RankInfo()
OF_THREE = RankInfo(world_size=3, launched=True, addressed=True)


def these_ranks(rank: int, name: str) -> Ranks:
    return Ranks(
        rank_info=RankInfo(rank=rank, world_size=3, launched=True, addressed=True),
        device=torch.device("cpu"),
        store=PrefixStore(name, _get_default_store()),
        timeout=timedelta(seconds=60),
    )


def output_of(rank: int, wanted: Options, collectives: tuple[Collective, ...]) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        name = ",".join(collective.name for collective in collectives)
        status = run(wanted, these_ranks(rank, name), Console(rank=rank), collectives)
    return status, said.getvalue()


def largest_instead_of_sum(mine: Tensor, rank: int, world_size: int) -> Call:
    def call() -> Tensor:
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return mine

    return call


def late_on_rank_1(mine: Tensor, rank: int, world_size: int) -> Call:
    """Right for few numbers, and wrong on one rank for many."""

    def call() -> Tensor:
        dist.broadcast(mine, src=0)
        if rank == 1 and mine.numel() > 2:
            mine[-1] += 1
        return mine

    return call


def planted(rank: int) -> list[tuple[int, str]]:
    by_name = {collective.name: collective for collective in COLLECTIVES}
    wrong_sum = dataclasses.replace(by_name["all_reduce"], prepare=largest_instead_of_sum)
    wrong_block = dataclasses.replace(by_name["broadcast"], prepare=late_on_rank_1)
    few = Options(only=("all_reduce",))
    many = Options(only=("broadcast",), sizes_bytes=(64,), repeats=1)
    return [output_of(rank, few, (wrong_sum,)), output_of(rank, many, (wrong_block,))]


def let_through_early(rank: int) -> str:
    """A barrier that does not wait: every rank goes on as it comes."""
    ranks, silent = these_ranks(rank, "early"), Console(rank=1)
    try:
        demo.demonstrate_barrier(ranks, silent, repeats=0, barrier=lambda: None)
    except WrongResult as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_every_collective_is_right_on_three_ranks_and_says_so(start: Start, tmp_path: Path) -> None:
    flags = ("--sizes", "1KiB,100KiB", "--repeats", "2")
    module = ("-m", "train.collectives")
    output = start.ranks(3, *flags, run_dir=tmp_path, module=module).finish().output()

    assert "3 ranks, gloo on cpu\n" in output
    assert re.findall(r"^(\w+): ", output, re.MULTILINE) == list(NAMES)
    assert output.count("right on all 3 ranks\n") == len(NAMES)
    assert "  rank 1   3 4  →  9 12\n" in output
    assert "  rank 2   30 31 32  →  12 22 32\n" in output
    assert "  rank 0   -  →  2\n" in output  # the monitored barrier names rank 2
    sizes = re.findall(r"^ +(\S+ \S+) +\S+ [µm]s +\S+ .B/s +\S+ .B/s$", output, re.MULTILINE)
    assert sizes == ["1 KiB", "100 KiB"] * len(SIZED)
    assert "Warning" not in output


@pytest.mark.slow
def test_it_starts_its_own_ranks_and_passes_a_failure_on(start: Start, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "train.collectives", "--nproc", "2", "--max-size", "0"]
    fine = start.command([*argv, "--only", "gather"], tmp_path, 0, {})
    assert "\ngather: " in fine.finish().output()
    assert fine.output().count("right on all 2 ranks") == 1
    # torch finds no such network interface, on any rank.
    broken = {"GLOO_SOCKET_IFNAME": "no-such-interface"}
    failed = start.command(argv, tmp_path, 0, broken)
    assert "no-such-interface" in failed.finish(EXIT_FAILED).output()


@pytest.mark.slow
def test_a_wrong_result_is_named_with_rank_and_both_values() -> None:
    results = on_ranks(3, planted)
    assert [[status for status, _ in both] for both in results] == [[EXIT_FAILED] * 2] * 3
    (_, few), (_, many) = results[0]
    assert few.endswith(
        "train: all_reduce: rank 0 expected 9 12, got 5 6\n"
        "all_reduce: rank 1 expected 9 12, got 5 6\n"
        "all_reduce: rank 2 expected 9 12, got 5 6\n"
    )
    assert many.endswith("train: broadcast of 64 B: wrong result on rank 1\n")
    assert [said for both in results[1:] for _, said in both] == [""] * 4


def test_a_barrier_that_does_not_wait_is_found() -> None:
    messages = on_ranks(3, let_through_early)
    assert len(set(messages)) == 1
    assert "barrier: rank 0 expected 3, got 1" in messages[0]


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_largest_buffer_counts_as_in_nccl_tests(world_size: int) -> None:
    found = {c.name: (c.numbers(world_size), c.bus_factor(world_size)) for c in COLLECTIVES}
    others = (world_size - 1) / world_size
    assert found == {
        "all_reduce": (2, 2 * others),
        "broadcast": (2, 1),
        "reduce": (2, 1),
        "scatter": (world_size, others),
        "gather": (2 * world_size, others),
        "all_gather": (2 * world_size, others),
        "reduce_scatter": (world_size, others),
        "all_to_all": (world_size, others),
        "send_recv": (2, 1),
    }


def test_bandwidths_follow_from_size_and_latency() -> None:
    line = demo.Measured(size_bytes=8_000_000, latency_s=0.004, bus_factor=1.5)
    assert (line.algorithm_bandwidth, line.bus_bandwidth) == (2e9, 3e9)


@pytest.mark.parametrize(
    ("argv", "rank_info", "words"),
    [
        ([], ALONE, ["at least 2, here is 1", "--nproc 2", "torchrun --nproc-per-node 2"]),
        (["--nproc", "1"], ALONE, ["at least 2, here is 1", "--nproc 2"]),
        ([], RankInfo(launched=True, addressed=True), ["at least 2, here is 1"]),
        (["--nproc", "2"], OF_THREE, ["has started 3 ranks already"]),
        (["--nprocs", "2"], ALONE, ["unknown flag '--nprocs'; did you mean '--nproc'?"]),
        (["--nproc", "two"], ALONE, ["--nproc 'two'", "whole number"]),
        (["--nproc"], ALONE, ["--nproc: expected one argument"]),
        (["--only", "all_reduse"], OF_THREE, ["unknown 'all_reduse'; did you mean 'all_reduce'?"]),
        (["--sizes", "4kb"], OF_THREE, ["--sizes '4kb'", "4KiB"]),
        (["--sizes", "0"], OF_THREE, ["--sizes '0'", "at least one byte"]),
        (["--repeats", "0"], OF_THREE, ["--repeats '0'", "at least 1"]),
        (["--sizes", "4KiB", "--max-size", "1MiB"], OF_THREE, ["give one of them"]),
    ],
)
def test_a_bad_command_line_is_refused_with_the_way_out(
    argv: list[str], rank_info: RankInfo, words: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        parse(argv, rank_info)
    assert [word for word in words if word not in str(refused.value)] == []
    assert refused.value.exit_status == EXIT_USAGE


def test_sizes_go_up_in_steps_of_four_to_the_largest() -> None:
    assert parse(["--max-size", "64KiB"], OF_THREE).sizes_bytes == (1024, 4096, 16384, 65536)
    assert parse(["--max-size", "0"], OF_THREE).sizes_bytes == ()
    assert parse(["--sizes", "1MiB,96"], OF_THREE).sizes_bytes == (1 << 20, 96)


@pytest.mark.parametrize("module", [demo, options])
def test_examples_in_docstrings_hold(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]  # modules, by import
    assert (result.failed, result.attempted > 0) == (0, True)
