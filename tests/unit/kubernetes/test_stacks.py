"""The stacks of the ranks in pods."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from toolkit.kubernetes import stacks
from toolkit.kubernetes.client.connection import refusal


def test_a_pod_without_a_node_does_not_hide_the_stacks_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pods:
        def pods(self, _: str) -> list[dict[str, Any]]:
            phases = enumerate(("Running", "Pending"))
            return [{"metadata": {"name": f"r-{n}"}, "status": {"phase": p}} for n, p in phases]

    def execute(_: Any, pod: str, *__: Any, show: Callable[[bytes], object]) -> None:
        if pod == "r-1":
            raise refusal(400, b'{"message": "pod r-1 does not have a host assigned"}', {})
        show(b"{}\n")

    monkeypatch.setattr(stacks, "execute", execute)
    exchange = stacks.PodsExchange(cast(Any, Pods()), "", "")
    exchange.ask("x")
    assert exchange.answers("x") == [b"{}"]
