"""The order of tests that several processes share loses none and mixes those that wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.order import mixed


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 9))
def test_each_test_is_there_once(waiting: int, computing: int, processes: int) -> None:
    first = [f"w{number}" for number in range(waiting)]
    rest = [f"c{number}" for number in range(computing)]
    order = mixed(first, rest, processes)
    assert sorted(order) == sorted([*first, *rest])
    assert [one for one in order if one in set(rest)] == rest, "as they were among each other"


def test_every_other_process_begins_with_tests_that_wait() -> None:
    order = mixed(["w"] * 400, ["c"] * 7600, 4)
    parts = [order[begin : begin + 2000] for begin in range(0, 8000, 2000)]
    assert [part.count("w") for part in parts] == [200, 0, 200, 0]
    assert parts[0][:200] == parts[2][:200] == ["w"] * 200
