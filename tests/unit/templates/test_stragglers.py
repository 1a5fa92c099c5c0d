"""A rank that is slower than the others, by the times at which it begins collectives."""

import json
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.watchdog import program

RECORDED = Path(__file__).parents[2] / "data/recorded"
RANKS, SEEDS = 8, 200
STEPS = 21
"""One more than it takes to name a rank: the last one only ends the step before."""


@pytest.fixture(scope="module")
def stragglers() -> ModuleType:
    return program("stragglers")


@dataclass(frozen=True)
class Collective:
    """A collective of each step."""

    work: float
    """The share of the step's work before it."""

    blocks: bool = True
    """Whether ranks wait for its end before they go on; the others end behind the computation."""


# As DDP does it, and as loops that agree on something after each step, or shard their model.
STEP: Mapping[str, Sequence[Collective]] = {
    "one": [Collective(1)],
    "agreed": [Collective(1), Collective(0.0005)],
    "buckets": [
        *(Collective(share, blocks=False) for share in (0.4, 0.2, 0.2)),
        Collective(0.2),
        Collective(0.001),
    ],
    "sharded": [Collective(0.1)] * 10,
}
TWO_NODES = [0] * 4 + [1] * 4


Begun = dict[int, list[tuple[float, int]]]
"""By rank: when it begins each collective, and of what kind that is."""


def simulated(
    seed: int,
    step: Sequence[Collective],
    *,
    slow: int = -1,
    factor: float = 1.3,
    loads_s: float = 0.0,
    without: int = -1,
    clocks: Sequence[float] = (0.0, 0.0),
) -> tuple[Begun, float]:
    """Return when ranks begin collectives, and how long they take in all.

    A step is a second of work with 5 % of jitter. One rank is slow, or has to wait for its data.
    """
    numbers = random.Random(seed)
    begun: Begun = {rank: [] for rank in range(RANKS)}
    now = [100.0] * RANKS
    for _ in range(STEPS):
        jitter = [numbers.gauss(1, 0.05) for _ in range(RANKS)]
        for place, collective in enumerate(step):
            for rank in range(RANKS):
                took = collective.work * jitter[rank]
                if rank == slow:
                    took = took * factor + (loads_s if place == 0 else 0.0)
                now[rank] += took
                shown = now[rank] + clocks[TWO_NODES[rank]]
                kind = 0 if step is STEP["sharded"] else place
                begun[rank].append((shown, kind))
            if collective.blocks:
                end = max(when for rank, when in enumerate(now) if rank != without)
                now = [end + 0.05 / len(step)] * RANKS
    return begun, now[0] - 100.0


HERE = dict.fromkeys(range(RANKS), "n1")
THERE = {rank: f"n{node + 1}" for rank, node in enumerate(TWO_NODES)}


def named_in(
    stragglers: ModuleType, begun: Begun, nodes: Mapping[int, str] = HERE, *, shift: int = 0
) -> Any:
    """Return who is named; ranks may have other newest collectives, by `shift` for each."""
    compared = compared_in(stragglers, begun, nodes, shift=shift)
    return compared and compared.straggler


def compared_in(
    stragglers: ModuleType, begun: Begun, nodes: Mapping[int, str] = HERE, *, shift: int = 0
) -> Any:
    """Return how the ranks differ."""
    arrivals = {}
    for rank, collectives in begun.items():
        times, kinds = zip(*collectives[rank * shift :], strict=True) if collectives else ((), ())
        first = rank * shift + 1
        arrivals[rank] = stragglers.Arrivals(first, times, kinds if rank == 0 else ())
    return stragglers.compare(arrivals, nodes)


@pytest.mark.parametrize("shape", STEP)
def test_a_slow_rank_is_named_within_20_steps_and_its_cost_is_right(
    shape: str, stragglers: ModuleType
) -> None:
    named = 0
    for seed in range(SEEDS):
        slow = seed % RANKS
        begun, took = simulated(seed, STEP[shape], slow=slow)
        _, better = simulated(seed, STEP[shape], slow=slow, without=slow)
        found = named_in(stragglers, begun)
        if found is not None and found.rank == slow:
            named += 1
            assert 1 + found.faster == pytest.approx(took / better, rel=0.05)
    assert named >= 0.99 * SEEDS


