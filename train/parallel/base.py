"""The interface of a strategy to the training loop, and the parts that most strategies share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from ..data.order import seed_generators, seed_of
from ..errors import UsageError
from ..model import compilation, sparse
from ..model.modes import Modes, settle
from ..model.prepare import prepare
from ..model.recomputation import plain_attributes
from ..model.trees import Tree, mapped, tensors_of
from ..tasks.base import item_count, model_of, modules_on
from .checksum import checksums
from .consistency import Inventory, check_alike, check_unchanged, differing, named_tensors, some_of
from .replacement import Originals, note_made
from .writes import Writes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

    from ..cli.config import Config
    from ..data.order import Batch
    from ..model.optimizer import NamedOptimizer
    from ..runtime.process_group import RankGroup
    from ..tasks.base import Task
    from .fsdp import GradientSync
    from .layout import Layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The components of a strategy."""

    task: "Task"
    """Model, loss, and how the model may be cut."""
    config: "Config"
    """The command line."""
    layout: "Layout"
    """How the ranks are arranged."""
    group: "RankGroup"
    """The ranks."""

    def model(self, device: torch.device | None = None) -> nn.Module:
        """Make the task's model; its initial weights depend on the seed alone.

        On the device `meta`, torch allocates no memory, and weights have no values yet.
        """
        seed_generators(seed_of("model", self.config.seed), self.group.device)
        torch.manual_seed(self.config.seed)
        with modules_on(device or torch.device("cpu")):
            model = self._made(device)
        if device is None:
            model = model.to(self.group.device)
        model = prepare(model, self.task, self.config, device=self.group.device)
        note_made(model)
        return model

    def sketch(self, device: torch.device) -> nn.Module:
        """Make a second model for inspection; a task that stores its model keeps the first."""
        return replace(self, task=copy(self.task)).model(device)

    def _made(self, device: torch.device | None) -> nn.Module:
        try:
            return model_of(self.task)
        except (RuntimeError, NotImplementedError) as error:
            if device is None or device.type != "meta" or not self.config.meta_init:
                raise
            raise UsageError(
                f"--meta-init: model() of task {self.task.name!r} needs the numbers of its weights "
                f"({str(error).splitlines()[0]}), which there are none of on the device meta; "
                "leave out --meta-init"
            ) from error

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of `--precision`; for fp32 it has no effect."""
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.group.device.type, DTYPES[self.config.precision])


@dataclass(frozen=True, kw_only=True)
class Sums:
    """One rank's contribution to a step; zeros if another rank reports the same items."""

    loss: Tensor
    """Summed loss. Scalar, detached."""
    count: int
    """Items in the sum."""


@dataclass(frozen=True, kw_only=True)
class Tally(Sums):
    """One rank's contribution to an evaluation."""

    score: Tensor
    """The task's sums, such as the correct predictions. Shape [n], see `Task.score()`."""


