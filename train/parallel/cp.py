"""Context parallel: each rank has a part of every sequence.

Almost every layer works on one position at a time and needs no change. Attention reads earlier
positions, which other ranks hold. `allgather` fetches their keys and values: it supports any number
of heads, but the rank with the last part has the most work. `ulysses` swaps parts of the sequence
for heads, so that each rank has whole sequences of a few heads, and back: it sends less data, and
all ranks have the same work.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from ..data.order import Batch
from ..errors import UsageError, is_collateral
from ..layers import CausalAttention, Placed
from ..model.trees import Tree, mapped, named, near, tensors_of
from ..runtime.process_group import arrange
from ..tasks.base import item_count, sketch_of
from . import pieces
from .base import Parts, full
from .layout import Layout

TIME = 2
HEADS = 1
BEYOND = (nn.MultiheadAttention, nn.RNNBase, nn.modules.conv._ConvNd)
"""Layers that read beyond one position, and cannot handle missing parts of a sequence."""
FAR, FAR_IN_HALVES = 1e-3, 0.1
"""Largest difference relative to the norm of the outputs. Rounding causes 1e-6 in single precision,
and half a percent per layer in half precision."""


@dataclass(frozen=True, kw_only=True)
class SequenceSlice:
    """A rank's part of each sequence."""

    part: int = 0
    """Number of this rank's part."""
    layout: Layout = field(default_factory=Layout)
    """The number of parts, and the ranks that share them."""
    task: str = ""
    """The task's name, for messages."""
    group: ProcessGroup | None = None
    """The ranks that share a sequence."""

    def of(self, batch: Batch) -> Batch:
        """Cut this rank's part out of inputs and targets, along dimension 1 of all tensors.

        Raises:
            UsageError: the sequence cannot be cut into parts of equal length (the message shows
                the arithmetic), or a tensor has no such dimension.
        """
        parts = self.layout.cp
        if parts == 1:
            return batch
        tensors = [*tensors_of(batch.inputs), *tensors_of(batch.targets)]
        if tensors[0].dim() < 2 or any(t.shape[:2] != tensors[0].shape[:2] for t in tensors):
            whose = f"those of task {self.task!r}" if self.task else "this task's"
            shapes = f"{_shapes('inputs', batch.inputs)} and {_shapes('targets', batch.targets)}"
            raise UsageError(
                f"--cp {parts} cuts dimension 1 of inputs and targets, the sequence, but {whose} "
                f"are {shapes}; leave out --cp"
            )
        time = tensors[0].shape[1]
        # Between its layers, tensor parallelism cuts each part again.
        divisor = parts * self.layout.tp
        if time % divisor:
            product = f"cp {parts} x tp {self.layout.tp} = {divisor}"
            raise UsageError(
                f"--cp {parts} does not fit sequences of {time}: {time} = {time // divisor} x "
                f"{divisor} + {time % divisor}"
                + (f" ({product})" if self.layout.tp > 1 else "")
                + f"; the sequence must be a multiple of {divisor}"
            )
        part = slice(time // parts * self.part, time // parts * (self.part + 1))
        return batch.mapped(lambda tensor: tensor[:, part].contiguous())

    def joined(self, outputs: Tree, own: Batch) -> Tree:
        """Join the outputs for all parts of a batch's sequences; all ranks of the group call this.

        `own` is this rank's part of the batch. Dimension 1 of each output must be the sequence.

        Raises:
            UsageError: dimension 1 is not the sequence, or another dimension has the same length.
        """
        if self.layout.cp == 1:
            return outputs
        time = tensors_of(own.inputs)[0].shape[1]

        def join(tensor: object) -> object:
            if not isinstance(tensor, Tensor):
                return tensor
            if [dim for dim, size in enumerate(tensor.shape) if size == time and dim] != [1]:
                raise UsageError(
                    f"--predict with --cp {self.layout.cp}: dimension 1 of the outputs, and no "
                    f"other, must be the sequence ({time} positions per rank), but "
                    f"task {self.task!r} gives {_shapes('outputs', outputs)}; leave out --cp"
                )
            tensor = tensor.contiguous()
            parts = [torch.empty_like(tensor) for _ in range(self.layout.cp)]
            dist.all_gather(parts, tensor, group=self.group)
            return torch.cat(parts, dim=1)

        return mapped(join, outputs)


def apply(model: nn.Module, parts: Parts) -> SequenceSlice:
    """Let the attention of a model (or of one pipeline stage) span the parts of a sequence.

    Gradients need no change here: the ranks of one sequence have the same parameters, so their
    gradients are summed along with those of other samples.

    Raises:
        UsageError: the model has no attention that can be split, or layers that cannot be split.
    """
    layout, name = parts.layout, parts.task.name
    if layout.cp == 1:
        return SequenceSlice()
    foreign = [type(module).__name__ for module in model.modules() if isinstance(module, BEYOND)]
    if foreign:
        raise UsageError(
            f"--cp {layout.cp}: the model of task '{name}' has a {foreign[0]}, which would see "
            "only this rank's part of a sequence; use train.layers.CausalAttention, or leave out "
            "--cp"
        )
    # A pipeline stage may have no attention, but the whole model must have some.
    models = [model] if layout.pp == 1 else [model, sketch_of(copy(parts.task))]
    if not any(isinstance(m, CausalAttention) for one in models for m in one.modules()):
        raise UsageError(
            f"--cp {layout.cp}: the model of task '{name}' has no train.layers.CausalAttention, "
            "the layer that can attend to other ranks' parts of a sequence; build the model with "
            "it (and with train.layers.Positions), or leave out --cp"
        )
    others = layout.world_size // (layout.cp * layout.tp)
    sizes = {"others": others, "cp": layout.cp, "tp": layout.tp}
    mesh = arrange(parts.group, sizes, timeout_s=parts.config.timeout_s)
    group, part = mesh.get_group("cp"), mesh.get_local_rank("cp")
    ulysses = parts.config.cp_method == "ulysses"
    exchange = HeadsForTime(group, layout) if ulysses else GatheredKeys(group, part)
    for module in model.modules():
        if isinstance(module, CausalAttention):
            module.context = exchange
        elif isinstance(module, Placed):
            module.register_forward_pre_hook(partial(_begin, part))
    return SequenceSlice(part=part, layout=layout, task=name, group=group)


def verify(model: nn.Module, run: Callable[[Tree], Tree], batch: Batch, parts: Parts) -> None:
    """Make sure that cutting sequences does not change a model's outputs.

    Attention and positions span the parts of a sequence. A custom layer that counts positions, or
    reads beyond one, would start again in each part: without an error, but as another model. So one
    sample goes through the model before the first step: two parts at once, then the second part
    alone. Attention is replaced by a function of each single position, so any difference comes from
    such a layer.

    `run` computes the outputs of the model, or of this rank's stages of it, without gradients; it
    returns `None` if another rank has the outputs. The batch is the same on all ranks.

    Raises:
        UsageError: on all ranks; a custom layer counts positions, or reads beyond one.
    """
    cp, layout, name = parts.layout.cp, parts.layout, parts.task.name
    if cp == 1 or not len(batch):
        return
    slices = [SequenceSlice(part=part, layout=layout, task=name).of(batch) for part in range(cp)]
    time = tensors_of(batch.inputs)[0].shape[1] // cp * 2
    two = mapped(lambda tensor: tensor[:1, :time].contiguous(), batch.inputs)
    counts = [item_count(parts.task, s.targets) for s in slices]
    whole = item_count(parts.task, batch.targets)
    if sum(counts) != whole:
        raise UsageError(
            f"--cp {cp}: count() of task '{name}' gives {whole} for whole sequences, but "
            f"{' + '.join(map(str, counts))} for their parts, so the loss would be divided by "
            "another number; count what loss() sums over, such as targets.numel(), or leave out "
            "--cp"
        )
    if pieces.looks_at_data(parts, batch):
        raise UsageError(
            f"--cp {cp}: the model of task '{name}' reads a value of its data (item(), or an if "
            "on a tensor), but each rank has only a part of each sequence; leave out --cp"
        )
    try:
        different = differs(run, model, two, halves=parts.config.precision != "fp32")
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if is_collateral(error):
            raise
        raise UsageError(
            f"--cp {cp}: the model of task '{name}' cannot run on a part of a sequence, "
            f"{_shapes('inputs', two)} of {_shapes('inputs', batch.inputs)}: "
            f"{str(error).splitlines()[0]}; its layers must take sequences of any length, or leave "
            "out --cp"
        ) from error
    if any(parts.group.sum([different])):
        raise UsageError(
            f"--cp {cp}: for a part of a sequence the model of task '{name}' computes something "
            "else than for all of it: a layer counts positions from where its input begins, or "
            "looks beyond one; use train.layers.Positions or Places, and no other layer than "
            "CausalAttention that looks beyond one, or leave out --cp"
        )


def differs(run: Callable[[Tree], Tree], model: nn.Module, inputs: Tree, *, halves: bool) -> bool:
    """Whether the second part of a sequence has other outputs without the first: see `verify()`.

    `inputs` are two parts of some sequences, each tensor of shape [batch, time, ...]; `halves`: the
    model computes in half precision.
    """
    part = mapped(lambda tensor: tensor.chunk(2, dim=1)[1].contiguous(), inputs)
    # Modules are compiled later, for the shapes of training.
    with torch.compiler.set_stance("force_eager"):
        with _placed(model, 0):
            whole = run(inputs)
        with _placed(model, tensors_of(part)[0].shape[1]):
            alone = run(part)
    different, far = False, FAR_IN_HALVES if halves else FAR
    for one, other in zip(tensors_of(whole), tensors_of(alone), strict=False):
        # Gather every tensor, as all ranks must take part.
        two, second = full(one), full(other)
        # The model decides which dimension of its outputs is the sequence.
        sizes = zip(two.shape, second.shape, strict=True) if two.dim() == second.dim() else ()
        along = [dim for dim, (double, size) in enumerate(sizes) if double == 2 * size]
        if along:
            second_half = two.chunk(2, dim=along[0])[1].float()
            different |= not near(second_half, second.float(), far)
    return different


@contextmanager
def _placed(model: nn.Module, offset: int) -> Iterator[None]:
    """Set the first position of a model's input to `offset`, and disable its attention."""
    contexts, handles = [], []

    def begin(module: Placed, arguments: Sequence[object]) -> None:
        module.offset = offset

    for module in model.modules():
        if isinstance(module, CausalAttention):
            contexts.append((module, module.context))
            module.context = _Itself()
        elif isinstance(module, Placed):
            # Overrides the hook of context parallelism, which runs before.
            handles.append(module.register_forward_pre_hook(begin))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for attention, context in contexts:
            attention.context = context


class _Itself:
    """Attends only to a position's own query, key and value, and depends on all three."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix the three, so that another rotation angle of a query or a key changes the result."""
        return value + query.sum(-1, keepdim=True) - 2 * key.sum(-1, keepdim=True)


def _shapes(name: str, tree: Tree) -> str:
    """Return the shapes of a tree's tensors, with names if there are several."""
    if isinstance(tree, Tensor):
        return str(list(tree.shape))
    tensors = ((path, leaf) for path, leaf in named(name, tree) if isinstance(leaf, Tensor))
    return ", ".join(f"{path} {list(leaf.shape)}" for path, leaf in tensors)


def _begin(part: int, module: Placed, arguments: tuple[int, ...]) -> None:
    """Set the start of this rank's part in a layer; all parts have the same length."""
    module.offset = part * arguments[0]


class GatheredKeys:
    """Gathers the keys and values of all parts; queries stay on their ranks.

    The ranks of `group` are in the order of their parts.
    """

    def __init__(self, group: ProcessGroup, part: int) -> None:
        self._group, self._part = group, part

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # what it calls is not traceable
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from this rank's positions to all before them: [batch, heads, time, head_dim]."""
        time = query.shape[TIME]
        seen = time * (self._part + 1)
        # One all-gather for both. Positions after this part are unused, and get no gradient.
        gather: Any = _Gather.apply
        both = gather(torch.stack((key, value)), self._group).narrow(TIME + 1, 0, seen)
        # The last query is at the last key seen: the triangle starts from the lower right corner.
        mask: Any = causal_lower_right(time, seen)
        return functional.scaled_dot_product_attention(query, both[0], both[1], attn_mask=mask)


class HeadsForTime:
    """Swaps parts of the sequence for whole sequences of a few heads, and back.

    The ranks of `group` are in the order of their parts.
    Source: DeepSpeed Ulysses, arXiv 2309.14509.
    """

    def __init__(self, group: ProcessGroup, layout: Layout) -> None:
        self._group, self._layout = group, layout

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # what it calls is not traceable
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend over the whole sequence: [batch, heads, time of this part, head_dim].

        Raises:
            UsageError: the heads cannot be shared evenly; shows the arithmetic.
        """
        heads, cp, tp = query.shape[HEADS], self._layout.cp, self._layout.tp
        if heads % cp:
            total = f"{heads * tp} heads / tp {tp} = {heads}" if tp > 1 else f"{heads} heads"
            raise UsageError(
                f"--cp {cp} --cp-method ulysses shares heads, but {total}, which {cp} does not "
                f"divide: {heads} = {heads // cp} x {cp} + {heads % cp}; use --cp-method allgather"
            )
        # One exchange for all three; stacking shifts the dimensions by one.
        whole = _swap(torch.stack((query, key, value)), HEADS + 1, TIME + 1, self._group)
        query, key, value = whole.unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return _swap(mixed, TIME, HEADS, self._group)


def _swap(tensor: Tensor, split: int, join: int, group: ProcessGroup) -> Tensor:
    """Distribute dimension `split` over the ranks, and join dimension `join`."""
    swap: Any = _Swap.apply
    swapped: Tensor = swap(tensor, split, join, group)
    return swapped


class _Gather(torch.autograd.Function):
    """Join the parts of [2, batch, heads, time, head_dim] along the time: an all-gather.

    A key's gradient is the sum over all ranks that used it: reduce-scatter.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=TIME + 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        chunks = gradients[0].chunk(dist.get_world_size(ctx.group), dim=TIME + 1)
        parts = [chunk.contiguous() for chunk in chunks]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.group)
        return mine, None


class _Swap(torch.autograd.Function):
    """All-to-all; its gradient is the reverse all-to-all."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: int, join: int, group: ProcessGroup) -> Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), dim=split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), dim=join)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(gradients[0], ctx.join, ctx.split, ctx.group), None, None, None
