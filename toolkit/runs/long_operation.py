"""The progress of a long operation, which the command line shows.

Nothing is shown in scripts and notebooks, which have other views.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol


class Report(Protocol):
    """Reports the progress of an operation."""

    def __call__(self, done: float, total: float | None, text: str) -> object:
        """Report that `done` of `total` is done (None: unknown), with a text for the user."""


View = Callable[[str], contextlib.AbstractContextManager[Report]]
"""Shows a running operation, given its description."""


def _unseen(what: str) -> contextlib.AbstractContextManager[Report]:
    return contextlib.nullcontext(lambda done, total, text: None)


_view: ContextVar[View] = ContextVar("view", default=_unseen)


@contextlib.contextmanager
def shown_by(view: View) -> Iterator[None]:
    """Show the operations of this block in a view, except those of other threads."""
    token = _view.set(view)
    try:
        yield
    finally:
        _view.reset(token)


def operation(what: str, *, long: bool = True) -> contextlib.AbstractContextManager[Report]:
    """Announce an operation for the block, such as `copying the project to login1`.

    Args:
        what: The description of the operation.
        long: Whether the operation may take seconds; a shorter one is not shown.
    """
    return (_view.get() if long else _unseen)(what)
