"""Defaults and names of torch that the pages on data and checkpoints state are those installed."""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import flex_attention, varlen
from torch.utils.data import DataLoader, DistributedSampler

from tests.learn.support.page import pages


def _default(call: Callable[..., object], name: str) -> object:
    return inspect.signature(call).parameters[name].default


def _prefetched() -> int | None:
    # A worker prefetches two batches unless told otherwise; without workers it is None.
    return DataLoader(range(1), num_workers=1).prefetch_factor  # type: ignore[arg-type]


def _load_refuses_objects() -> bool:
    file = io.BytesIO()
    torch.save({"object": pages}, file)
    file.seek(0)
    try:
        torch.load(file)
    except pickle.UnpicklingError:
        return True
    return False


FACTS: list[tuple[Callable[[], object], object, str, str]] = [
    (
        lambda: [_default(DistributedSampler, name) for name in ("shuffle", "seed", "drop_last")],
        [True, 0, False],
        "data",
        "`drop_last=False`, the default",
    ),
    (_prefetched, 2, "data-workers", "`prefetch_factor` (2)"),
    (
        lambda: "cu_seq_q" in inspect.signature(varlen.varlen_attn).parameters,
        True,
        "packing",
        "`torch.nn.attention.varlen.varlen_attn`",
    ),
    (
        lambda: callable(flex_attention.create_block_mask),
        True,
        "packing",
        "skips the blocks that `create_block_mask` finds empty",
    ),
    (
        _load_refuses_objects,
        True,
        "loading-checkpoints",
        "`weights_only=True`, the default since torch 2.6",
    ),
]


@pytest.mark.parametrize(("read", "value", "page", "words"), FACTS, ids=[f[3] for f in FACTS])
def test_a_default_that_a_page_states_is_that_of_the_installed_torch(
    read: Callable[[], object], value: object, page: str, words: str
) -> None:
    assert read() == value
    assert words in " ".join(pages()[page].text.split())
