"""Defaults of torch that the pages about several devices state are those of the installed torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.pipelining import Schedule1F1B, schedules, stage
from torch.distributed.tensor import Replicate, Shard, _random
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from tests.conftest import ROOT


def _words(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(function: Callable[..., object], name: str) -> object:
    return inspect.signature(function).parameters[name].default


def _source(thing: object) -> str:
    return _words(inspect.getsource(thing))  # type: ignore[arg-type]


def _reshards() -> object:
    said = "If ``None``, it is set to ``True`` for non-root modules and ``False`` for root modules"
    return _default(fully_shard, "reshard_after_forward"), said in _words(fully_shard.__doc__)


def _layouts() -> object:
    return [
        (style.input_layouts, style.output_layouts, style.use_local_output)
        for style in (ColwiseParallel(), RowwiseParallel())
    ]


def _stage_switches_the_exchange_off() -> bool:
    source = _source(stage._PipelineStageBase.backward_maybe_with_nosync)
    return "self.submod.set_requires_gradient_sync(False)" in source


FACTS: list[tuple[Callable[[], object], object, dict[str, str]]] = [
    (
        _reshards,
        (None, True),
        {
            "fsdp": "`True`, `False` or a number of ranks | `True`; `False` for the root |",
            "fsdp-options": "A number n, such as the GPUs of a node",
        },
    ),
    (
        lambda: (
            "self.reduce_grads: bool = True" in _source(FSDPParamGroup.__init__),
            hasattr(FSDPModule, "set_requires_gradient_sync"),
        ),
        (True, True),
        {"fsdp": "`model.set_requires_gradient_sync(False)` | `True` |"},
    ),
    (
        lambda: FSDPState()._states_to_forward_prefetch,
        [],
        {"fsdp": "`block.set_modules_to_forward_prefetch([next_block])` | no explicit prefetch |"},
    ),
    (
        lambda: type(_default(fully_shard, "offload_policy")) is OffloadPolicy,
        True,
        {"fsdp": "`offload_policy=CPUOffloadPolicy()` | on the GPU |"},
    ),
    (
        lambda: "the optimizer step runs on CPU" in _words(_fsdp_api.CPUOffloadPolicy.__doc__),
        True,
        {"fsdp-options": "the optimizer step then runs on the CPU"},
    ),
    (
        lambda: 'reason="skipping FSDP hooks"' in _source(_fsdp_common),
        True,
        {"fsdp": "FSDP2's hooks run outside compiled code"},
    ),
    (
        lambda: (
            _fsdp_common.ShardPlacementResult.__name__ in _words(fully_shard.__doc__),
            hasattr(FSDPModule, "set_gradient_divide_factor"),
        ),
        (True, True),
        {"experts": "(torch 2.13; `ShardPlacementResult`)"},
    ),
    (
        lambda: hasattr(_random, "OffsetBasedRNGTracker"),
        True,
        {"fsdp-options": "(`OffsetBasedRNGTracker` of torch 2.13; not run on a GPU here)"},
    ),
    (
        _layouts,
        [((Replicate(),), (Shard(-1),), True), ((Shard(-1),), (Replicate(),), True)],
        {"tensor-parallel": "| first matrix of a pair: queries, keys, values; up | `Colwise"},
    ),
    (
        lambda: _default(SequenceParallel, "sequence_dim"),
        1,
        {"tensor-parallel": "# positions are dimension 1"},
    ),
    (
        lambda: _default(Schedule1F1B, "scale_grads"),
        True,
        {"pipelines": "If the loss is a sum, pass `scale_grads=False`."},
    ),
    (
        _stage_switches_the_exchange_off,
        True,
        {"pipeline-stages": "the stage switches FSDP's exchange off until then"},
    ),
    (
        lambda: all(
            hasattr(schedules, f"Schedule{name}")
            for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
        ),
        True,
        {"pipelines": "| InterleavedZeroBubble, ZBVZeroBubble, DualPipeV | 2 (the first: v) |"},
    ),
    (
        lambda: "dkv_rotater" in _source(_attention._templated_ring_attention_backward),
        True,
        {"context-parallel": "(`_templated_ring_attention_backward`)"},
    ),
]
PAGES = [(page, words) for _, _, pages in FACTS for page, words in pages.items()]


@pytest.mark.parametrize(
    ("read", "value"), [(read, value) for read, value, _ in FACTS], ids=[str(f[2]) for f in FACTS]
)
def test_a_default_is_that_of_the_installed_torch(
    read: Callable[[], object], value: object
) -> None:
    assert read() == value, torch.__version__


@pytest.mark.parametrize(("page", "words"), PAGES)
def test_a_page_states_a_default(page: str, words: str) -> None:
    assert words in _words((ROOT / f"docs/learn/{page}.md").read_text(encoding="utf-8"))
