"""Batch normalisation and other running statistics under data parallelism.

Each rank's batch normalisation has seen its own samples only, so its running statistics drift
apart from the others'; saving rank 0's, or evaluating on each rank, gives one rank's view.
Averaging after each step gives all ranks those of the whole batch. This is exact: a running
statistic is r <- (1 - m) r + m x with the same r and m on every rank, so the mean of the results is
the result for the mean of the x. (Ranks normalise by the mean of their variances;
`--sync-batch-norm` normalises by the variance of the whole batch in one piece.)

`synchronised()` does the latter, on any device. torch's own SyncBatchNorm is fast, and refuses the
CPU; the one here runs everywhere. Both exchange counts and sums instead of means, so slices may
differ in size, and one may be empty.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError

NUMBERS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.complex128, torch.complex64, torch.complex32,
)  # fmt: skip
"""Dtypes that torch can subtract and add; `SENT`: dtypes that backends can send."""
_PLAIN = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SENT = {*NUMBERS, torch.bool} - {torch.int16}


def synchronised(model: nn.Module, *, device: torch.device | None = None) -> nn.Module:
    """Replace each BatchNorm1d, 2d and 3d by one that normalises over all ranks of the run.

    This works in place and keeps parameters, buffers and their names. If some ranks hold the same
    samples or another stage, call `limit_to_group()` next. `device`: the device that the model will
    run on (default: its current one).

    Raises:
        UsageError: a layer has hooks, or another object than its parent refers to it and would
            continue to use the old layer.
    """
    first = next(model.parameters(), None)
    device = device or (None if first is None else first.device)
    if device is not None and device.type == "cuda":
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    else:
        convert = _converted
    layers = {n: weakref.ref(m) for n, m in model.named_modules() if n and isinstance(m, _PLAIN)}
    for name, layer in layers.items():
        if any(vars(layer()).get(hooks) for hooks in _HOOKS):
            raise UsageError(
                f"--sync-batch-norm replaces layer {name!r}, and would lose its hooks: have a "
                "module around it do the same in forward()"
            )
    made = cast(nn.Module, convert(model))
    if any(layer() is not None for layer in layers.values()):
        # A module with a replaced forward() is a reference cycle.
        gc.collect()
    left = {*made.modules()}
    for name, layer in layers.items():
        if layer() is not None and layer() not in left:
            raise UsageError(
                f"--sync-batch-norm replaces layer {name!r}, but a list, a dict or a closure still "
                "refers to the old one: take it from its module where it is used"
            )
    return made


def limit_to_group(model: nn.Module, group: "dist.ProcessGroup") -> None:
    """Limit the exchange of the model's synchronised layers to the ranks of `group`."""
    for module in model.modules():
        if isinstance(module, SynchronisedBatchNorm | nn.SyncBatchNorm):
            module.process_group = group


def _converted(module: nn.Module) -> nn.Module:
    if isinstance(module, _PLAIN):
        return SynchronisedBatchNorm(module)
    for name, child in module.named_children():
        setattr(module, name, _converted(child))
    return module


