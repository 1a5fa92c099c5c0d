"""Finding the failed part of a task and its inputs from the traceback.

The traceback's frames still hold their arguments, so a run without failures records nothing.
"""

import inspect
import re
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from torch import nn

from ..data.order import Batch
from ..model.trees import described
from ..rundir.files import TrainingProgress
from ..tasks.base import Task

METHODS = [n for n, m in vars(Task).items() if inspect.isfunction(m) and not n.startswith("_")]
_PACKAGE = __name__.partition(".")[0]
ALONE = ("model", "train", "test", "identity", "weights")
"""Task methods without communication: no error in them is an echo of another rank's."""
NOTE = re.compile(r"^in sample (\d+)$", re.MULTILINE)
"""The note that `data.loader` adds to an exception."""
HINTS = {
    "OutOfMemoryError: ": (
        "a smaller --micro-batch, or --activation-checkpointing, takes less memory; in an "
        "evaluation, a smaller --eval-batch"
    ),
    "is killed by signal: Killed": (
        "a process that read ahead has taken too much memory, perhaps: try fewer --workers"
    ),
    "does not require grad": (
        "the loss does not depend on any parameter: look for detach(), item() or no_grad()"
    ),
}
"""The advice for an error, by its message."""


@dataclass(frozen=True, kw_only=True)
class FailedPart:
    """The activity during which an exception was raised."""

    name: str = "the run"
    """Name of the activity, such as `loss()`."""
    layer: str = ""
    """Name and type of the layer with the failed forward pass."""
    given: str = ""
    """Inputs of the failed call, with their shapes."""
    alone: bool = False
    """Whether no other rank can have caused the failure."""
    on_a_batch: bool = True
    """Whether the activity was working on one batch."""


def part_of(error: BaseException) -> FailedPart:
    """Find the innermost part of a task on the way to an error."""
    frames = _frames(error)
    if loader := [f.f_code.co_name for f in frames if _module(f) == "data.loader"]:
        # The loader has added a note; the message of a data worker's error contains its traceback.
        notes = "\n".join([*getattr(error, "__notes__", ()), str(error)])
        name = "putting samples together" if "_collate" in loader else "reading samples"
        if note := NOTE.search(notes):
            name = f"reading sample {note[1]}"
        return FailedPart(name=name, alone=True, on_a_batch=False)
    for frame in reversed(frames):
        name = frame.f_code.co_name
        if name in METHODS and isinstance(_receiver(frame), Task):
            return FailedPart(
                name=f"{name}()",
                given=_given("it", frame),
                alone=name in ALONE,
                on_a_batch=name in ("loss", "count", "score", "predictions"),
            )
    if found := _layer(frames):
        layer, frame = found
        return FailedPart(name="the forward pass", layer=layer, given=_given(layer, frame))
    modules = " ".join(str(frame.f_globals.get("__name__", "")) for frame in frames)
    if "torch.autograd" in modules:
        return FailedPart(name="the backward pass")
    return FailedPart(name="the optimizer's step") if "torch.optim" in modules else FailedPart()


def describe(error: BaseException, task: Task | None, progress: TrainingProgress | None) -> str:
    """Describe in one line the failed part of a task, the moment, and the inputs."""
    part, frames = part_of(error), _frames(error)
    of_task = "" if task is None else f" of task {task.name!r}"
    sentences = [f"{part.name}{of_task} failed {_moment(frames, progress)}", part.given]
    if part.on_a_batch and (batch := _batch(frames)):
        inputs = described("inputs", batch.inputs)
        sentences.append(f"its batch has {inputs} and {described('targets', batch.targets)}")
    message = f"{type(error).__name__}: {error}"
    sentences += [hint for sign, hint in HINTS.items() if sign in message]
    if task is not None:
        # The last line of the task's file on the way to the error; else the file.
        file = inspect.getfile(type(task))
        trace = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in trace if frame.filename == file]
        sentences.append(f"see {file}:{lines[-1]}" if lines else f"see {file}")
    return "; ".join(text for text in sentences if text)


def explain(error: BaseException, task: Task | None, progress: TrainingProgress | None) -> str:
    """Describe a failure; an error of the diagnosis must not hide it."""
    with suppress(Exception):
        return describe(error, task, progress)
    return "the run failed"


