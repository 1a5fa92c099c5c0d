"""Messages of a rank that has only lost another one, so that they name no cause.

`train/errors.py`, which imports nothing of the toolkit, holds a copy, which a test compares.
`toolkit/functions/worker.py` finds the list in `call.json`.
"""

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
"""Regular expressions over lower-case text: gloo's, NCCL's and
torch's messages of a lost connection, and those of `train/`."""

NO_ECHOES = "nccl(invalidusage|invalidargument|unhandledcudaerror)|enforce fail|collective mismatch"
"""Messages about a mistake or a defect on this side: NCCL's, such as two ranks on one GPU, and
gloo's about ranks that are in different collectives."""