class Strategy(ABC):
    """How a step's work is shared between processes.

    The strategy owns the model; the loop builds the optimizer from `named_parameters()`, after
    the strategy has wrapped or sharded the model, never before.
    """

    shard: int
    """Which slice of the global batch this rank works on."""
    shards: int
    """How many slices there are; fewer than ranks when some share one (tensor parallel)."""
    axes: tuple[int, ...]
    """Coordinates that seed random numbers; ranks that must draw the same numbers share them."""
    norm_device: torch.device
    """The device that computes sums over ranks."""
    gradient_sync: "GradientSync | None" = None
    """When gradients are reduced, if parameters are sharded."""
    stage_group: "ProcessGroup | None" = None
    """The ranks of this rank's pipeline, which hold different parameters."""
    writes: Writes | None = None
    """Records the parameters that passes write; `None` before `bind()`, or if not needed."""
    _without_gradient: frozenset[str] = frozenset()
    unevenly_trained: bool = False
    """Whether, in this step, some parameter has a gradient on some ranks but not on all."""

    def __init__(self, parts: Parts, model: nn.Module) -> None:
        self.parts, self.task = parts, parts.task
        # Before the strategy cuts it.
        self._given, self._originals = Inventory.of([model]), Originals(model)
        self.evaluating = settle(model)
        """Layers that only evaluate, as the task has set them."""
        self.sparse_layers = list(sparse.layers(model))
        self.shard = parts.layout.shard(parts.group.rank_info.rank)
        self.shards = parts.layout.shards
        self.axes = (self.shard,)
        self.norm_device = parts.group.device

    @abstractmethod
    def modules(self) -> Sequence[nn.Module]:
        """Return the model, or this rank's stages of it."""

    def verify(self) -> None:
        """Compare this rank's model with the model that was given to the strategy.

        Raises:
            UsageError: names the lost or changed part.
        """
        config, group, layout = self.parts.config, self.parts.group, self.parts.layout
        how = f"--strategy {config.strategy_on(group.rank_info)} ({layout})"
        check_alike(self._given, group, task=self.task.name)
        made = Inventory.of(self.modules())
        check_unchanged(self._given, made, how=how, whole=layout.pp == 1)
        # Ranks of a pipeline hold different stages, so problems may differ from rank to rank.
        own = self._originals.problem(self.modules(), hooks=not config.infers)
        if problem := next(filter(None, group.gather(own)), ""):
            raise UsageError(f"{how}: task {self.task.name!r}: {problem}")

    def describe(self) -> str:
        """Describe the placement of the model, or an automatic choice; '' if there is none."""
        return str(self.gradient_sync or "")

    def report(self) -> str:
        """Return a summary for the end of the run; '' if there is none."""
        return ""

    @abstractmethod
    def micro_batches(self) -> int:
        """Count the micro-batches that `accumulate()` expects on every rank."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under the plain model's names; DTensors where sharded."""

    def counted_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank adds to sums over all parameters of the model."""
        return self.named_parameters()

    def bind(self, optimizer: "NamedOptimizer") -> None:
        """Store the optimizer, which was built from `named_parameters()`."""
        self._optimizer = optimizer
        self.writes = Writes(dict(self.named_parameters()), self.norm_device)

    def warm_up(self, batch: "Batch") -> None:
        """Do first-pass checks and setup ahead of the first step; the model stays unchanged."""

    def begin_step(self, step: int) -> None:
        """Prepare for the optimizer's step number `step`, counted from 1."""

    @abstractmethod
    def accumulate(self, micro_batches: "Sequence[Batch]", factor: float = 1.0) -> Sums:
        """Add the gradients of `factor` times the summed loss."""

    def without_gradient(self) -> frozenset[str]:
        """Name the parameters without a gradient from this rank's data in this step.

        Lists only parameters that may have a gradient on other ranks: this rank then sends zeros,
        or ranks average the parameter's values.
        """
        return self._without_gradient

    def has_written(self) -> bool:
        """Whether a pass has written a parameter in this step or since the previous one."""
        return self.writes is not None and self.writes.any()

    def written(self) -> list[str]:
        """Name the parameters that passes have written."""
        return [] if self.writes is None else self.writes.names()

    def lost_write(self, names: Sequence[str]) -> str:
        """Describe why this strategy would lose the writes of passes; '' if it keeps them."""
        if self.writes is not None and (unequal := self.writes.unequal.intersection(names)):
            return (
                f"{some_of(unequal)}, once in each of the step's passes, each time to other values"
            )
        return ""

    def unlike(self, names: Sequence[str]) -> list[str]:
        """Name the parameters that differ between ranks; all ranks call this.

        Sharded parameters are skipped: each rank has a different part.
        """
        group = self.parts.group
        own = {n: p for n, p in self.named_parameters() if n in names and not is_sharded(p)}
        sums = checksums(own.values(), self.norm_device).tolist()
        return differing(dict(zip(own, map(str, sums), strict=True)), group)

    def scale_gradients(self, factor: float) -> None:
        """Scale gradients to those of `factor` times the loss summed over all ranks."""
        scale(self.named_parameters(), factor)

    def agree_on_norm(self, norm: float) -> float:
        """Return a gradient norm that is equal on all ranks; in most strategies, `norm` is."""
        return norm

    def after_step(self, step: int) -> None:
        """Do what follows the optimizer's step number `step`, counted from 1."""

    def finish(self) -> None:
        """Do what must be done after the last step of the run."""

    def settled(self, step: int) -> bool:
        """Whether all ranks hold the same model after this step, so that it can be saved."""
        return True

    @abstractmethod
    def evaluate(self, batch: "Batch") -> Tally:
        """Compute loss and score of a batch without gradients."""

    @abstractmethod
    def predict(self, batch: "Batch") -> Tree | None:
        """Run the model without gradients, and return its outputs for the whole batch.

        One of the ranks that share a batch returns the outputs; the others return None.
        """

    def model_state(self) -> dict[str, Tensor]:
        """Return this rank's part of the model, parameters and buffers, under the plain names."""
        return {
            name: tensor
            for module in self.modules()
            for name, tensor in module.state_dict().items()
        }

    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Load tensors that are sharded like those of `model_state()`."""
        for module in self.modules():
            # load_state_dict() names all missing tensors.
            own = {name: state[name] for name in module.state_dict() if name in state}
            module.load_state_dict(own)


class WholeModel(Strategy):
    """A strategy in which every rank holds one module that can run a batch by itself."""

    several_passes = False
    """Whether a step takes more than one pass on a rank."""

    def __init__(self, parts: Parts, model: nn.Module) -> None:
        super().__init__(parts, model)
        self.model, self.modes = model, Modes([model])
        # The module for training passes; it may wrap the model.
        self.run: nn.Module = model

    def modules(self) -> Sequence[nn.Module]:
        """Return the model."""
        return [self.model]

    def bind(self, optimizer: "NamedOptimizer") -> None:
        """Store the optimizer."""
        super().bind(optimizer)
        self.several_passes = self.passes() > 1
        if self.parts.layout.world_size == 1 and not self.several_passes:
            # The only pass of a step in one process loses no write.
            self.writes = None

    def start_training(self) -> None:
        """Switch from evaluation mode to training mode, if needed."""
        self.modes.train()

    def passes(self) -> int:
        """Count this rank's passes in a step."""
        return self.micro_batches()

    def micro_batches(self) -> int:
        """Count the micro-batches of the largest slice: all ranks exchange equally often."""
        return self.parts.config.micro_batches(self.shards)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's parameters."""
        return self.model.named_parameters()

    def accumulate(self, micro_batches: "Sequence[Batch]", factor: float = 1.0) -> Sums:
        """Add the gradients of the summed loss, micro-batch by micro-batch."""
        self.start_training()
        return self.total([self.backward(batch, factor) for batch in micro_batches])

    def loss_reads(self) -> AbstractContextManager[object]:
        """Refuse a loss that reads sharded weights; only the first loss is checked."""
        return nullcontext()

    def own_part(self, batch: "Batch") -> "Batch":
        """Return this rank's part of a batch, on the devices that the model expects."""
        return batch

    def backward(self, batch: "Batch", factor: float) -> Sums:
        """Run the forward and backward pass of one micro-batch."""
        batch = self.own_part(batch)
        with self.parts.autocast():
            outputs = self.run(batch.inputs)
            with self.loss_reads():
                loss = summed_loss(self.task, outputs, batch.targets)
        if is_sharded(loss):
            torch.autograd.backward(loss * factor)
        else:
            # As the initial gradient, the factor needs no multiplication in the graph.
            torch.autograd.backward(loss, torch.full_like(loss, factor))
        if self.parts.config.compile:
            compilation.check_compiled(self.task)
        if self.several_passes and self.writes is not None:
            self.writes.note_pass()
        return Sums(loss=loss.detach(), count=item_count(self.task, batch.targets))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo the effects of a pass: drop its gradients and restore all values that it changed.

        Restores parameters, all buffers (saved or not), and the Python attributes of modules.
        """
        tensors = [(t, t.detach().clone()) for t in named_tensors(self.model).values()]
        buffers = [(module._buffers, dict(module._buffers)) for module in self.model.modules()]
        plain = [(vars(module), plain_attributes(module)) for module in self.model.modules()]
        yield
        self.model.zero_grad(set_to_none=True)
        for (own, given), (attributes, values) in zip(buffers, plain, strict=True):
            own.update(given)
            attributes.update(values)
        with torch.no_grad():
            for tensor, before in tensors:
                tensor.copy_(before)

    @staticmethod
    def total(sums: Sequence[Sums]) -> Sums:
        """Add up micro-batches."""
        if len(sums) == 1:
            return sums[0]
        loss = torch.stack([one.loss for one in sums]).sum()
        return Sums(loss=loss, count=sum(one.count for one in sums))

    def evaluate(self, batch: "Batch") -> Tally:
        """Compute loss and score of a batch without gradients."""
        batch = self.own_part(batch)
        outputs = self.outputs(batch.inputs)
        with torch.no_grad(), self.parts.autocast():
            return tally(self.task, outputs, batch.targets)

    def predict(self, batch: "Batch") -> Tree | None:
        """Run the model without gradients, and return its outputs."""
        return mapped(full, self.outputs(self.own_part(batch).inputs))

    def outputs(self, inputs: Tree) -> Tree:
        """Run the model without gradients."""
        self.modes.evaluate()
        with torch.no_grad(), self.parts.autocast():
            return self.model(inputs)


def one_number(loss: Tensor, task: "Task") -> Tensor:
    """Require a loss of one number.

    Raises:
        UsageError: the loss has one number per item, or is not a tensor.
    """
    tensor = isinstance(loss, Tensor)
    if tensor and loss.dim() == 0:
        return loss
    given = f"a tensor of shape {list(loss.shape)}" if tensor else type(loss).__name__
    raise UsageError(
        f"task {task.name!r}: loss() gave {given}; it must be a tensor of one number, the sum over "
        'the items of the batch (reduction="sum")'
    )


def summed_loss(task: "Task", outputs: Tree, targets: Tree) -> Tensor:
    """Compute the loss of a batch, summed over its items, even if the task's loss is a mean.

    Raises:
        UsageError: the loss is not a tensor of one number, or `reduction` is unknown.
    """
    if task.reduction == "sum":
        return one_number(task.loss(outputs, targets), task)
    if task.reduction != "mean":
        raise UsageError(
            f'task {task.name!r}: reduction = {task.reduction!r}; it must be "sum" or "mean"'
        )
    if count := item_count(task, targets):
        return one_number(task.loss(outputs, targets), task) * count
    # A rank may have no items, and the mean of no items is NaN.
    return torch.stack([tensor.sum() for tensor in tensors_of(outputs)]).sum() * 0.0


def tally(task: "Task", outputs: Tree, targets: Tree) -> Tally:
    """Compute loss and score of a batch's outputs."""
    return Tally(
        # Each rank may have only its share of the loss.
        loss=full(summed_loss(task, outputs, targets)),
        # Each rank may have only its share of the classes; a prediction needs all of them.
        score=task.score(mapped(full, outputs), targets),
        count=item_count(task, targets),
    )


def scale(parameters: Iterable[tuple[str, nn.Parameter]], factor: float) -> None:
    """Multiply gradients in place; of a sharded gradient, each rank multiplies its part."""
    if factor == 1.0:
        return
    gradients = [local(p.grad) for _, p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or a plain tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; all of its ranks call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def copy_part(whole: Tensor, own: Tensor) -> None:
    """Copy this rank's part of a whole tensor in place."""
    if is_sharded(own):
        (box,) = own.__create_chunk_list__()  # type: ignore[no-untyped-call]
        whole = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
    with torch.no_grad():
        local(own).copy_(whole)


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor; avoids the import, which few strategies need."""
    return hasattr(tensor, "device_mesh")
