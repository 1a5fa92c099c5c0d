"""A dry run counts for CUDA: torch's own rules of autocast, and what a GPU has allocated."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from tests.train.dryrun.test_counts import LARGE
from tests.train.support.ladder import trainer_of
from train.cli.config import Config
from train.dryrun import autocast, examine
from train.dryrun.autocast import as_on_cuda
from train.dryrun.counters import ACTIVATIONS
from train.parallel.layout import Layout
from train.runtime.process_group import Alone
from train.runtime.rank import RankInfo

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def test_the_rules_are_those_of_torch() -> None:
    text = HEADER.read_text()
    rules = {
        "FP32": autocast.FLOAT32,
        "FP32_SET_OPT_DTYPE": autocast.FLOAT32_OUT,
        "PROMOTE": autocast.WIDEST,
    }
    for name, ours in rules.items():
        (body,) = re.findall(rf"#define AT_FORALL_{name}\(_\)(.*?)\n\n", text, re.DOTALL)
        theirs = [".".join(one.split(", ")) for one in re.findall(r"_\((\w+(?:, \w+)?)\)", body)]
        assert sorted(ours) == sorted(theirs), name
    assert re.findall(r'"(norm\.\w+)"', text) == list(autocast.FLOAT32_NORMS)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_norms_softmax_and_losses_keep_full_precision(low: torch.dtype) -> None:
    with FakeTensorMode(), as_on_cuda(), torch.autocast("cpu", low):
        hidden = nn.Linear(8, 8)(torch.zeros(4, 8, requires_grad=True))
        numbers = torch.zeros(4, dtype=torch.int64)
        dtypes = {
            "linear": hidden.dtype,
            "gelu": functional.gelu(hidden).dtype,
            "batch norm": nn.BatchNorm1d(8)(hidden).dtype,
            "layer norm": nn.LayerNorm(8)(hidden).dtype,
            "softmax": hidden.softmax(-1).dtype,
            "cross entropy": functional.cross_entropy(hidden, numbers).dtype,
            "norm": hidden.norm().dtype,
            "sum": hidden.sum().dtype,
            "exp": hidden.exp().dtype,
            "product": torch.mv(hidden, hidden[0].float()).dtype,
            "promoted": torch.zeros(8).scatter_add(0, numbers, hidden[:, 0]).dtype,
        }
    assert {name for name, dtype in dtypes.items() if dtype == low} == {
        *("linear", "gelu", "batch norm", "product")
    }
    assert set(dtypes.values()) == {low, torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        # The CPU's own rule again.
        assert torch.zeros(2, 2).mm(torch.zeros(2, 2)).softmax(-1).dtype == torch.bfloat16


def test_dropout_remembers_a_byte_per_number() -> None:
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with FakeTensorMode(), as_on_cuda():
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            functional.dropout(torch.zeros(64, requires_grad=True), 0.5)
        assert [tensor.nbytes for tensor in saved] == [64]
        values = torch.ones(4)
        assert functional.dropout(values, 0.5, training=False) is values


def test_half_precision_frees_less_than_half_of_the_activations() -> None:
    plan: dict[str, Any] = {"task": LARGE, "dp_shard": 8, "global_batch": 8}
    whole = examine(Config(**plan)).ranks[0].memory[ACTIVATIONS]
    mixed = examine(Config(**plan, precision="bf16")).ranks[0].memory[ACTIVATIONS]
    # Of each block, what norms are given stays fp32: 36 of 64 bytes per number and token. With the
    # CPU's rules it would be half; with copies of gathered weights, more than before.
    assert 0.55 * whole < mixed < 0.62 * whole


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_allocates_what_the_rehearsal_counts(precision: Any) -> None:
    config = Config(task=LARGE, strategy="single", global_batch=1, precision=precision)
    (rehearsed,) = examine(config).ranks
    needed, rank_info = sum(rehearsed.memory.values()), RankInfo()
    if torch.cuda.get_device_properties(0).total_memory < 1.2 * needed:
        pytest.skip(f"the GPU has less memory than {1.2 * needed:.2e} bytes")
    group = Alone(rank_info=rank_info, device=torch.device("cuda", 0))
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(config, Layout(), group, Path(folder))
        scale = float("inf")
        while trainer.scaler.scale < scale:  # after an overflow, no step was made
            scale = trainer.scaler.scale
            trainer.train_step()
        torch.cuda.reset_peak_memory_stats()
        trainer.train_step()
        # The requested bytes, before they are rounded up.
        real = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    # Kernels take some for themselves.
    assert real == pytest.approx(needed, rel=0.05)
