"""The exceptions, by exit status.

TrainError            1  the run cannot continue; the message gives the reason
├── UsageError        2  the command line or the run directory must be changed first
│   └── RefusedError  2  the run directory holds another or an active run; it is left unchanged
├── ProofError        2  the strategy would not train the same as one process
├── StrategyError     2  the strategy fails with a model that one process trains
├── NonFiniteLoss     1  loss, gradients or weights are not finite; all ranks stop at one step
├── ReplicaError      1  ranks hold different tensors that must match; a retry resumes before that
├── PortError         1  another process has taken the port; a retry gets another port
├── CheckpointError   1  a checkpoint could not be written or is damaged
├── OutputError       1  the predictions could not be written
├── FencedError       1  a newer attempt has taken the run over
└── PeerError         1  another rank failed and has reported the reason
"""

import re

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, start me again."""


class TrainError(Exception):
    """An end of the run that a message explains better than a traceback."""

    exit_status = EXIT_FAILED


class UsageError(TrainError):
    """Something the user must change before the run can start."""

    exit_status = EXIT_USAGE


class RefusedError(UsageError):
    """The run directory holds another run or an active one: nothing in it may be changed."""


class ProofError(TrainError):
    """The strategy does not train this model as one process would, or cannot prove that it does."""

    exit_status = EXIT_USAGE


class StrategyError(TrainError):
    """The strategy raises an exception for this model, before training; one process trains it."""

    exit_status = EXIT_USAGE


class NonFiniteLoss(TrainError):
    """A loss, a gradient or a weight is infinite or not a number on at least one rank."""


class ReplicaError(TrainError):
    """Ranks that must hold the same tensors no longer do; another start may cure it."""


class PortError(TrainError):
    """Another process has taken the port since torchrun chose it; it chooses one for each start."""


class CheckpointError(TrainError):
    """A checkpoint could not be written, or its files do not match its manifest."""


class OutputError(TrainError):
    """The predictions could not be written; what is finished of them stays."""


class FencedError(TrainError):
    """A newer attempt owns the run directory; this one must not write any more."""


class PeerError(TrainError):
    """Another rank failed; that rank reports the cause."""


ECHOES = (
    "connection (closed|reset) by peer",
    "connection (refused|was closed)",
    "broken pipe",
    "remote process exited",
    "connectfullmesh failed",
    "gloo/transport",
    "(recv|send)(value|bytes) failed",
    "failed to (recv|send)",
    "nccl error",
    "nccl communicator was aborted",
    "dist(backend|network|store)error",
    "watchdog caught collective",
    "timed ?out",
    "wait timeout",
    "ends because of others",
    "another rank went away",
    "^the same as (rank [0-9]+|another rank)",
)
"""Messages that only report another rank's loss: regular expressions over lower-case text. The
launcher that reads the logs holds the same list."""

NO_ECHOES = (
    r"nccl(invalidusage|invalidargument|unhandledcudaerror)|invalid (usage|argument) \(run with"
    "|unhandled cuda error|enforce fail|collective mismatch|eaddrinuse"
)
"""Messages about an error on this rank's side: NCCL errors such as two ranks on one GPU, gloo
errors about ranks in different collectives, and a port in use."""


_NODES = re.compile(
    "cuda error: "
    "(?!.*(out of memory|device-side assert|invalid|alloc_failed|not permitted|no kernel))"
    "|unhandled cuda error|nvidia driver|uncorrectable ecc|input/output error|stale file handle"
)
"""Messages about a device, a driver or a file server, over lower-case text."""


def may_pass(error: BaseException) -> bool:
    """Whether another start may succeed without a change by the user, perhaps on another node."""
    if isinstance(error, TrainError) and error.exit_status != EXIT_FAILED:
        return False
    return isinstance(error, (ReplicaError, PortError)) or bool(_NODES.search(str(error).lower()))


def is_collateral(error: BaseException) -> bool:
    """Whether an error is only the echo of a failure elsewhere, so that a retry may help."""
    if isinstance(error, PeerError):
        return True
    if isinstance(error, TrainError):
        return False
    text = str(error).lower()
    if re.search(NO_ECHOES, text):
        return False
    # By name, so that this module (and every usage error) works without importing torch.
    names = {base.__name__ for base in type(error).__mro__}
    if names & {"DistNetworkError", "DistStoreError", "DistBackendError"}:
        return True
    lost = re.search("|".join(ECHOES), text) is not None
    return lost and isinstance(error, (RuntimeError, OSError))
