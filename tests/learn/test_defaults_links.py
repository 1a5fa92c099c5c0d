"""Defaults of torch that the pages on compilation and launching state are those installed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import config as dynamo
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.distributed import distributed_c10d, run
from torch.distributed.flight_recorder.components.config_manager import JobConfig

from tests.learn.support.page import pages

HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
"""The wheel for CPUs has NCCL's headers and not its code: some defaults stand in the code alone."""


def _header(name: str) -> str:
    return " ".join((HEADERS / name).read_text(encoding="utf-8").replace("// ", "").split())


def _flight_recorder() -> tuple[list[str], str]:
    """The names of the variable that sets its size, and the default."""
    found = re.search(
        r"max_entries_ = getCvarInt\( \{(.*?)\}, (\d+)\)", _header("FlightRecorder.hpp")
    )
    assert found
    return re.findall(r'"(\w+)"', found[1]), found[2]


def _nccl_names() -> set[str]:
    return set(re.findall(r'"(TORCH_NCCL_\w+)"', _header("ProcessGroupNCCL.hpp")))


def _barrier_default() -> bool:
    """Whether `monitored_barrier` ignores the timeout of its group."""
    source = inspect.getsource(dist.monitored_barrier)
    return "timeout = _get_default_timeout(get_backend(group))" in source


def _flag(name: str) -> object:
    return run.get_args_parser().get_default(name)


FACTS: list[tuple[Callable[[], object], object, str, str]] = [
    (
        _flight_recorder,
        (["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"], "2000"),
        "by-hand",
        "| `TORCH_FR_BUFFER_SIZE` (old name `TORCH_NCCL_TRACE_BUFFER_SIZE`) | 2000 |",
    ),
    (
        lambda: "the default value (3 - SkipCleanUp)" in _header("ProcessGroupNCCL.hpp"),
        True,
        "by-hand",
        "| `TORCH_NCCL_ASYNC_ERROR_HANDLING` | 3 |",
    ),
    (
        lambda: "std::chrono::milliseconds(10 * 60 * 1000)" in _header("ProcessGroupNCCL.hpp"),
        True,
        "by-hand",
        'Default: 10 minutes with `"nccl"`, 30 with every other',
    ),
    (
        lambda: (
            _nccl_names()
            >= {
                "TORCH_NCCL_DUMP_ON_TIMEOUT",
                "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
                "TORCH_NCCL_BLOCKING_WAIT",
                "TORCH_NCCL_ENABLE_MONITORING",
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
            }
        ),
        True,
        "by-hand",
        "`TORCH_NCCL_ENABLE_MONITORING`, `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`",
    ),
    (_barrier_default, True, "by-hand", "without it, it waits 30 minutes, whatever"),
    (
        lambda: distributed_c10d._get_default_timeout(dist.Backend("gloo")).total_seconds(),
        1800,
        "by-hand",
        "0:30:00",
    ),
    (
        lambda: _flag("signals_to_handle"),
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "by-hand",
        "dies of USR2",
    ),
    (lambda: _flag("numa_binding"), None, "by-hand", "`torchrun --numa-binding=node` binds"),
    (
        lambda: JobConfig().parse_args(["traces"]).trace_dir,
        "traces",
        "by-hand",
        "`torchfrtrace FOLDER`",
    ),
    (
        lambda: dynamo.optimize_ddp,
        True,
        "compile",
        "`torch._dynamo.config.optimize_ddp` is True by",
    ),
    (
        lambda: dynamo.recompile_limit,
        8,
        "compile",
        "more than 8 versions (`torch._dynamo.config.rec",
    ),
    (
        lambda: (
            DDPOptimizer(
                100 * 2**20, backend_compile_fn=lambda graph, _: graph.forward
            ).first_bucket_cap
        ),
        2**20,
        "compile",
        "DDPOptimizer closes the first bucket at 1 MiB",
    ),
]


@pytest.mark.parametrize(
    ("read", "value"), [fact[:2] for fact in FACTS], ids=[fact[3] for fact in FACTS]
)
def test_a_default_is_that_of_the_installed_torch(
    read: Callable[[], object], value: object
) -> None:
    assert read() == value


@pytest.mark.parametrize(("page", "words"), [fact[2:] for fact in FACTS])
def test_a_page_states_a_default(page: str, words: str) -> None:
    assert words in " ".join(pages()[page].text.split())
