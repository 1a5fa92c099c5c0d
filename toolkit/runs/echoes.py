"""Messages that only report another rank's loss, so that they name no cause.

Four programs need the list, and three of them import nothing of the toolkit: `train/errors.py`,
`toolkit/functions/worker.py` (copied beside the payload) and `templates/first_error.sh` (rendered
into scripts) hold copies. A test compares them.
"""

import re

__all__ = ["ECHOES", "NO_ECHOES", "is_echo"]

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
"""Regular expressions over lower-case text, which Python and awk read alike: gloo's, NCCL's and
torch's messages of a lost connection, and those of `train/`."""

NO_ECHOES = "nccl(invalidusage|invalidargument|unhandledcudaerror)"
"""NCCL's messages about a mistake or a defect on this side, such as two ranks on one GPU."""

_ECHO = re.compile("|".join(ECHOES))
_NO_ECHO = re.compile(NO_ECHOES)


def is_echo(message: str) -> bool:
    """Whether a message only reports the loss of another rank.

    >>> is_echo("RuntimeError: Connection closed by peer"), is_echo("ValueError: sample 7")
    (True, False)
    """
    text = message.lower()
    return bool(_ECHO.search(text)) and not _NO_ECHO.search(text)
