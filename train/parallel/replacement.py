"""Find references to tensors that a strategy has replaced.

Sharding, tensor parallelism and `--meta-init` replace a model's parameters and buffers with other
objects. References to the old objects become stale: a hook never runs again, and a list, a closure
or a view made in `__init__()` keeps the initial weights.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import UsageError
from ..model.trees import tensors_of
from .consistency import named_tensors

if TYPE_CHECKING:
    from .base import Parts

DEEP = 3
"""Nesting depth of containers in the search for the holder of a tensor."""


@dataclass(frozen=True, kw_only=True)
class _Original:
    tensor: "weakref.ref[Tensor]"
    storage: StorageWeakRef | None
    hooked: str


class Originals:
    """Weak references to a model's parameters and buffers before a strategy cuts the model."""

    def __init__(self, model: nn.Module) -> None:
        self._by_name = {
            name: _Original(
                tensor=weakref.ref(tensor), storage=_storage(tensor), hooked=_hook(tensor)
            )
            for name, tensor in named_tensors(model).items()
        }

    def problem(self, modules: Iterable[nn.Module], *, hooks: bool) -> str:
        """Describe a reference to a tensor that `modules` no longer have; '' if there is none.

        `hooks`: the model is trained, so hooks on parameters matter.
        """
        modules = list(modules)
        now = {name: t for module in modules for name, t in named_tensors(module).items()}
        replaced = {
            name: original
            for name, original in self._by_name.items()
            if name in now and original.tensor() is not now[name]
        }
        for name, original in replaced.items():
            if hooks and original.hooked:
                return (
                    f"parameter {name!r} has a hook ({original.hooked}), which would never run: "
                    "the parameter is replaced by a part of it; do the same in forward(), or to "
                    "the loss, or use --strategy ddp"
                )
        # Most models hold no tensor twice, and then need no garbage collection.
        if not _held(replaced, now):
            return ""
        # A replaced forward() makes its module a reference cycle, which only this call frees.
        gc.collect()
        for name, (holds, original) in _held(replaced, now).items():
            place = _holder(modules, original) or (
                "a list, a dict, a closure or a view that was made with the model"
            )
            return (
                f"{place} {holds} {name!r} beside its module, and would keep the initial "
                "values forever, as the tensor is replaced; take it from its module where it is "
                "used (in forward(), `self.layer.weight`), or use --strategy ddp"
            )
        return ""

    def watch_stages(self, stages: Sequence[nn.Module], *, in_parts: bool) -> "Borrowed":
        """Watch for parameters that a rank's stages use but do not hold.

        `in_parts`: the backward pass goes through each stage's graph in two parts, and one part
        finds parameters by the stage's modules.
        """
        # Keep the tensors as well: Python may reuse the id of a freed object.
        alive = {
            id(tensor): (name, tensor)
            for name, original in self._by_name.items()
            if (tensor := original.tensor()) is not None
        }
        return Borrowed(stages, alive, in_parts=in_parts)


class Borrowed(TorchFunctionMode):
    """Inspects the arguments of functions in a forward pass through some stages."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        originals: Mapping[int, tuple[str, Tensor]],
        *,
        in_parts: bool,
    ) -> None:
        super().__init__()
        self._stages, self._originals, self._in_parts = stages, originals, in_parts
        self._own = {id(tensor) for stage in stages for tensor in named_tensors(stage).values()}
        self.problem = ""
        """The first problem found; '' if there is none."""

    def __enter__(self) -> "Borrowed":
        self._handles = [
            stage.register_forward_pre_hook(self._enter_stage)
            for stage in self._stages
            if self._in_parts
        ]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]  # torch's
        for handle in self._handles:
            handle.remove()

    def _enter_stage(self, stage: nn.Module, inputs: object) -> None:
        self._own = {id(tensor) for tensor in named_tensors(stage).values()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_of((args, dict(kwargs or {}))) if not self.problem else ():
            view = tensor._base is not None and id(tensor) not in self._originals
            name, _ = self._originals.get(id(tensor._base) if view else id(tensor), (None, None))
            if name is None:
                continue
            if id(tensor._base if view else tensor) not in self._own:
                self.problem = f"a stage uses {name!r}, which another stage holds"
            elif view and self._in_parts and tensor.grad_fn is not None:
                self.problem = (
                    f"a stage uses a view of {name!r} that was made with the model, "
                    "through which this schedule finds no gradient"
                )
        return func(*args, **(kwargs or {}))


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters of all models that a task has made in this process, with their names."""


