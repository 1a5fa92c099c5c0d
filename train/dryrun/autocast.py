"""CUDA's mixed precision and dropout, for tensors that have no contents and are on the CPU.

A rehearsal is for GPUs, but its tensors are on the CPU, where autocast has other rules: norms and
softmax run in low precision on the CPU, but in float32 on CUDA. So CUDA's rules replace the CPU's
in torch's dispatcher, operation by operation. The rules are those of torch 2.13,
`aten/src/ATen/autocast_mode.h`, which comes with torch as `torch/include/ATen/autocast_mode.h`; a
test compares them.
"""

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


def _names(text: str) -> list[str]:
    return text.split()


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
"""AT_FORALL_FP32: all tensors become float32."""
FLOAT32_OUT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
"""AT_FORALL_FP32_SET_OPT_DTYPE: the result is float32, unless the call requests another type."""
FLOAT32_NORMS = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
"""AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: the same, by an overload that takes the type."""
WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
"""AT_FORALL_PROMOTE: all tensors get the widest type among them."""
LOW = ["addmv", "addr", "mv"]
"""AT_FORALL_LOWER_PRECISION_FP: all tensors get the low precision. For the rest of that list the
CPU has the same rule, or has it for the operations that they call."""
_COMPOSITE = ("conv", "_addmm_activation", "_native_multi_head_attention", "mkldnn_rnn_layer")
"""The CPU lowers the precision of these operations, CUDA that of the operations that they call."""

_Kernel = Callable[..., Any]


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Make CPU operations follow CUDA's autocast rules and CUDA's form of dropout."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="(?s).*Overriding a previously registered kernel"
            )
            for name, kernel in _kernels().items():
                library.impl(name, kernel, "AutocastCPU", allow_override=True)  # type: ignore[no-untyped-call]
            # This also applies outside of autocast.
            library.impl("dropout", _dropout, "AutogradCPU", allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


@functools.cache
def _kernels() -> dict[str, _Kernel]:
    """Return CUDA's rule for each operation that has a rule on CUDA or on the CPU."""

    def with_rule(key: str) -> set[str]:
        names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        return {name.removeprefix("aten::") for name in names if has_kernel(name, key)}

    kernels: dict[str, _Kernel] = {
        name: fallthrough_kernel
        for name in with_rule("AutocastCPU") - with_rule("AutocastCUDA")
        if not name.startswith(_COMPOSITE)
    }
    for names in (FLOAT32, WIDEST, LOW):
        for name in names:
            kernels[name] = _kernel(functools.partial(_cast_inputs, names), name)
    for name in FLOAT32_OUT:
        kernels[name] = _kernel(_float32_result, name)
    for name, typed in FLOAT32_NORMS.items():
        kernels[name] = _kernel(functools.partial(_float32_norm, _operation(typed)), name)
    return kernels


def _operation(name: str) -> OpOverload:
    operation, _, overload = name.partition(".")
    overload_of: OpOverload = getattr(getattr(aten, operation), overload or "default")
    return overload_of


def _kernel(rule: _Kernel, name: str) -> _Kernel:
    """Turn a rule into a kernel; operations that the rule calls bypass autocast."""
    operation, autocast = _operation(name), DispatchKeySet(DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _ExcludeDispatchKeyGuard(autocast):
            return rule(operation, args, kwargs)

    return kernel


def _cast_inputs(names: list[str], operation: OpOverload, args: Any, kwargs: Any) -> Any:
    """Cast all floating-point tensors to the dtype of the rule for these names."""
    dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _eligible(leaf)}
    dtype = torch.get_autocast_dtype("cpu")
    if names is FLOAT32 or (names is WIDEST and torch.float32 in dtypes):
        dtype = torch.float32
    args, kwargs = tree_map_only(
        Tensor, lambda t: t.to(dtype) if _eligible(t) else t, (args, kwargs)
    )
    return operation(*args, **kwargs)


def _float32_result(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in operation._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if _eligible(args[0]) and arguments.get("dtype") is None:
        from_half = {aten.softmax.int: aten._softmax, aten.log_softmax.int: aten._log_softmax}
        if args[0].dtype == torch.float16 and operation in from_half:
            # One kernel reads halves and writes float32: no copy of the input in between.
            return from_half[operation](arguments["self"], arguments["dim"], True)
        arguments["dtype"] = torch.float32
    return operation(**arguments)


def _float32_norm(typed: OpOverload, operation: OpOverload, args: Any, kwargs: Any) -> Any:
    schema = operation._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    names = [argument.name for argument in schema]
    arguments = defaults | dict(zip(names, args, strict=False)) | kwargs
    dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
    return typed(*(arguments[name] for name in names), dtype=dtype)


def _eligible(value: object) -> bool:
    """Whether autocast casts the value: a floating-point tensor, but not float64."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _dropout(inputs: Tensor, p: float, train: bool) -> Tensor:
    """Keep one byte per element for the backward pass; the CPU would keep the factors.

    `is_fused_kernel_acceptable()` in `aten/src/ATen/native/Dropout.cpp`.
    """
    if not train or not 0 < p < 1 or inputs.numel() == 0:
        if not train or p == 0:
            return inputs
        return inputs * torch.zeros_like(inputs)
    dropped: Tensor = aten.native_dropout(inputs, p, train)[0]
    return dropped
