"""`--gradient-sync`: reduce after the last micro-batch or after each, chosen by memory."""

from __future__ import annotations

import doctest
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.dryrun.test_counts import WIDE, WIDE_BYTES
from tests.train.dryrun.test_figures import Bytes, tracked
from tests.train.parallel.test_ladder import close
from tests.train.support.ladder import Case, climb, trainer_of
from tests.train.support.ranks import on_ranks
from train.cli import compatibility
from train.cli.config import Config
from train.dryrun import examine, show
from train.parallel import fsdp
from train.parallel.base import Sums
from train.parallel.hybrid import Composed
from train.rundir.console import Console
from train.runtime import devices
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo

MIB = 2**20
# In double precision, where a fault and rounding are far apart.
MOST = 1e-12
EACH: dict[str, Any] = {
    **{"task": "chars", "micro_batch": 1, "gradient_sync": "each", "clip_norm": 1.0},
    "global_batch": 8,
}
EQUAL: dict[int, dict[str, dict[str, Any]]] = {
    2: {"fsdp": {"strategy": "fsdp"}, "cp": {"cp": 2}},
    4: {
        "hsdp": {"dp_replicate": 2, "dp_shard": 2},
        "fsdp x tp": {"dp_shard": 2, "tp": 2},
        "fsdp x cp": {"dp_shard": 2, "cp": 2},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("world", EQUAL)
def test_gradients_reduced_in_each_micro_batch_equal_one_process(world: int) -> None:
    cases = [
        Case(name=name, world_size=world, config=Config(**EACH, **chosen))
        for name, chosen in EQUAL[world].items()
    ]
    differences = climb(cases, dtype=torch.float64)
    assert {name: far for name, far in differences.items() if not close(far, MOST)} == {}


def test_pipelines_refuse_to_reduce_in_each_micro_batch() -> None:
    config = Config(task="chars", pp=2, dp_shard=2, gradient_sync="each", spawn=4)
    (problem,) = compatibility.problems(config, RankInfo())
    assert problem.startswith("--gradient-sync each cannot be combined with --pp: ")


@pytest.mark.parametrize("chosen", [{"strategy": "ddp"}, {"tp": 2}, {"tp": 1, "dp_replicate": 2}])
def test_ranks_that_shard_nothing_have_no_choice(chosen: dict[str, Any]) -> None:
    config = Config(task="chars", gradient_sync="each", spawn=2, **chosen)
    problems = compatibility.problems(config, RankInfo())
    wanted = "--gradient-sync each belongs to --strategy fsdp or --dp-shard"
    assert any(problem.startswith(wanted) for problem in problems)


def held_by(rank: int, chosen: list[str]) -> list[tuple[int, str]]:
    """Measure the memory that a step adds until its last micro-batch, and read the report of it."""
    rank_info = RankInfo(
        rank=rank, world_size=2, local_rank=rank, local_world_size=2, launched=True
    )
    group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
    # Of the two ranks, only the second has so little that whole gradients would be too much.
    memory = [100 * WIDE_BYTES, 9 * WIDE_BYTES][rank]
    devices.memory_of_a_rank = lambda group: memory
    results = []
    for sync in chosen:
        config = Config(
            task=WIDE,
            strategy="fsdp",
            global_batch=8,
            micro_batch=1,
            gradient_sync=sync,  # type: ignore[arg-type]
        )
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(config, config.layout_on(rank_info), group, Path(folder))
            strategy = trainer.strategy
            assert isinstance(strategy, Composed)
            for _ in range(2):
                trainer.train_step()
            sizes: list[int] = []
            with tracked(trainer) as tracker:
                strategy.backward = functools.partial(  # type: ignore[method-assign]
                    noting, tracker, sizes, strategy.backward
                )
                trainer.train_step()
            results.append((sizes[-1] - sizes[0], strategy.describe()))
            group.sum([0.0])
    return results


def noting(
    tracker: Bytes, sizes: list[int], backward: Callable[..., Sums], *arguments: Any
) -> Sums:
    """Note how much memory is taken before a micro-batch."""
    (now,) = tracker.get_tracker_snapshot().values()
    sizes.append(now["Total"])
    return backward(*arguments)


@pytest.mark.slow
def test_whole_gradients_are_held_until_the_last_micro_batch_or_only_parts_of_them() -> None:
    chosen = ["last", "each", "auto"]
    of_rank_0, of_rank_1 = on_ranks(2, held_by, chosen)
    # The losses of the three micro-batches before are there as well, and perhaps one piece's
    # gradient, which a thread of gloo lets go of a moment after it has been reduced.
    slack = 100 + WIDE_BYTES / 4
    for results in (of_rank_0, of_rank_1):
        (last, of_last), (each, of_each), (auto, of_auto) = results
        assert WIDE_BYTES <= last <= WIDE_BYTES + slack
        # The automatic choice is the same on the rank that has more memory.
        for parts in (each, auto):
            assert WIDE_BYTES / 2 <= parts <= WIDE_BYTES / 2 + slack
        assert of_last.endswith("after the last micro-batch: --gradient-sync last")
        assert of_each.endswith("after each micro-batch: --gradient-sync each")
        assert of_auto == (
            "gradients are reduced after each micro-batch: whole, they take 4.0 MiB, more than 10% "
            "of a device's 36.1 MiB"
        )


@pytest.mark.parametrize(("device", "when"), [(None, "last"), (39, "each"), (41, "last")])
def test_a_dry_run_chooses_as_a_run_would(device: int | None, when: str) -> None:
    memory = None if device is None else f"{device}MiB"
    config = Config(task=WIDE, dp_shard=2, global_batch=8, micro_batch=1, device_memory=memory)
    (rank,) = examine(config).ranks
    assert rank.gradient_sync is not None
    assert rank.gradient_sync.when == when


def test_a_dry_run_says_what_it_has_chosen_and_what_would_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = Config(
        task=WIDE, dp_shard=4, global_batch=16, micro_batch=1, gradient_sync="last",
        device_memory="9MiB",
    )  # fmt: skip
    show(config, Console(rank=0))
    text = capsys.readouterr().out
    assert "gradients are reduced after the last micro-batch: --gradient-sync last" in text
    assert "--gradient-sync each (" in text


def test_a_job_has_what_its_control_group_allows(tmp_path: Path) -> None:
    inner = tmp_path / "cgroup/job/step"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{64 * MIB}\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/job/step\n")
    assert devices.memory_of_the_host(tmp_path / "cgroup", membership) == 64 * MIB
    whole = devices.memory_of_the_host(tmp_path / "cgroup", tmp_path / "none")
    assert whole > 64 * MIB


def test_ranks_on_the_cpu_share_the_memory_of_the_host() -> None:
    rank_info = RankInfo(local_world_size=4)
    mine = devices.memory_of_a_rank(RankGroup(rank_info=rank_info, device=torch.device("cpu")))
    assert mine == devices.memory_of_the_host() // 4


def test_examples_are_right() -> None:
    examples = doctest.testmod(fsdp)
    assert examples.attempted and not examples.failed
