"""Plans and rendered text depend on job and site alone, and cost no work per node."""

import builtins
import datetime
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.planned import EVERYWHERE, FULL, job, site
from toolkit.planning import plan
from toolkit.rendering import render

IMPURE = {
    "_datetime",
    "_io",
    "_random",
    "_socket",
    "datetime",
    "io",
    "os",
    "posix",
    "random",
    "time",
}


def impure_calls(work: Callable[[], object]) -> set[str]:
    """Return the uses of the clock, the environment, files, or chance by `work`."""
    found = set()

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            home = getattr(arg, "__module__", None) or type(arg.__self__).__module__
            if isinstance(arg.__self__, type):
                home = arg.__self__.__module__
            if home in IMPURE or arg in (builtins.open, builtins.compile):
                found.add(arg.__qualname__)
        elif event == "call" and frame.f_globals.get("__name__") in IMPURE:
            found.add(frame.f_code.co_qualname)

    gc.disable()  # hypothesis times every collection
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.mark.parametrize(
    "touch",
    [
        lambda: os.environ.get("HOME"),
        Path.cwd,
        lambda: Path("/").is_dir(),
        lambda: Path("/dev/null").open().close(),
        time.time,
        datetime.datetime.now,
        datetime.date.today,
        random.random,
        lambda: compile("1", "", "eval"),
    ],
)
def test_the_test_of_purity_sees_what_is_impure(touch: Callable[[], object]) -> None:
    assert impure_calls(touch) != set()


@EVERYWHERE
def test_a_plan_is_a_function_of_job_and_site_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = site(kind, **({"secret": "keys"} if kind == "kubernetes" else {}))
    made = plan(FULL, profile)
    text = render(made)  # reads its template, once
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.chdir("/")
    assert (plan(FULL, profile), render(plan(FULL, profile))) == (made, text)
    assert impure_calls(lambda: plan(FULL, profile)) == set()
    assert impure_calls(lambda: render(made)) == set()


# ---- Size


def operations(work: Callable[[], object]) -> int:
    """Count the calls of Python functions, which are the same on a busy machine."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what other tests have left would be counted, too
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_4096_nodes_are_planned_and_rendered_like_2(kind: str) -> None:
    few, many = (job(resources={"nnodes": nnodes}) for nnodes in (2, 4096))
    profile = site(kind)
    texts = [render(plan(spec, profile)) for spec in (few, many)]
    assert texts[0].replace(few.digest, many.digest) == (
        texts[1].replace("4096", "2")  # its port numbers and ids hold no 4096
    )
    counts = [operations(lambda spec=spec: render(plan(spec, profile))) for spec in (few, many)]  # type: ignore[misc]
    assert counts[0] == counts[1]


@EVERYWHERE
def test_a_thousand_renders_in_one_process_are_the_same_and_none_costs_more(kind: str) -> None:
    spec, profile = job(), site(kind)

    def work() -> str:
        return render(plan(spec, profile))

    first = work()  # reads its template, once
    second = operations(work)
    assert {work() for _ in range(1000)} == {first}
    assert operations(work) == second