@pytest.mark.parametrize("shape", STEP)
def test_who_is_slow_waits_least_and_the_others_for_the_difference(
    shape: str, stragglers: ModuleType
) -> None:
    """A step is a second of work and 0.05 s of communication; of one rank it is 1.3 s of work."""
    for seed in range(SEEDS):
        slow = seed % RANKS
        begun, took = simulated(seed, STEP[shape], slow=slow)
        waits = compared_in(stragglers, begun).waits
        assert sorted(waits) == [*range(RANKS)]
        assert min(waits, key=waits.__getitem__) == slow
        for rank, share in waits.items():
            own_s = (1 - share) * took / STEPS
            assert own_s == pytest.approx(1.35 if rank == slow else 1.05, rel=0.08), rank


@pytest.mark.parametrize("shape", STEP)
@pytest.mark.parametrize("nodes", [HERE, THERE], ids=["one node", "two nodes"])
def test_no_rank_is_named_where_all_are_alike(
    shape: str, nodes: Mapping[int, str], stragglers: ModuleType
) -> None:
    clocks = (0.0, 0.4) if nodes is THERE else (0.0, 0.0)
    for seed in range(SEEDS):
        begun, _ = simulated(seed, STEP[shape], clocks=clocks)
        assert named_in(stragglers, begun, nodes) is None


@pytest.mark.parametrize("shape", ["agreed", "buckets"])
@pytest.mark.parametrize("clock", [-0.4, 0.4])
def test_clocks_of_nodes_may_differ(shape: str, clock: float, stragglers: ModuleType) -> None:
    for seed in range(SEEDS):
        slow = seed % RANKS
        begun, took = simulated(seed, STEP[shape], slow=slow, clocks=(0.0, clock))
        _, better = simulated(seed, STEP[shape], slow=slow, without=slow)
        found = named_in(stragglers, begun, THERE)
        assert found is not None and found.rank == slow
        assert 1 + found.faster == pytest.approx(took / better, rel=0.05)


def test_nodes_with_one_collective_in_a_step_are_not_compared(stragglers: ModuleType) -> None:
    begun, _ = simulated(1, STEP["one"], slow=5, clocks=(0.0, 0.4))
    assert named_in(stragglers, begun, THERE) is None


def test_a_rank_that_waits_for_its_data_is_named(stragglers: ModuleType) -> None:
    for seed in range(SEEDS):
        buckets = partial(simulated, seed, STEP["buckets"], slow=3, factor=1.0, loads_s=0.3)
        begun, took = buckets()
        _, better = buckets(without=3)
        found = named_in(stragglers, begun)
        assert found is not None and found.rank == 3
        assert 1 + found.faster == pytest.approx(took / better, rel=0.05)


def test_too_few_steps_and_ranks_say_nothing(stragglers: ModuleType) -> None:
    begun, _ = simulated(1, STEP["one"], slow=0)
    assert named_in(stragglers, begun).rank == 0
    assert named_in(stragglers, begun, shift=1) is None, "the last rank has seen fewer steps"
    assert named_in(stragglers, {0: begun[0]}) is None
    assert named_in(stragglers, {**begun, 1: []}) is None
    assert named_in(stragglers, {}) is None
    # Collectives that one rank has begun long ago, and another one has not recorded at all.
    late = {rank: [(when, 0) for when, _ in own] for rank, own in begun.items()}
    arrivals = {
        rank: stragglers.Arrivals(100, *zip(*(own * 10), strict=True)) for rank, own in late.items()
    }
    arrivals[5] = stragglers.arrivals_of([])
    assert stragglers.compare(arrivals, HERE) is None


def test_ranks_may_have_begun_different_collectives(stragglers: ModuleType) -> None:
    begun, _ = simulated(1, STEP["buckets"], slow=3)
    begun = {rank: collectives * 2 for rank, collectives in begun.items()}
    for rank, collectives in begun.items():
        half = len(collectives) // 2
        collectives[half:] = [(when + 60, kind) for when, kind in collectives[half:]]
        del collectives[len(collectives) - rank :]
    assert named_in(stragglers, begun, shift=2).rank == 3


