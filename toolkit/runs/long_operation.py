"""What a long operation tells of itself while it goes on; the command line shows it.

Nothing is shown in scripts and notebooks, which have views of their own.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol


class Report(Protocol):
    """Tells how far an operation is."""

    def __call__(self, done: float, total: float | None, text: str) -> object:
        """Tell that `done` of `total` is done (None: unknown), with a text for people."""


View = Callable[[str], contextlib.AbstractContextManager[Report]]
"""Shows an operation, given by what it does, while it goes on."""


def _unseen(what: str) -> contextlib.AbstractContextManager[Report]:
    return contextlib.nullcontext(lambda done, total, text: None)


_view: ContextVar[View] = ContextVar("view", default=_unseen)


@contextlib.contextmanager
def shown_by(view: View) -> Iterator[None]:
    """Have a view show the operations of this block, except those of other threads."""
    token = _view.set(view)
    try:
        yield
    finally:
        _view.reset(token)


def operation(what: str, *, long: bool = True) -> contextlib.AbstractContextManager[Report]:
    """Announce an operation for the block, such as `copying the project to login1`.

    Args:
        what: What it does.
        long: Whether it may take seconds, so that it is worth showing.
    """
    return (_view.get() if long else _unseen)(what)