def is_ours_alone(error: BaseException) -> bool:
    """Whether an error that looks like an echo comes from code without communication."""
    with suppress(Exception):
        return part_of(error).alone
    return False


def modules_of(error: BaseException) -> set[str | None]:
    """Name our modules on the way to an error, below this package."""
    return {_module(frame) for frame in _frames(error)}


def in_short(error: BaseException) -> str:
    """Return an exception's type and message; if a data worker failed, those of the worker."""
    text = f"{type(error).__name__}: {error}"
    if not text.partition(": ")[2].startswith("Caught "):
        return text
    return [line for line in text.splitlines() if line and not NOTE.fullmatch(line)][-1]


def place_of(error: BaseException) -> str:
    """Name the failed activity, with its layer or parameter, as far as the traceback shows it."""
    part = part_of(error)
    name = "" if part.name == FailedPart.name else part.name
    layer = part.layer or _worked_on(_frames(error))
    return " at ".join(filter(None, (name, layer))) or "before the first step"


def _worked_on(frames: Sequence[FrameType]) -> str:
    """Name the layer or parameter in the innermost function that has one."""
    names = _names(frames)
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if id(value) in names:
                return names[id(value)]
    return ""


def _names(frames: Sequence[FrameType]) -> dict[int, str]:
    """Name layers and parameters of the largest model that some functions work on, by identity."""
    values = [value for frame in frames for value in frame.f_locals.values()]
    # A strategy has its model as an attribute.
    values += [v for f in frames for v in getattr(_receiver(f), "__dict__", {}).values()]
    models = [value for value in values if isinstance(value, nn.Module)]
    model = max(models, key=lambda one: sum(1 for _ in one.modules()), default=nn.Module())
    names = {}
    for name, part in (*model.named_modules(), *model.named_parameters()):
        # Leave out the names of torch's wrappers around the model.
        if plain := re.sub(r"^((module|_orig_mod)(\.|$))+", "", name):
            kind = f" ({type(part).__name__})" if isinstance(part, nn.Module) else ""
            names[id(part)] = f"{'layer' if kind else 'parameter'} {plain!r}{kind}"
    return names


def _layer(frames: Sequence[FrameType]) -> tuple[str, FrameType] | None:
    """Name the layer with the failed forward pass, and return its frame."""
    for frame in reversed(frames):
        layer = _receiver(frame)
        if isinstance(layer, nn.Module) and frame.f_code.co_name == "forward":
            return _names(frames).get(id(layer), type(layer).__name__), frame
    return None


def _moment(frames: Sequence[FrameType], progress: TrainingProgress | None) -> str:
    modules = {_module(frame) for frame in frames}
    if "inference.session" in modules:
        moments = {"model.evaluation": "in the evaluation", "inference.rows": "in the prediction"}
        return next(
            (text for name, text in moments.items() if name in modules), "before the first sample"
        )
    running = any(_module(f) == "loop" and f.f_code.co_name == "run" for f in frames)
    if progress is None or not running:
        return "before the first step"
    if "model.evaluation" in modules:
        return f"in the evaluation after step {progress.step}"
    # Each trainer of a parameter server has its own step.
    ticket = next((f.f_locals["ticket"] for f in frames if "ticket" in f.f_locals), None)
    return f"at step {getattr(ticket, 'update', progress.step) + 1} of {progress.steps}"


def _batch(frames: Sequence[FrameType]) -> Batch | None:
    """Find the batch in the innermost of our frames that has one; the first of micro-batches."""
    for frame in reversed(frames):
        if _module(frame) is not None:
            for value in frame.f_locals.values():
                first = value[0] if isinstance(value, list) and value else value
                if isinstance(first, Batch):
                    return first
    return None


def _given(what: str, frame: FrameType) -> str:
    names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
    shapes = [described(name, frame.f_locals.get(name)) for name in names]
    shapes = [shape for shape in shapes if shape]
    return f"{what} was given {', '.join(shapes)}" if shapes else ""


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _module(frame: FrameType) -> str | None:
    """Return the name of our module relative to this package: a wheel renames the package."""
    package, _, name = str(frame.f_globals.get("__name__", "")).partition(".")
    return name if package == _PACKAGE else None


def _receiver(frame: FrameType) -> object:
    """Return a method's `self`."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