def test_collectives_that_do_not_recur_say_nothing(stragglers: ModuleType) -> None:
    begun, _ = simulated(1, STEP["one"], slow=0)
    odd = {rank: [(when, n) for n, (when, _) in enumerate(own)] for rank, own in begun.items()}
    assert named_in(stragglers, odd) is None


def test_only_collectives_of_all_ranks_count(stragglers: ModuleType) -> None:
    def entry(number: int, name: str, group: str = "0", *, p2p: bool = False) -> dict[str, object]:
        return {
            "collective_seq_id": number,
            "profiling_name": name,
            "process_group": [group, "default_pg"],
            "is_p2p": p2p,
            "input_sizes": [[2]],
            "input_dtypes": ["Float"],
            "time_created_ns": number,
        }

    entries = [
        entry(1, "gloo:all_reduce"),
        entry(2, "nccl:all_reduce"),
        entry(3, "gloo:all_reduce", "1"),
        entry(4, "gloo:send", p2p=True),
        entry(5, "gloo:all_reduce"),
    ]
    assert stragglers.arrivals_of(entries)[:2] == (5, array("d", [5e-9])), "those without a gap"
    first, times, kinds, _ = stragglers.arrivals_of([*entries, entry(6, "gloo:all_reduce")])
    assert (first, [*times]) == (5, [5e-9, 6e-9])
    assert len(kinds) == 2 and len({*kinds}) == 1
    assert stragglers.arrivals_of([]).times == array("d")


# ---- On GPUs


@dataclass(frozen=True)
class Queued:
    """A collective of each step on a GPU, beside which the GPU may compute."""

    work: float
    """The share of the step's work before it."""

    blocks: bool = False
    """Whether the GPU waits for its end before it computes on."""

    numbers: int = 1000
    """How many it exchanges: torch cuts buckets alike, and a model's layers are."""


ON_GPU: Mapping[str, Sequence[Queued]] = {
    "one": [Queued(1, blocks=True)],
    "buckets alike": [Queued(0.5), *[Queued(0.125)] * 3, Queued(0.125, blocks=True)],
    "buckets": [Queued(0.4), Queued(0.3, numbers=7), Queued(0.3, blocks=True, numbers=9)],
    "sharded": [Queued(0.05, blocks=True)] * 20,
}


