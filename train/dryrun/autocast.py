"""CUDA's mixed precision and dropout, for tensors that have no contents and are on the CPU.

A rehearsal is for GPUs, but its tensors are on the device that every machine has, and autocast
treats the CPU otherwise: norms and softmax run in the low precision there, and in float32 on CUDA.
Here the CPU's rules are replaced by CUDA's, operation by operation, where torch looks them up: in
its dispatcher. The rules are those of torch 2.13, `aten/src/ATen/autocast_mode.h`, which come with
torch as `torch/include/ATen/autocast_mode.h`; a test compares.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._ops import OpOverload
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
_KEY = "AutocastCPU"
_NO_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU)


def _names(text: str) -> list[str]:
    return text.split()


# AT_FORALL_FP32: with all tensors in float32.
FLOAT32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
""")
# AT_FORALL_FP32_SET_OPT_DTYPE: to float32, unless another type is requested.
FLOAT32_OUT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: alike, by an overload that takes the type.
FLOAT32_NORMS = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
# AT_FORALL_PROMOTE: in the widest type among the tensors.
WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
# AT_FORALL_LOWER_PRECISION_FP: in the low precision. The rest of them is the CPU's rule as well, or
# consists of operations of which it is.
LOW = ["addmv", "addr", "mv"]
# The CPU's rule for these is the low precision: CUDA has it for what they consist of.
_LOW_ANYWAY = ("conv", "_addmm_activation", "_native_multi_head_attention", "mkldnn_rnn_layer")
_FROM_HALF = {aten.softmax.int: aten._softmax, aten.log_softmax.int: aten._log_softmax}
_Kernel = Callable[..., Any]


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Have operations on the CPU follow CUDA's rules of autocast, and CUDA's form of dropout."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="(?s).*Overriding a previously registered kernel"
            )
            for name, kernel in _kernels().items():
                library.impl(name, kernel, _KEY, allow_override=True)  # type: ignore[no-untyped-call]
            # Also outside of autocast.
            library.impl("dropout", _dropout, "AutogradCPU", allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


@functools.cache
def _kernels() -> dict[str, _Kernel]:
    """Yield each operation that CUDA's or the CPU's rules name, with CUDA's rule."""
    kernels: dict[str, _Kernel] = {
        name: fallthrough_kernel
        for name in _ruled("AutocastCPU") - _ruled("AutocastCUDA")
        if not name.startswith(_LOW_ANYWAY)
    }
    for name in FLOAT32:
        kernels[name] = functools.partial(_in_float32, _operation(name))
    for name in FLOAT32_OUT:
        kernels[name] = functools.partial(_to_float32, _operation(name))
    for name, typed in FLOAT32_NORMS.items():
        kernels[name] = functools.partial(_norm, _operation(typed), _operation(name))
    for name in WIDEST:
        kernels[name] = functools.partial(_in_the_widest, _operation(name))
    for name in LOW:
        kernels[name] = functools.partial(_in_low_precision, _operation(name))
    return kernels


def _ruled(key: str) -> set[str]:
    """Name the operations for which there is a rule."""
    return {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }


def _operation(name: str) -> OpOverload:
    operation, _, overload = name.partition(".")
    overload_of: OpOverload = getattr(getattr(aten, operation), overload or "default")
    return overload_of


def _in_float32(operation: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with _ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        return operation(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))


def _to_float32(operation: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with _ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        names = [argument.name for argument in operation._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if _eligible(args[0]) and given.get("dtype") is None:
            if args[0].dtype == torch.float16 and operation in _FROM_HALF:
                # One kernel reads halves and writes float32: no copy of the input in between.
                return _FROM_HALF[operation](given["self"], given["dim"], True)
            given["dtype"] = torch.float32
        return operation(**given)


def _norm(typed: OpOverload, plain: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with _ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        names = [argument.name for argument in plain._schema.arguments]
        defaults = {
            a.name: a.default_value for a in plain._schema.arguments if a.has_default_value()
        }
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
        return typed(*(given[name] for name in names), dtype=dtype)


def _in_the_widest(operation: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with _ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _eligible(leaf)]
        widest = torch.get_autocast_dtype("cpu")
        if any(tensor.dtype == torch.float32 for tensor in tensors):
            widest = torch.float32
        return operation(*_cast(args, widest), **_cast(kwargs, widest))


def _in_low_precision(operation: OpOverload, *args: Any, **kwargs: Any) -> Any:
    low = torch.get_autocast_dtype("cpu")
    with _ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        return operation(*_cast(args, low), **_cast(kwargs, low))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if _eligible(t) else t, values)


def _eligible(value: object) -> bool:
    """Say whether autocast touches it: a tensor of floating-point numbers, but of no doubles."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _dropout(inputs: Tensor, p: float, train: bool) -> Tensor:
    """Remember one byte per number; the CPU would remember what it multiplies by.

    `is_fused_kernel_acceptable()` in `aten/src/ATen/native/Dropout.cpp`.
    """
    if not train or not 0 < p < 1 or inputs.numel() == 0:
        if not train or p == 0:
            return inputs
        return inputs * torch.zeros_like(inputs)
    dropped: Tensor = aten.native_dropout(inputs, p, train)[0]
    return dropped
