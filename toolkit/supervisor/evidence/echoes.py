"""Messages of a rank that only lost another rank; they do not reveal the cause.

`train/errors.py` imports nothing from the toolkit and has a copy, which a test compares.
`toolkit/functions/worker.py` finds the list in `call.json`.
"""

import re

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
"""Regular expressions over lower-case text: gloo's, NCCL's and torch's messages of a lost
connection, and those of `train/`."""

NO_ECHOES = (
    r"nccl(invalidusage|invalidargument|unhandledcudaerror)|invalid (usage|argument) \(run with"
    "|unhandled cuda error|enforce fail|collective mismatch|eaddrinuse"
)
"""Messages about an error on this side: NCCL's, such as two ranks on one GPU; gloo's about ranks in
different collectives; and a port that is in use."""

_ECHO, _NO_ECHO = re.compile("|".join(ECHOES)), re.compile(NO_ECHOES)


def is_echo(message: str) -> bool:
    """Whether a message only reports the loss of another rank.

    >>> is_echo("RuntimeError: Connection closed by peer"), is_echo("ValueError: sample 7")
    (True, False)
    """
    text = message.lower()
    return bool(_ECHO.search(text)) and not _NO_ECHO.search(text)
