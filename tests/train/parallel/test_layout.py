"""How ranks are arranged: every rank has one place, and sizes that do not fit show why."""

from __future__ import annotations

import itertools

import pytest

from train.errors import UsageError
from train.parallel.layout import ALONE, Layout, resolve

SIZES = dict(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=2)


def resolved(strategy: str, world_size: int, *, node: int = 8, **sizes: int) -> dict[str, int]:
    """The axes of more than one rank."""
    given: dict[str, int | None] = {axis: sizes.get(axis) for axis in Layout().sizes()}
    layout = resolve(strategy, given, world_size=world_size, local_world_size=node)
    assert layout.world_size == world_size
    return {axis: size for axis, size in layout.sizes().items() if size > 1}


def refusal(strategy: str, world_size: int, **sizes: int) -> str:
    with pytest.raises(UsageError) as caught:
        resolved(strategy, world_size, **sizes)
    return str(caught.value)


def test_every_rank_has_a_place_of_its_own_and_the_innermost_axis_are_neighbours() -> None:
    layout = Layout(**SIZES)
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.world_size)]
    # In the order of nested loops, tp innermost.
    assert places == list(itertools.product(*(range(size) for size in SIZES.values())))
    assert list(layout.coordinates(0)) == list(SIZES)


def test_ranks_share_a_slice_exactly_where_only_pp_cp_or_tp_tell_them_apart() -> None:
    layout = Layout(**SIZES)
    by_data: dict[tuple[int, int], set[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        by_data.setdefault((at["dp_replicate"], at["dp_shard"]), set()).add(layout.shard(rank))
    assert sorted(by_data.values(), key=min) == [{shard} for shard in range(layout.shards)]
    assert layout.shards == 6


def test_a_strategy_s_name_lays_the_ranks_along_its_axis() -> None:
    for strategy, axis in {
        "ddp": "dp_replicate",
        "local-sgd": "dp_replicate",
        "ps": "dp_replicate",
        "fsdp": "dp_shard",
        "pp": "pp",
        "tp": "tp",
        "cp": "cp",
    }.items():
        assert resolved(strategy, 4) == {axis: 4}
    for strategy in ALONE:
        assert resolved(strategy, 1) == {}


def test_given_sizes_leave_the_rest_to_the_strategy_s_axis() -> None:
    assert resolved("fsdp", 8, tp=2) == {"dp_shard": 4, "tp": 2}
    assert resolved("pp", 8, tp=2, dp_shard=2) == {"pp": 2, "dp_shard": 2, "tp": 2}
    assert resolved("hybrid", 8, pp=2, tp=4) == {"pp": 2, "tp": 4}


def test_hsdp_shards_within_a_node_and_replicates_across_nodes() -> None:
    assert resolved("hsdp", 16, node=8) == {"dp_replicate": 2, "dp_shard": 8}
    assert resolved("hsdp", 4, node=4) == {"dp_replicate": 2, "dp_shard": 2}
    assert resolved("hsdp", 16, node=8, tp=2) == {"dp_replicate": 2, "dp_shard": 4, "tp": 2}
    assert resolved("hsdp", 8, dp_shard=2) == {"dp_replicate": 4, "dp_shard": 2}
    assert resolved("hsdp", 8, dp_replicate=4) == {"dp_replicate": 4, "dp_shard": 2}
    assert resolved("hsdp", 1) == {}


@pytest.mark.parametrize(
    ("strategy", "world_size", "sizes", "message"),
    [
        (
            "hybrid",
            6,
            dict(tp=4, pp=2),
            "the sizes of the mesh do not fit 6 ranks: pp 2 x tp 4 = 8; start 8 ranks, or choose "
            "sizes with a product of 6",
        ),
        (
            "hybrid",
            8,
            dict(dp_shard=2, tp=2),
            "the sizes of the mesh do not fit 8 ranks: dp_shard 2 x tp 2 = 4; --dp-replicate 2 "
            "would fit, or start 4 ranks",
        ),
        (
            "fsdp",
            6,
            dict(tp=4),
            "the sizes of the mesh do not fit 6 ranks: tp 4 = 4; start 4 ranks, or choose sizes "
            "with a product of 6",
        ),
        (
            "ddp",
            4,
            dict(tp=2),
            "--strategy ddp knows --dp-replicate only, not --tp 2; leave --strategy out to combine "
            "axes",
        ),
        ("ps", 4, dict(tp=2), "--strategy ps has no axes: leave out --tp 2"),
        (
            "single",
            2,
            {},
            "--strategy single uses one process, but there are 2: each would train a separate "
            "model; use --strategy ddp, or start one process",
        ),
        (
            "manual",
            1,
            dict(tp=2),
            "--strategy manual uses one process, but --tp 2 asks for more: leave it out, or use "
            "--strategy hybrid",
        ),
    ],
)
def test_sizes_that_do_not_fit_show_the_arithmetic_and_a_way_out(
    strategy: str, world_size: int, sizes: dict[str, int], message: str
) -> None:
    assert refusal(strategy, world_size, **sizes) == message


def test_a_layout_is_written_in_the_words_of_its_flags() -> None:
    assert str(Layout(pp=2, tp=4)) == "pp 2 x tp 4"
    assert str(Layout()) == "1 rank"
