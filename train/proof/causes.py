"""Why a training differs from that of one process, and what to do about it.

What can be decided by looking at the plain model, or by a pass through it, is decided so.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..data.order import Batch
from ..model.trees import mapped
from ..parallel.base import summed_loss
from ..tasks.base import Task
from .comparison import Difference
from .mixing import Snapshot

UNKNOWN = (
    "the cause is not known; what a pass through the model depends on, beside its inputs and its "
    "registered parameters and buffers, is the first thing to look at; use another --strategy"
)


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What is unusual about a model and its loss; each by the name of a parameter or buffer."""

    hooked: tuple[str, ...] = ()
    """Parameters with hooks on their gradients."""
    held: Mapping[str, str] = field(default_factory=dict)
    """Parameters that something beside the module tree holds, or sees the memory of: by whom."""
    written: tuple[str, ...] = ()
    """Parameters whose values a forward pass in training changes."""
    replaced: tuple[str, ...] = ()
    """Buffers for which a forward pass puts another tensor."""
    moved: tuple[str, ...] = ()
    """Buffers that a forward pass changes in place."""
    read_by_loss: tuple[str, ...] = ()
    """Parameters that `loss()` reads, beside the outputs."""
    evaluating: tuple[str, ...] = ()
    """Modules that `model()` has put in evaluation mode."""


def observe(task: Task, model: nn.Module, samples: Batch) -> Observations:
    """Look at a new plain model, and at what a pass in training does to it; it is changed."""
    names = {id(p): name for name, p in model.named_parameters()}
    evaluating = tuple(n for n, m in model.named_modules() if n and not m.training)
    hooked = tuple(
        name
        for name, p in model.named_parameters()
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    )
    held = dict(_held_elsewhere(task, model))
    owners = [
        (f"{prefix}.{name}" if prefix else name, module, name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, _, _, buffer in owners}
    if not model.training:
        model.train()
    snapshot = Snapshot(model)
    outputs = model(samples.inputs)
    written = tuple(
        name for name, p in model.named_parameters() if name in before and not p.equal(before[name])
    )
    replaced = tuple(
        full for full, module, name, buffer in owners if module._buffers.get(name) is not buffer
    )
    moved = tuple(
        full
        for full, module, name, buffer in owners
        if full not in replaced and not buffer.equal(buffers[full])
    )
    snapshot.put_back()
    apart = mapped(lambda t: t.detach() if isinstance(t, Tensor) else t, outputs)
    loss = summed_loss(task, apart, samples.targets)
    return Observations(
        hooked=hooked,
        held=held,
        written=written,
        replaced=replaced,
        moved=moved,
        read_by_loss=tuple(sorted(names[i] for i in _leaves(loss) if i in names)),
        evaluating=evaluating,
    )


def _held_elsewhere(task: Task, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield parameters that attributes beside the module tree hold, and views of them."""
    places = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_modules"):
                where = f"{prefix}.{attribute}" if prefix else attribute
                for tensor in _tensors_in(value):
                    if (name := places.get(tensor.untyped_storage().data_ptr())) is not None:
                        yield name, f"attribute {where!r} of the model"
    for attribute, value in vars(task).items():
        for tensor in _tensors_in(value):
            if (name := places.get(tensor.untyped_storage().data_ptr())) is not None:
                yield name, f"attribute {attribute!r} of the task"


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.numel():
            yield value
    elif depth and isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors_in(one, depth - 1)
    elif depth and isinstance(value, list | tuple | set) and len(value) < 10_000:
        for one in value:
            yield from _tensors_in(one, depth - 1)


def _leaves(loss: Tensor) -> set[int]:
    """Return the ids of the tensors with gradients on which a loss depends."""
    found: set[int] = set()
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [function for function, _ in node.next_functions]
    return found


def likeliest(difference: Difference, seen: Observations, *, recomputed: bool) -> str:
    """Return the most likely cause of a difference, and the fix.

    What was observed of the very tensor that differs comes first, then what was observed at all.
    """
    name = difference.name
    if difference.kind == "optimizer state":
        name = name.rpartition("/")[0]
    causes = list(_causes(difference, seen, recomputed=recomputed))
    for names, text in causes:
        if name in names:
            return text
    return causes[0][1] if causes else UNKNOWN


def _causes(
    difference: Difference, seen: Observations, *, recomputed: bool
) -> Iterator[tuple[Iterable[str], str]]:
    if difference.name in seen.replaced:
        yield (
            seen.replaced,
            f"forward() puts another tensor in the place of buffer {_some(seen.replaced)}, and the "
            "ranks may average, save or send the old one; write it in place: `self.b.copy_(...)` "
            "or `self.b.mul_(...)` in place of `self.b = ...`",
        )
    if seen.written:
        yield (
            seen.written,
            f"forward() writes parameter {_some(seen.written)} (as `max_norm`, clamp_() or a "
            "teacher's update do): a write into a sharded or received copy is lost, and ranks with "
            "other samples write other values; make it a buffer, or compute the value from the "
            "parameter without a write (a parametrization, a normalised copy)",
        )
    if recomputed and (seen.moved or seen.replaced):
        names = (*seen.replaced, *seen.moved)
        yield (
            names,
            f"with --activation-checkpointing a piece computes its activations twice, and the "
            f"second time reads buffer {_some(names)} as the first has left it; leave "
            "--activation-checkpointing out, or read the buffer before it is changed",
        )
    # What the task holds, it holds for its loss.
    held = {n: by for n, by in seen.held.items() if n not in seen.read_by_loss}
    if held:
        names = tuple(held)
        yield (
            names,
            f"{held[names[0]]} holds parameter {_some(names)} or a view of it: when the "
            "parameter is sharded or replaced, that stays the old tensor; take the "
            "parameter from its module in forward() each time",
        )
    if seen.hooked:
        yield (
            seen.hooked,
            f"parameter {_some(seen.hooked)} has a hook on its gradient, which is lost or sees "
            "other values where the parameter is replaced or sharded, or its gradient summed; "
            "apply it in forward() instead (a mask that multiplies the weight), or freeze the "
            "parameter",
        )
    if seen.read_by_loss:
        yield (
            seen.read_by_loss,
            f"loss() reads parameter {_some(seen.read_by_loss)}: this strategy trains another copy "
            "of it, or each rank adds the penalty once; have forward() return the penalty as an "
            "output for each sample, or use --weight-decay",
        )
    if seen.evaluating:
        yield (
            (),
            f"model() puts {_some(seen.evaluating)} in evaluation mode, which lasts only until "
            "something calls train(): override train() of that module to keep it in eval()",
        )
    if difference.kind == "buffer":
        yield (
            (difference.name,),
            "each rank or micro-batch changes the buffer by its own samples, and the strategy does "
            "not put these changes together as one process would: take means, not sums or "
            "maxima, and write in place; register what need not be saved with persistent=False",
        )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    rest = len(listed) - 2
    return ", ".join(map(repr, listed[:2])) + (f" and {rest} more" if rest > 0 else "")