def note_made(model: nn.Module) -> None:
    """Remember the parameters of a model that a task has made."""
    for name, parameter in model.named_parameters():
        _made[parameter] = name


class LossReads(TorchFunctionMode):
    """Inspects the arguments of functions in a loss, and refuses weights that are not whole."""

    def __init__(self, modules: Iterable[nn.Module], parts: "Parts") -> None:
        super().__init__()
        named = [each for module in modules for each in module.named_parameters()]
        self._whole = {id(p) for _, p in named if not isinstance(p, DTensor)}
        self._cut = {id(p): name for name, p in named if isinstance(p, DTensor)}
        self._parts = parts
        self.name = ""
        """The first such weight that the loss reads; '' if there is none."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_of((args, dict(kwargs or {}))) if not self.name else ():
            name = self._cut.get(id(tensor), "")
            if not name and id(tensor) not in self._whole and tensor.requires_grad:
                # The tensor may belong to another stage, or to a model made for inspection.
                name = _made.get(tensor, "")  # type: ignore[no-untyped-call]  # torch's
            self.name = self.name or name
        return func(*args, **(kwargs or {}))

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]  # torch's
        if self.name:
            raise UsageError(self.problem()) from failure[1]

    def problem(self) -> str:
        """Describe the problem; '' if there is none."""
        if not self.name:
            return ""
        parts = self._parts
        return (
            f"--strategy {parts.config.strategy_on(parts.group.rank_info)} ({parts.layout}): "
            f"loss() of task {parts.task.name!r} reads parameter {self.name!r} of the model, which "
            "is not whole on this rank: compute the term in forward() and return it with the "
            "outputs, or use --strategy ddp"
        )


def _held(
    replaced: Mapping[str, _Original], now: Mapping[str, Tensor]
) -> dict[str, tuple[str, _Original]]:
    """Find replaced tensors with a remaining reference, to the tensor or to its memory."""
    used = {storage.cdata for tensor in now.values() if (storage := _storage(tensor))}
    held = {}
    for name, original in replaced.items():
        storage = original.storage
        if original.tensor() is not None:
            held[name] = "refers to", original
        elif storage is not None and storage.cdata not in used and not _expired(storage):
            held[name] = "shares the memory of", original
    return held


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Some special tensor types of torch have no storage.
    with suppress(RuntimeError, NotImplementedError):
        return StorageWeakRef(own.untyped_storage())  # type: ignore[no-untyped-call]  # torch's
    return None


def _expired(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]  # torch's


def _hook(tensor: Tensor) -> str:
    """Name the method that registered a hook on a tensor; '' without a hook."""
    if tensor._backward_hooks:
        return "register_hook()"
    accumulated = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return "register_post_accumulate_grad_hook()" if accumulated else ""


def _holder(modules: Sequence[nn.Module], original: _Original) -> str:
    """Name the module attribute that holds a tensor or its memory; '' if there is none."""
    wanted = original.tensor()
    for module in modules:
        for name, owner in module.named_modules():
            for attribute, value in vars(owner).items():
                if attribute in ("_parameters", "_buffers", "_modules"):
                    continue
                for tensor in _tensors_in(value, DEEP):
                    storage = _storage(tensor)
                    same = storage and original.storage and storage.cdata == original.storage.cdata
                    if tensor is wanted or same:
                        place = f"module {name!r}" if name else "the model"
                        return f"attribute {attribute!r} of {place}"
    return ""


def _tensors_in(value: Any, deep: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif deep and isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each, deep - 1)
    elif deep and isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _tensors_in(each, deep - 1)
