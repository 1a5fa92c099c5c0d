"""One list of messages that only report the loss of another rank, in two places."""

import doctest

import pytest

from toolkit.functions import worker
from toolkit.supervisor.evidence import echoes
from train import errors


def test_all_programs_hold_the_same_list() -> None:
    assert (errors.ECHOES, errors.NO_ECHOES) == (echoes.ECHOES, echoes.NO_ECHOES)


@pytest.mark.parametrize(
    ("message", "echo"),
    [
        ("[/gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.0.0.1]:41234", True),
        ("Connection reset by peer", True),
        ("NCCL error in: Socket.cpp:12, remote process exited or there was a network error", True),
        ("NCCL error: ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0", False),
        # The lines after it, with NCCL's own name of the error, are not in a traceback's message.
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, invalid usage "
            "(run with NCCL_DEBUG=WARN for details), NCCL version 2.27.5",
            False,
        ),
        ("NCCL error in: NCCLUtils.cpp:9, unhandled cuda error (run with NCCL_DEBUG=INFO", False),
        ("NCCL error in: NCCLUtils.cpp:9, unhandled system error (run with NCCL_DEBUG=INFO", True),
        ("DistStoreError: Timed out after 601 seconds waiting for clients", True),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", True),
        ("[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes", False),
        ("RuntimeError: Is there a distributed collective mismatch in your code?", False),
        ("the same as rank 3", True),
        ("CUDA out of memory", False),
        ("not the same as rank 3", False),
    ],
)
def test_a_lost_peer_is_known_by_its_message_on_every_side(message: str, echo: bool) -> None:
    assert echoes.is_echo(message) is echo
    error, patterns = RuntimeError(message), ("|".join(echoes.ECHOES), echoes.NO_ECHOES)
    assert (worker.is_echo(error, *patterns), errors.is_collateral(error)) == (echo, echo)


def test_the_examples_are_true() -> None:
    assert doctest.testmod(echoes).failed == 0
