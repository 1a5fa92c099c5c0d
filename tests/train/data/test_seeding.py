"""Seeding a step, with the numbers of torch.manual_seed() without its price; and a sample."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from train.data.loader import RandomDrawDetector
from train.data.order import mixed, seed_generators

CPU = torch.device("cpu")


def test_numbers_are_those_of_manual_seed() -> None:
    for seed in (0, 1, 2**63 - 1):
        torch.manual_seed(seed)
        wanted = torch.rand(8)
        seed_generators(seed, CPU)
        assert torch.equal(torch.rand(8), wanted)


def test_a_samples_generators_draw_apart() -> None:
    seed_generators(2**40 + 1, CPU)
    torchs = torch.randint(256, (8,)).tolist()
    numpys = np.random.randint(256, size=8).tolist()
    # With one seed both make the same numbers: a sample that is mirrored is always cut as well.
    np.random.seed(torch.initial_seed() % 2**32)
    assert np.random.randint(256, size=8).tolist() == torchs
    assert torchs != numpys != [random.randrange(256) for _ in range(8)]


def test_numbers_that_are_mixed_share_nothing() -> None:
    seeds = [mixed(seed, number) for seed in (0, 1, 2**63 - 1) for number in range(100)]
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    # The first output of SplitMix64 seeded with 0, as its authors' reference code gives it.
    assert mixed(0, 0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.choice("ab"), np.random.rand, lambda: torch.rand(2)],
    ids=["random", "choice", "numpy", "torch"],
)
def test_a_watch_notices_who_draws_and_nobody_else(draw: Callable[[], object]) -> None:
    watch = RandomDrawDetector()
    for _ in range(3):
        draw()  # of no interest: nobody watches
        watch.start()
        np.random.default_rng(0).random()
        assert not watch.drawn()
        watch.start()
        draw()
        assert watch.drawn()


def test_a_watch_puts_the_models_generator_back() -> None:
    watch, before = RandomDrawDetector(), torch.get_rng_state()
    watch.start()
    torch.rand(3)
    watch.put_back()
    assert torch.get_rng_state().equal(before)