# Not a subclass of SyncBatchNorm: DistributedDataParallel refuses that one on the CPU.
class SynchronisedBatchNorm(_BatchNorm):
    """A BatchNorm layer of any dimension that normalises over the batch of all ranks."""

    process_group: "dist.ProcessGroup | None" = None

    def __init__(self, plain: _BatchNorm) -> None:
        """Take over a plain layer's settings, and share its parameters and buffers."""
        super().__init__(plain.num_features, plain.eps, plain.momentum, device="meta")
        self.affine, self.track_running_stats = plain.affine, plain.track_running_stats
        self._parameters, self._buffers = plain._parameters, plain._buffers
        self.train(plain.training)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept every dimension: the plain layer already fits its place in the model."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise each channel (dimension 1)."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return super().forward(input)
        normalise: Any = _Normalise.apply
        output, mean, variance, count = normalise(
            input, self.weight, self.bias, self.eps, self.process_group
        )
        if self.track_running_stats:
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            if momentum is None:  # the mean over all batches so far
                momentum = 1.0 / int(self.num_batches_tracked)
            unbiased = variance * (int(count) / max(int(count) - 1, 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return output  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    """Normalise by the mean and variance over all ranks; one exchange each way."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: "dist.ProcessGroup | None",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        shape = [1, -1] + [1] * (input.dim() - 2)
        dims = [d for d in range(input.dim()) if d != 1]
        here, channels = x.numel() // x.shape[1], x.shape[1]
        # Use double precision, and squares around the rank's own mean: a difference of large sums
        # would lose the variance.
        sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if here:
            variance, mean = (v.double() for v in torch.var_mean(x, dims, correction=0))
            sums[0] = here
            sums[1 : channels + 1] = here * mean
            sums[channels + 1 :] = here * (variance + mean.square())
        dist.all_reduce(sums, group=group)
        count = sums[0].clone()
        mean, squares = (sums[1:] / count.clamp(min=1.0)).chunk(2)
        variance = (squares - mean.square()).clamp(min=0.0)
        inverse = (variance + eps).rsqrt().to(x.dtype).view(shape)
        normal = (x - mean.to(x.dtype).view(shape)) * inverse
        # Return another tensor than the saved one, since the next layer may work in place.
        output = normal.clone() if weight is None else normal * weight.to(x.dtype).view(shape)
        if bias is not None:
            output = output + bias.to(x.dtype).view(shape)
        ctx.save_for_backward(normal, inverse, weight, count)
        ctx.group, ctx.dims, ctx.shape = group, dims, shape
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[object, ...]:
        normal, inverse, weight, count = ctx.saved_tensors
        dims, shape = ctx.dims, ctx.shape
        dy = gradients[0].to(normal.dtype)
        # This rank's contribution to the gradients of bias and weight.
        to_bias, to_weight = dy.sum(dims), (dy * normal).sum(dims)
        sums = torch.cat((to_bias, to_weight)).double()
        dist.all_reduce(sums, group=ctx.group)
        # The mean and the variance depend on every sample of every rank.
        mean_dy, mean_slope = (sums / count.clamp(min=1.0)).to(dy.dtype).chunk(2)
        dx = (dy - mean_dy.view(shape) - normal * mean_slope.view(shape)) * inverse
        if weight is not None:
            dx = dx * weight.to(dx.dtype).view(shape)
        _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        return (
            dx.to(gradients[0].dtype),
            to_weight if wants_weight else None,
            to_bias if wants_bias else None,
            None,
            None,
        )


def numeric_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return all buffers that support arithmetic; complex ones as a view of real pairs."""
    named = model.named_buffers()
    return {name: _real(buffer) for name, buffer in named if buffer.dtype in NUMBERS}


def change(now: Tensor, before: Tensor) -> Tensor:
    """Return the change of a buffer: 0 where it has not moved, such as the infinities of a mask."""
    return (now - before).masked_fill_(now == before, 0)


def never_sent(model: nn.Module) -> list[str]:
    """Name tensors of dtypes that no backend sends: DDP must skip them, as all ranks agree."""
    named = [*model.named_buffers(), *model.named_parameters()]
    return [name for name, tensor in named if tensor.dtype not in SENT]


Place = tuple[nn.Module, str]
"""A buffer by its module and its name there: forward() may replace the tensor."""


def moving_places(model: nn.Module) -> list[Place]:
    """List the buffers that training may move differently on each rank."""
    return [
        (module, name)
        for module in model.modules()
        # These are the same on all ranks without an exchange.
        if not isinstance(module, SynchronisedBatchNorm | nn.SyncBatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point() or buffer.is_complex()
        # A buffer that is not saved, such as a table of angles, is a constant.
        if name not in module._non_persistent_buffers_set
    ]


def moving_buffers(model: nn.Module) -> list[Tensor]:
    """List the current tensors of these buffers.

    Complex ones are views of their memory as pairs of real numbers.
    """
    return [_real(buffer) for buffer in map(_at, moving_places(model)) if buffer is not None]


def _at(place: Place) -> Tensor | None:
    module, name = place
    buffer = module._buffers.get(name)
    # Tensor parallelism makes DTensors of the buffers of layers in its plan, whole on each rank.
    return buffer.to_local() if isinstance(buffer, DTensor) else buffer


def _real(buffer: Tensor) -> Tensor:
    if not buffer.is_complex():
        return buffer
    # The mean of conjugates is the conjugate of the mean: tensors in memory may be averaged.
    return torch.view_as_real(buffer.conj() if buffer.is_conj() else buffer)


def average_buffers(
    places: Sequence[Place], groups: "Sequence[dist.ProcessGroup | None]" = (None,)
) -> None:
    """Replace the buffers at `moving_places()` by their mean over ranks, one exchange per group.

    There is one group per data axis, of ranks with different samples; None: all ranks.
    """
    if not places:
        return
    buffers = [_real(buffer.detach()) for place in places if (buffer := _at(place)) is not None]
    # In double precision, the mean of equal values is exactly the value.
    flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers])
    for group in groups:
        # Sum, then divide: gloo has no mean. Every rank gets the same bits.
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
    means = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, mean in zip(buffers, means, strict=True):
        buffer.copy_(mean.view_as(buffer))
