"""A rank that ends right after its last collective is not aborted at the shutdown of Python."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

HOOK = ROOT / "toolkit/supervisor/watchdog"

ENDS = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
group = dist.group.WORLD  # as a DDP that is alive at the end
tensor = torch.ones(3_000_000)
works = [dist.all_reduce(tensor, async_op=True) for _ in range(60)]
del works
dist.destroy_process_group()
"""


@pytest.fixture
def hook() -> Any:
    """The module that Python loads in each rank, under another name."""
    spec = importlib.util.spec_from_file_location("rank_hook", HOOK / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_rank_with_collectives_at_its_end_succeeds(tmp_path: Path) -> None:
    """Without the wait, torch 2.13 aborts 8 of 10 of these."""
    rank = {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": str(HOOK)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS, str(tmp_path / str(number))],
            env={**os.environ, **rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for one in started:
        _, errors = one.communicate()
        assert one.returncode == 0, errors


def test_a_rank_without_gloo_does_not_wait(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook.time, "sleep", pytest.fail)
    monkeypatch.setattr(hook, "states_of_threads", lambda name: [])
    hook.let_gloo_finish()


def test_the_wait_for_threads_that_never_rest_ends(
    hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(hook.time, "monotonic", lambda: next(clock) / 10)
    monkeypatch.setattr(hook.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(hook, "states_of_threads", lambda name: ["S", "R"])
    hook.let_gloo_finish()
    assert 20 <= next(clock) <= 22


def test_threads_are_found_by_their_names(hook: Any) -> None:
    own = Path("/proc/self/comm").read_text().strip()
    states = hook.states_of_threads(own)
    assert states and set(states) <= set("RSD")
    assert hook.states_of_threads("no such name") == []
