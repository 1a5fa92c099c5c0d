"""What long operations report of themselves."""

import contextlib
from collections.abc import Iterator

from toolkit.runs.long_operation import Report, shown_by

Told = list[tuple[str, float, float | None, str]]


@contextlib.contextmanager
def told_operation() -> Iterator[Told]:
    """Give a list of what the operations of the block report: what, done, total, text."""
    told: Told = []

    @contextlib.contextmanager
    def view(what: str) -> Iterator[Report]:
        told.append((what, 0, None, ""))
        yield lambda done, total, text: told.append((what, done, total, text))

    with shown_by(view):
        yield told
