"""In which order tests run where several processes share them (`-n`).

xdist gives each process an equal part of the list, and lets those that are done take from the ends
of the others' parts. Tests of whole systems wait most of the time, for daemons and time limits; all
others compute. Were the waiting ones the last, as their names would have it, processors would idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def mixed(
    waiting: Sequence[Item],
    computing: Sequence[Item],
    processes: int,
    module: Callable[[Item], object] | None = None,
) -> list[Item]:
    """Have every other process begin with its part of the waiting tests.

    The tests of a module stay together: each process would make the module's fixtures.

    >>> mixed("WXYZ", "abcdefgh", 4)
    ['W', 'X', 'a', 'b', 'c', 'd', 'Y', 'Z', 'e', 'f', 'g', 'h']
    >>> mixed("WXXZ", "abcdefgh", 4, str.lower)
    ['W', 'X', 'X', 'a', 'b', 'c', 'Z', 'd', 'e', 'f', 'g', 'h']
    """
    count, first = len(waiting) + len(computing), (processes + 1) // 2
    rest, order = list(computing), list[Item]()
    begin = 0
    for process in range(processes):
        size = count * (process + 1) // processes - len(order)
        if process % 2 == 0:
            end = max(begin, len(waiting) * (process // 2 + 1) // first)
            while (
                module
                and 0 < end < len(waiting)
                and module(waiting[end - 1]) == module(waiting[end])
            ):
                end += 1
            order += waiting[begin:end]
            size -= end - begin
            begin = end
        order += rest[: max(size, 0)]
        del rest[: max(size, 0)]
    return order + rest
