"""The exceptions, by exit status.

TrainError            1  the run cannot go on; the message says why
├── UsageError        2  the command line or the run directory must be changed first
│   └── RefusedError  2  the run directory holds another run, or this one lives; it is left alone
├── NonFiniteLoss     1  loss, gradients or weights are not finite; all ranks stop at one step
├── CheckpointError   1  a checkpoint could not be written or is damaged
├── FencedError       1  a newer attempt has taken the run over
└── PeerError         1  another rank failed and has said why
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
# EX_TEMPFAIL of sysexits.h: nothing is wrong, start me again.
EXIT_PREEMPTED = 75


class TrainError(Exception):
    """An end of the run that a message explains better than a traceback."""

    exit_status = EXIT_FAILED


class UsageError(TrainError):
    """Something the user must change before the run can start."""

    exit_status = EXIT_USAGE


class RefusedError(UsageError):
    """The run directory holds another run, or one that lives: nothing in it may be changed."""


class NonFiniteLoss(TrainError):
    """A loss, a gradient or a weight is infinite or not a number on at least one rank."""


class CheckpointError(TrainError):
    """A checkpoint could not be written, or its files do not match its manifest."""


class FencedError(TrainError):
    """A newer attempt owns the run directory; this one must not write any more."""


class PeerError(TrainError):
    """Another rank failed; that rank reports the cause."""


# Messages of torch.distributed's transport when the *other* side is gone. Seen with gloo; the
# NCCL ones are the watchdog's words.
_COLLATERAL = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "wait timeout",
    "connectfullmesh failed",
    "gloo/transport",
    "remote process exited",
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
)
# NCCL's messages about a mistake or a defect on this side, such as two ranks on one GPU.
_OWN = ("ncclinvalidusage", "ncclinvalidargument", "ncclunhandledcudaerror")


def is_collateral(error: BaseException) -> bool:
    """Say whether an error is only the echo of a failure elsewhere, so that a retry may help."""
    if isinstance(error, PeerError):
        return True
    if isinstance(error, TrainError):
        return False
    text = str(error).lower()
    if any(word in text for word in _OWN):
        return False
    # By name, so that this module (and every usage error) works without importing torch.
    names = {base.__name__ for base in type(error).__mro__}
    if names & {"DistNetworkError", "DistStoreError", "DistBackendError"}:
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(word in text for word in _COLLATERAL)
