"""Causes are told from echoes."""

from __future__ import annotations

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from train.errors import CheckpointError, NonFiniteLoss, PeerError, UsageError, is_collateral


@pytest.mark.parametrize(
    "error",
    [
        PeerError("rank 0: disk full"),
        DistNetworkError("refused"),
        DistStoreError("timed out"),
        RuntimeError(
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"
        ),
        RuntimeError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"),
    ],
)
def test_the_end_of_another_rank_is_an_echo(error: Exception) -> None:
    assert is_collateral(error)


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no run directory"),
        NonFiniteLoss("step 3"),
        CheckpointError("cannot write: Broken pipe"),
        ValueError("connection closed by peer"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(28, "No space left on device"),
    ],
)
def test_what_happened_here_is_a_cause(error: Exception) -> None:
    assert not is_collateral(error)
