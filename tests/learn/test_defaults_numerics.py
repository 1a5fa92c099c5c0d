"""Defaults that the pages on number formats, instabilities and memory state are those of torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import _dispatch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.optimizer import _foreach_doc
from torch.utils.checkpoint import checkpoint

from tests.conftest import ROOT


def _words(text: str) -> str:
    return " ".join(text.split())


def _default(function: Callable[..., object], name: str) -> object:
    return inspect.signature(function).parameters[name].default


def _tf32() -> tuple[bool, bool, str]:
    cuda, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return cuda, cudnn, torch.get_float32_matmul_precision()


def _scaler() -> list[object]:
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    return [_default(torch.amp.GradScaler.__init__, name) for name in names]


def _asks_the_mesh() -> bool:
    """Whether an overflow in one shard of a DTensor is that of all ranks of its mesh."""
    source = inspect.getsource(_dispatch.found_inf_reduce_handler)
    return 'Partial("max")' in source and "full_tensor()" in source


def _cast_by_policy() -> tuple[bool, object, object]:
    policy = MixedPrecisionPolicy()
    return policy.cast_forward_inputs, policy.reduce_dtype, policy.output_dtype


def _recomputed() -> tuple[object, object]:
    """Whether recomputation stops early, and that the variant must be named."""
    return _default(checkpoint, "early_stop"), _default(checkpoint, "use_reentrant")


def _state_before_and_after_the_first_step() -> list[int]:
    parameter = nn.Parameter(torch.ones(256))
    optimizer, found = AdamW([parameter]), []
    for _ in range(2):
        state = optimizer.state.get(parameter, {})
        found.append(sum(v.nbytes for v in state.values() if v.dim()) // parameter.numel())
        parameter.grad = torch.ones(256)
        optimizer.step()
    return found


FACTS: list[tuple[Callable[[], object], object, dict[str, str]]] = [
    (
        _tf32,
        (False, True, "highest"),
        {
            "learn/numerics": "default allows it in cuDNN convolutions and RNNs only. For matrix "
            "products, "
            'call `torch.set_float32_matmul_precision("high")`; the default `"highest"` keeps fp32'
        },
    ),
    (
        _scaler,
        [65536.0, 2.0, 0.5, 2000],
        {"learn/numerics": "the scale starts at 65,536, and doubles after 2,000 steps without an"},
    ),
    (
        _asks_the_mesh,
        True,
        {"learn/numerics": "`GradScaler` asks all ranks along the sharded dimensions"},
    ),
    (
        _cast_by_policy,
        (True, None, None),
        {"learn/numerics": "`cast_forward_inputs` (on by default) also rounds floating-point"},
    ),
    (
        lambda: _default(AdamW.__init__, "betas"),
        (0.9, 0.999),
        {"learn/numerics": "second moment of Adam never decays with `beta2` of 0.999"},
    ),
    (
        lambda: _default(nn.utils.clip_grad_norm_, "error_if_nonfinite"),
        False,
        {"learn/instabilities": "Its `error_if_nonfinite` is off by default"},
    ),
    (
        _recomputed,
        (True, None),
        {"learn/memory": "since torch stops when everything needed exists"},
    ),
    (
        lambda: "~ sizeof(params) more peak memory" in _words(_foreach_doc),
        True,
        {"learn/memory": "AdamW's default (`foreach`) takes about the size of the parameters for"},
    ),
    (
        _state_before_and_after_the_first_step,
        [0, 8],
        {"learn/memory": "AdamW allocates its state in the first `optimizer.step()`"},
    ),
    (
        lambda: _default(DistributedDataParallel.__init__, "gradient_as_bucket_view"),
        False,
        {"learn/memory": "as large as the gradients, unless `gradient_as_bucket_view=True`"},
    ),
    (
        lambda: (
            "optimizer step runs on CPU with CPU optimizer states"
            in _words(CPUOffloadPolicy.__doc__ or "").replace("the optimizer", "optimizer")
        ),
        True,
        {"learn/memory": "optimizer state in host memory and steps on the CPU"},
    ),
    (
        lambda: "reshard_after_forward" in inspect.signature(fully_shard).parameters,
        True,
        {"learn/memory": "`reshard_after_forward=False` keeps the parameters gathered until"},
    ),
]
PAGES = [(page, words) for _, _, pages in FACTS for page, words in pages.items()]


@pytest.mark.parametrize(
    ("read", "value"), [(read, value) for read, value, _ in FACTS], ids=[str(f[2]) for f in FACTS]
)
def test_a_default_is_that_of_the_installed_torch(
    read: Callable[[], object], value: object
) -> None:
    assert read() == value


@pytest.mark.parametrize(("page", "words"), PAGES)
def test_a_page_states_a_default(page: str, words: str) -> None:
    assert words in _words((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))


def test_clipping_by_a_norm_that_is_nan_makes_every_gradient_nan() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for parameter, gradient in zip(parameters, (1.0, torch.nan), strict=True):
        parameter.grad = torch.full((2,), gradient)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    assert all(p.grad is not None and p.grad.isnan().all() for p in parameters)
