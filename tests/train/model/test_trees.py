"""Comparisons of outputs."""

from __future__ import annotations

import torch

from train.model.trees import near


def test_outputs_with_masked_classes_are_compared() -> None:
    scores = torch.tensor([[0.5, 2.0, -torch.inf]])
    assert near(scores, scores + 1e-7, 1e-6)
    assert not near(scores, scores + torch.tensor([0.0, 0.1, 0.0]), 1e-6)
    assert not near(scores, torch.tensor([[0.5, -torch.inf, -torch.inf]]), 1e-6)
    assert not near(scores, torch.tensor([[0.5, torch.nan, -torch.inf]]), 1e-6)
    assert near(torch.tensor([1, 2]).float(), torch.tensor([1.0, 2.0]), 1e-6)
