"""What torchrun prints that people should not see.

Asked to stop, torchrun stops its workers and then ends with a traceback of its own
`SignalException`, which looks like a failure and is none.
"""

import re
from collections.abc import Iterator

__all__ = ["without_stop_traces"]

_TRACE = re.compile(
    r"\s|$|Traceback \(most recent call last\):|During handling of the above exception"
    r"|torch\.distributed\.elastic\.\S*SignalException|--- Logging error ---|Call stack:"
    r"|Message: |Arguments: |RuntimeError: reentrant call"
)
"""Lines of tracebacks; those of several nodes may be mixed."""

_LOG = re.compile(r"\[|[IWE]\d{4} |srun: |slurmstepd")
"""Lines that come in between."""


def without_stop_traces(lines: Iterator[str]) -> Iterator[str]:
    """Yield `lines` without torchrun's tracebacks of being stopped; all others stay."""
    held: list[str] = []
    for line in lines:
        starts = line.startswith(("Traceback (most recent call last):", "--- Logging error ---"))
        if starts or (held and _TRACE.match(line)):
            held.append(line)
            continue
        if held and _LOG.match(line):
            yield line
            continue
        yield from _kept(held)
        held = []
        yield line
    yield from _kept(held)


def _kept(held: list[str]) -> list[str]:
    return [] if any("SignalException" in line for line in held) else held