def queued(
    seed: int,
    step: Sequence[Queued],
    *,
    slow: int = -1,
    factor: float = 1.3,
    loads_s: float = 0.0,
    without: int = -1,
    steps: int = 2 * STEPS,
    stops_s: float = 0.0,
) -> tuple[dict[int, list[dict[str, object]]], float]:
    """Return torch's entries of ranks whose GPUs make such steps, and how long these take in all.

    Each GPU has one queue of computation, and one of collectives that begin in order. A step is a
    second of work with 5 % of jitter; a collective takes a hundredth of that. Once, rank 0 stops.
    """
    numbers = random.Random(seed)
    entries: dict[int, list[dict[str, object]]] = {rank: [] for rank in range(RANKS)}
    compute, ended, number = [0.0] * RANKS, 0.0, 0
    for at in range(steps):
        jitter = [numbers.gauss(1, 0.05) for _ in range(RANKS)]
        for place, collective in enumerate(step):
            number += 1
            for rank in range(RANKS):
                own = collective.work * jitter[rank] * (factor if rank == slow else 1.0)
                if place == 0:
                    own += loads_s if rank == slow else 0.0
                    own += stops_s if (rank, at) == (0, steps // 2) else 0.0
                compute[rank] += own
            begins = [max(when, ended) for when in compute]
            ended = max(b for rank, b in enumerate(begins) if rank != without) + 0.01 / len(step)
            for rank in range(RANKS):
                entries[rank].append(
                    {
                        "collective_seq_id": number,
                        "profiling_name": "nccl:all_reduce",
                        "process_group": ["0", "default_pg"],
                        "is_p2p": False,
                        "input_sizes": [[collective.numbers]],
                        "input_dtypes": ["Float"],
                        # When it was queued, which no rank's speed shows in.
                        "time_created_ns": int(1e9 * (5e4 * rank + ended)),
                        "duration_ms": 1000 * (ended - begins[rank]),
                    }
                )
            if collective.blocks:
                compute = [ended] * RANKS
    return entries, ended


def compared_on_gpus(
    stragglers: ModuleType, entries: Mapping[int, Sequence[Mapping[str, object]]]
) -> Any:
    arrivals = {rank: stragglers.arrivals_of(own) for rank, own in entries.items()}
    # As the ranks send them.
    sent = {r: own._replace(times=(), kinds=()) if r else own for r, own in arrivals.items()}
    return stragglers.compare(sent, THERE)


@pytest.mark.parametrize("shape", ON_GPU)
def test_a_slow_gpu_is_named_and_its_cost_lies_within_the_bounds(
    shape: str, stragglers: ModuleType
) -> None:
    """Whatever the clocks of the two nodes say: rank 1's is 50,000 s ahead of rank 0's."""
    for seed in range(RANKS):
        slow = seed
        entries, took = queued(seed, ON_GPU[shape], slow=slow, steps=STEPS)
        _, better = queued(seed, ON_GPU[shape], slow=slow, steps=STEPS, without=slow)
        found = compared_on_gpus(stragglers, entries).straggler
        assert found is not None and found.rank == slow
        assert 1 + found.faster <= 1.08 * took / better
        assert found.at_most is None or 1 + found.at_most >= 0.95 * took / better


def test_the_cost_of_a_rank_that_waits_for_its_data_is_right_on_gpus(
    stragglers: ModuleType,
) -> None:
    """Where steps can be told apart, by sizes that differ."""
    for seed in range(SEEDS // 8):
        found = partial(queued, seed, ON_GPU["buckets"], slow=3, factor=1.0, loads_s=0.3)
        entries, took = found()
        _, better = found(without=3)
        compared = compared_on_gpus(stragglers, entries)
        assert compared.straggler.rank == 3
        assert 1 + compared.straggler.faster == pytest.approx(took / better, rel=0.08)
        assert min(compared.waits, key=compared.waits.__getitem__) == 3


@pytest.mark.parametrize("shape", ON_GPU)
def test_no_gpu_is_named_where_all_are_alike_or_one_stops_once(
    shape: str, stragglers: ModuleType
) -> None:
    for seed in range(RANKS):
        for stops_s in (0.0, 30.0):
            entries, _ = queued(seed, ON_GPU[shape], stops_s=stops_s)
            assert compared_on_gpus(stragglers, entries).straggler is None


@pytest.mark.parametrize("kind", ["slow cpu", "slow gpu"])
def test_the_slow_rank_of_a_recorded_run_is_named(kind: str, stragglers: ModuleType) -> None:
    """On a real GPU: rank 1 comes 0.031 s or 0.025 s too late to each step of 0.085 and 0.066 s."""
    recorded = json.loads((RECORDED / "nccl-slow-rank.json").read_text())[kind]
    entries = {rank: recorded[f"rank {rank}"] for rank in (0, 1)}
    compared = compared_on_gpus(stragglers, entries)
    assert compared.straggler.rank == 1
    late_s, step_s = {"slow cpu": (0.031, 0.085), "slow gpu": (0.025, 0.066)}[kind]
    assert compared.straggler.faster == pytest.approx(late_s / (step_s - late_s), rel=0.05)
    assert compared.waits[0] == pytest.approx(late_s / step_s, rel=0.08)
    assert compared.waits[1] < 0.01


def test_gpus_without_times_are_not_compared(stragglers: ModuleType) -> None:
    entries, _ = queued(1, ON_GPU["one"], slow=3)
    begun = {rank: stragglers.arrivals_of(own) for rank, own in entries.items()}
    untimed = [entry | {"duration_ms": None} for entry in entries[5]]
    assert stragglers.compare({**begun, 5: stragglers.arrivals_of(untimed)}, THERE) is None


def test_of_many_gpus_fewer_collectives_are_compared(stragglers: ModuleType) -> None:
    entries, _ = queued(1, ON_GPU["one"], steps=2500)
    for world, kept in ((1, 2000), (200, 2000), (400, 1000), (10_000, 400)):
        assert len(stragglers.arrivals_of(entries[0], world).took) == kept
