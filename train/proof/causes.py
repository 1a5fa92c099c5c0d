"""Why a training differs from that of one process, and how to fix it.

Causes are found by inspection of the plain model, or by a pass through it. The checks of strategies
(`train.parallel`), which run earlier, refuse other kinds of models.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ..data.order import Batch
from ..model.recomputation import attributes_of, changed_attributes
from .comparison import STEPS, Difference
from .mixing import Snapshot

if TYPE_CHECKING:
    from ..tasks.base import Task

UNKNOWN = (
    "the cause is unknown; first check what a pass through the model depends on besides its inputs "
    "and its registered parameters and buffers, or use another --strategy"
)


@dataclass(frozen=True, kw_only=True)
class Observations:
    """Unusual properties of a model, mostly as names of parameters and buffers."""

    thawed: tuple[str, ...] = ()
    """Parameters that are frozen in a new model, but trained after some passes."""
    hooked: tuple[str, ...] = ()
    """Parameters with hooks on their gradients."""
    hooked_modules: tuple[str, ...] = ()
    """Modules with hooks on their backward pass."""
    written: tuple[str, ...] = ()
    """Parameters with values that a forward pass in training changes."""
    moved: tuple[str, ...] = ()
    """Saved buffers that a forward pass changes or replaces."""
    moved_unsaved: tuple[str, ...] = ()
    """Buffers with `persistent=False` that a forward pass changes or replaces."""
    remembered: tuple[str, ...] = ()
    """Attributes of modules that a forward pass changes."""
    remembered_by_task: tuple[str, ...] = ()
    """Attributes of the task that the loss changes."""
    in_several_places: tuple[tuple[str, str, str], ...] = ()
    """Changed buffers and attributes of modules with several names, each with two such names."""


def observe(model: nn.Module, samples: Batch, task: "Task") -> Observations:
    """Inspect a new plain model, and how training passes change the model and the task."""
    model.train()
    parameters = dict(model.named_parameters())
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    # Versions as well: a write to a teacher that still equals its student keeps the value.
    values = {name: (p.detach().clone(), p._version) for name, p in parameters.items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    saved = model.state_dict().keys()
    snapshot, attributes = Snapshot(model), _attributes(model)
    of_task = attributes_of(task)
    for _ in range(STEPS):
        outputs = model(samples.inputs)
        with suppress(Exception):
            task.loss(outputs, samples.targets)
    written = tuple(
        name
        for name, (value, version) in values.items()
        if parameters[name]._version != version or not parameters[name].equal(value)
    )
    now = dict(model.named_buffers())
    moved = [name for name, before in buffers.items() if not now[name].equal(before)]
    remembered = tuple(changed_attributes(attributes, _attributes(model)))
    snapshot.put_back()
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
    several = tuple(
        (name, first, second)
        for first, second, *_ in (names for names in places.values() if len(names) > 1)
        for name in (*moved, *remembered)
        if name.startswith(f"{first}.")
    )
    return Observations(
        thawed=tuple(name for name in frozen if parameters[name].requires_grad),
        hooked=tuple(
            name
            for name, p in parameters.items()
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
        ),
        hooked_modules=tuple(
            name
            for name, module in model.named_modules()
            if module._backward_hooks or module._backward_pre_hooks
        ),
        written=written,
        moved=tuple(name for name in moved if name in saved),
        moved_unsaved=tuple(name for name in moved if name not in saved),
        remembered=remembered,
        remembered_by_task=tuple(changed_attributes(of_task, attributes_of(task))),
        in_several_places=several,
    )


def _attributes(model: nn.Module) -> dict[str, object]:
    """Return the attributes of modules besides parameters and buffers, by name."""
    return {
        f"{name}.{attribute}".removeprefix("."): value
        for name, module in model.named_modules()
        for attribute, value in attributes_of(module).items()
    }


def likeliest(difference: Difference, seen: Observations) -> str:
    """Return the most likely cause of a difference, and the fix.

    Observations about the tensor that differs come first, then all others.
    """
    name = difference.name
    if difference.kind == "optimizer state":
        name = name.rpartition("/")[0]
    causes = list(_causes(difference, seen))
    for names, text in causes:
        if name in names:
            return text
    return causes[0][1] if causes else UNKNOWN


def otherwise(seen: Observations) -> str:
    """Return the cause of a difference that has no other explanation."""
    if seen.hooked_modules:
        return (
            f"module {some(seen.hooked_modules)} has a hook on its backward pass, which sees the "
            "gradient of one rank's samples, or of one micro-batch, in its own scale: only what is "
            "linear in the gradient of each sample is the same in all of these"
        )
    if seen.in_several_places:
        name, first, second = seen.in_several_places[0]
        return (
            f"forward() changes {name!r}, and its module is used as {first!r} and as {second!r}: "
            "stages that share a module have a copy each, and change only that; use another module "
            "in each place, or another strategy"
        )
    if seen.remembered:
        return (
            f"forward() changes attribute {some(seen.remembered)}, which depends on the passes "
            "and samples of each rank, stage and micro-batch; use a buffer of floats (ranks "
            "average those after each step), make it an input, or use another strategy"
        )
    if seen.remembered_by_task:
        return (
            f"loss() changes attribute {some(seen.remembered_by_task)} of the task, which each "
            "rank does by its own calls; keep it in a buffer of the model"
        )
    return UNKNOWN


def _causes(difference: Difference, seen: Observations) -> Iterator[tuple[Iterable[str], str]]:
    if seen.thawed:
        yield (
            seen.thawed,
            f"parameter {some(seen.thawed)} is frozen when the model is made, and trained from a "
            "later pass on; have model() make it trainable, and detach() it in forward() until "
            "then",
        )
    if seen.written:
        yield (
            seen.written,
            f"forward() writes parameter {some(seen.written)} (as `max_norm`, clamp_() or a "
            "teacher's update do): a write into a sharded or received copy is lost, and ranks with "
            "other samples write other values; make it a buffer, or compute the value from the "
            "parameter without a write (a parametrization, a normalised copy)",
        )
    if seen.hooked:
        yield (
            seen.hooked,
            f"parameter {some(seen.hooked)} has a hook on its gradient, which is lost or sees "
            "other values where the parameter is replaced or sharded, or its gradient summed; "
            "apply it in forward() instead (a mask that multiplies the weight), or freeze the "
            "parameter",
        )
    if seen.moved_unsaved:
        yield (
            seen.moved_unsaved,
            f"forward() moves buffer {some(seen.moved_unsaved)}, which is registered with "
            "persistent=False: such a buffer counts as a constant, and each rank moves its own; "
            "leave out persistent=False, so that ranks take the mean after each step",
        )
    if difference.kind == "buffer":
        yield (
            (difference.name,),
            "each rank or micro-batch changes the buffer by its own samples, and the strategy does "
            "not put these changes together as one process would: take means, not sums or "
            "maxima, and write in place; register what need not be saved with persistent=False",
        )


def some(names: Iterable[str]) -> str:
    """Quote the first two names, with a count of the rest."""
    listed = list(names)
    rest = len(listed) - 2
    return ", ".join(map(repr, listed[:2])) + (f" and {rest} more" if rest > 0 else "")
