"""Seeding a step: the numbers of torch.manual_seed(), without its price."""

from __future__ import annotations

import torch

from train.seeding import seed_device


def test_numbers_are_those_of_manual_seed() -> None:
    for seed in (0, 1, 2**63 - 1):
        torch.manual_seed(seed)
        wanted = torch.rand(8)
        seed_device(seed, torch.device("cpu"))
        assert torch.equal(torch.rand(8), wanted)
