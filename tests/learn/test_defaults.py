"""Defaults of torch that pages state are those of the installed torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._inductor import config as inductor
from torch.distributed import distributed_c10d, launch, run
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.nn import functional
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.parallel import distributed as ddp

from tests.conftest import ROOT
from tests.learn.support.runner import ranks_of


def _words(text: str) -> str:
    return " ".join(text.split())


def _timeouts() -> dict[str, object]:
    """Minutes by backend; NCCL's own are compiled in, and a torch for CPUs has not compiled it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
        texts = ("nccl", "gloo", "cpu:gloo,cuda:nccl", "undefined")
        found: dict[str, object] = {
            text: distributed_c10d._get_default_timeout(dist.Backend(text)) / timedelta(minutes=1)
            for text in texts
        }
    said = "Default value is 10 minutes for NCCL and 30 minutes for other backends"
    return found | {"said": said in _words(dist.init_process_group.__doc__ or "")}


def _buckets() -> list[float]:
    """MiB of the first and the second bucket of DDP, by default and with a value of one's own."""
    configs = [ddp._BucketCapacityConfig.create(mb, None, False) for mb in (None, 7)]
    return [
        size / 2**20 for c in configs for size in (c.first_bucket_bytes_cap, c.bucket_bytes_cap)
    ]


def _deprecated() -> list[str]:
    source = inspect.getsource(functional)
    return [
        name
        for name in ("all_reduce", "reduce_scatter")
        if f"_functional_collectives.{name}" in source
    ]


def _agent() -> dict[str, object]:
    """Defaults of a torchrun's agent, in seconds."""
    found = inspect.signature(SimpleElasticAgent).parameters
    return {name: parameter.default for name, parameter in found.items()}


def _connects_at_once() -> bool:
    said = "only under NCCL: the communicator is immediately formed"
    return said in _words(dist.init_process_group.__doc__ or "")


def _endpoint() -> object:
    """The rendezvous that torchrun makes on one node without flags."""
    source = inspect.getsource(run.run)
    return 'args.rdzv_endpoint = "localhost:0"' in source and "args.master_port = 29500" in source


FACTS: list[tuple[Callable[[], object], object, dict[str, str]]] = [
    (
        _timeouts,
        {"nccl": 10, "gloo": 30, "cpu:gloo,cuda:nccl": 30, "undefined": 30, "said": True},
        {
            "learn/first-script": 'by default 10 minutes with `"nccl"`, and 30 with every other',
            "learn/traps": 'by default 10 minutes with the backend `"nccl"`, and 30 minutes with',
            "learn/mismatched-collectives": '10 minutes with the backend `"nccl"`, 30 with every',
            "learn/data": "until the timeout, 10 or 30 minutes by default",
            "reference/rules": "by default 10 minutes with the backend `nccl` (also if",
            "how-to/errors/collectives": 'the backend `"nccl"`, or without one but',
        },
    ),
    (
        _buckets,
        [1, 25, 7, 7],
        {
            "learn/accumulation": "by default a first one of 1 MiB, then 25 MiB each",
            "learn/scaling": "The default is 25 MiB after a first bucket of 1 MiB",
        },
    ),
    (
        lambda: (MixedPrecisionPolicy().param_dtype, MixedPrecisionPolicy().reduce_dtype),
        (None, None),
        {"learn/fsdp": "It also gathers and reduces in that type, unless `mp_policy`"},
    ),
    (
        lambda: (
            "``None`` but ``param_dtype`` is not ``None``, then the reduction uses the compute"
            in _words(MixedPrecisionPolicy.__doc__ or "")
        ),
        True,
        {"learn/fsdp": "*and* reduces gradients in bf16"},
    ),
    (
        lambda: (
            _attention._cp_options.rotate_method.name,
            _attention._cp_options.enable_load_balance,
        ),
        ("ALL_GATHER", True),
        {"learn/context-parallel": "it gathers by default, and rotates parts after"},
    ),
    (
        lambda: inductor._micro_pipeline_tp,
        False,
        {"learn/tensor-parallel": "`torch._inductor.config`, off by default"},
    ),
    (
        _deprecated,
        ["all_reduce", "reduce_scatter"],
        {"learn/collectives": "torch 2.13 deprecates them and names `torch.distributed._"},
    ),
    (
        lambda: (distributed_c10d._is_barrier_after_init(), _connects_at_once()),
        (0, True),
        {
            "learn/first-script": "NCCL under torchrun connects at the first collective",
            "learn/traps-gpus": 'torch.device("cuda", local_rank))` also has NCCL connect',
        },
    ),
    (
        _endpoint,
        True,
        {"how-to/errors/rendezvous": "`--rdzv-endpoint` and `--master-port`, torchrun takes"},
    ),
    (
        lambda: c10d_rendezvous_backend.DEFAULT_PORT,
        29400,
        {"how-to/errors/rendezvous": "29400 for `c10d` without a port"},
    ),
    (
        lambda: (
            run.get_args_parser().get_default("monitor_interval"),
            _agent()["shutdown_timeout"],
        ),
        (0.1, 30),
        {"learn/torchrun": "ten times a second. 4. When a rank fails, its agent ends the"},
    ),
    (
        lambda: _agent()["exit_barrier_timeout"],
        300,
        {"learn/torchrun": "waits up to 5 minutes for the agents of the other nodes"},
    ),
    (
        lambda: dynamic_rendezvous.RendezvousTimeout().join,
        timedelta(minutes=10),
        {"how-to/errors/rendezvous": "nodes wait for each other for ten minutes"},
    ),
    (
        lambda: "is deprecated" in getattr(launch.main, "__deprecated__", ""),
        True,
        {"learn/torchrun": "is the deprecated predecessor of torchrun"},
    ),
]
PAGES = [(page, words) for _, _, pages in FACTS for page, words in pages.items()]


@pytest.mark.parametrize(
    ("read", "value"), [(read, value) for read, value, _ in FACTS], ids=[str(f[2]) for f in FACTS]
)
def test_a_default_is_that_of_the_installed_torch(
    read: Callable[[], object], value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_DIST_INIT_BARRIER", raising=False)
    assert read() == value


@pytest.mark.parametrize(("page", "words"), PAGES)
def test_a_page_states_a_default(page: str, words: str) -> None:
    assert words in _words((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))


BUFFERS = """
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
for form in ("train", "no_grad", "no_grad", "train", "train", "no_sync", "no_sync", "train"):
    with torch.set_grad_enabled(form != "no_grad"):
        with model.no_sync() if form == "no_sync" else nullcontext():
            broadcasts = model.will_sync_module_buffers()
            loss = model(torch.randn(4, 2)).sum()
    if form != "no_grad":
        loss.backward()
    print(form, int(broadcasts))
del model
dist.destroy_process_group()
"""


def test_ddp_broadcasts_buffers_after_a_forward_pass_that_led_to_an_exchange(
    tmp_path: Path,
) -> None:
    (tmp_path / "buffers.py").write_text(BUFFERS)
    result = ranks_of(["--nproc-per-node", "1", "buffers.py"], tmp_path)
    wanted = "train 1 no_grad 1 no_grad 0 train 0 train 1 no_sync 1 no_sync 0 train 0"
    assert _words(result.stdout) == wanted, result
