"""The task interface: a model, data and a loss; everything else has a default."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from ..data.order import Batch, Samples, targets_of
from ..errors import UsageError
from ..model.trees import Tree, named, sample_count, tensors_of

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


_CONTAINERS = (Tensor, list, tuple, dict)


class Task(ABC):
    """A training task; yours needs `model()`, `train()`, `test()` and `loss()`.

    Every rank makes the task once and must get the same data: draw synthetic data, and a random
    split of the data, from a generator with a fixed seed.
    """

    name: str = ""
    """Name in messages; an empty one becomes the value of `--task`."""
    reduction: Literal["sum", "mean"] = "sum"
    """What `loss()` returns: the sum over a batch, or the mean over its `count()` items."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Make the model; its initial weights come from torch's global generator."""

    @abstractmethod
    def train(self) -> Batch | Samples:
        """Return all training samples: tensors in a `Batch`, or a Dataset of (input, target).

        Inputs and targets may be dicts, lists, tuples or NamedTuples of tensors, also nested. The
        model is called with all inputs as its only argument.
        """

    @abstractmethod
    def test(self) -> Batch | Samples:
        """Return all test samples."""

    @abstractmethod
    def loss(self, outputs: Tree, targets: Tree) -> Tensor:
        """Sum the loss over the items of a batch. Scalar.

        Return a *sum*, not a mean: the loop divides by the `count()` of the whole global batch, so
        that gradients do not depend on ranks, micro-batches or padding. A mean over these items
        works as well if the task declares `reduction = "mean"`.

        Args:
            outputs: the model's output: a tensor, or a tree of tensors.
            targets: the targets from `train()`.
        """

    def count(self, targets: Tree) -> int:
        """Count the items that `loss()` sums over; by default one per sample."""
        return sample_count(targets)

    def score(self, outputs: Tree, targets: Tree) -> Tensor:
        """Sum the inputs of `metrics()` over the items of a batch. Shape [n]; by default empty."""
        return torch.zeros(0, device=tensors_of(targets)[0].device)

    def metrics(self, score: Tensor, count: int) -> Mapping[str, float]:
        """Turn the sums over all items, float64 on the CPU, into named metrics."""
        return {}

    def predictions(self, outputs: Tree, targets: Tree) -> Mapping[str, object]:
        """Return what `--predict` writes about each sample of a batch, by name.

        A value is a tensor [samples, ...], a tree of such tensors, or a list with one entry per
        sample, such as a text. The default is the unchanged outputs and targets.

        Args:
            outputs: the model's output for a whole batch, on the model's device.
            targets: the targets from `test()`, on the same device.
        """
        return {"prediction": outputs, "target": targets}

    def identity(self) -> Mapping[str, str | int]:
        """Return the values that tell runs of this task apart, so that none continues another.

        The default is the numbers of training samples and of model parameters. It excludes the
        digest of the task's file, as a corrected comment must not prevent a resume. If your task
        changes in more than sizes, add an entry here, such as `{"version": 2}`.
        """
        parameters = sum(parameter.numel() for parameter in sketch_of(self).parameters())
        return {"train_samples": len(self.train()), "parameters": parameters}

    def pieces(self, model: nn.Module) -> Sequence[str]:
        """Name the submodules that, one after the other, make up the model's forward pass.

        Pipeline stages, sharding and activation checkpointing split the model into these pieces. By
        default they are the children of an `nn.Sequential`; any other model is one piece, ''.
        """
        if isinstance(model, nn.Sequential):
            # Not named_children(), which skips the second occurrence of a layer.
            return list(model._modules)
        return [""]

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> "Mapping[str, ParallelStyle]":
        """Return how each submodule's matrices are sharded over `ranks` ranks (tensor parallel).

        With `loss_parallel` the outputs should stay a DTensor sharded by class, if that is safe
        (see `classes_can_be_sharded()`).

        Raises:
            UsageError: the task has no plan, or so many ranks cannot share a size.
        """
        raise UsageError(
            f"task '{self.name}' does not say how its matrices can be shared between ranks: "
            "give it a tensor_plan() (docs/how-to/own-task.md), or leave out --tp"
        )

    def weights(self) -> Tensor:
        """Return each training sample's weight under `--sampling balanced`. Shape [samples]."""
        raise UsageError(
            f"task '{self.name}' does not say what to balance: give it weights(), or leave out "
            "--sampling balanced"
        )


@contextmanager
def modules_on(device: torch.device) -> Iterator[None]:
    """Make new modules on a device; on `meta` they take no memory.

    A task may load weights from a file into its model. On `meta`, torch would warn for each tensor
    that loading does nothing, as if no weights were loaded at all.
    """
    with device, warnings.catch_warnings():
        if device.type == "meta":
            warnings.filterwarnings("ignore", message=".*is a no-op")
        yield


def model_of(task: Task) -> nn.Module:
    """Make a task's model.

    Raises:
        UsageError: `model()` returned something else, or a layer has no shape before its first use.
    """
    model = task.model()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"task {task.name!r}: model() gave {type(model).__name__}, "
            "which is not a torch.nn.Module"
        )
    for name, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(is_lazy(tensor) for tensor in own):
            raise UsageError(
                f"task {task.name!r}: layer {name!r} of its model is a {type(module).__name__} "
                "without shape: sharding, checkpoints and the optimizer need one; give the layer "
                "its sizes, or pass a sample through the model in model()"
            )
    return model


def held_by(task: Task) -> Iterator[tuple[str, Tensor]]:
    """Name the tensors that a task itself holds, including those in modules, lists and dicts."""
    for attribute, value in vars(task).items():
        if isinstance(value, nn.Module):
            yield from ((f"{attribute}.{name}", p) for name, p in value.named_parameters())
        else:
            leaves = named(attribute, value) if isinstance(value, _CONTAINERS) else []
            yield from ((name, leaf) for name, leaf in leaves if isinstance(leaf, Tensor))


def sketch_of(task: Task) -> nn.Module:
    """Make a task's model on the meta device, without memory for its weights, if possible."""
    # The model uses operations that meta tensors do not support.
    with suppress(Exception), modules_on(torch.device("meta")):
        return model_of(task)
    return model_of(task)


def item_count(task: Task, targets: Tree) -> int:
    """Count the items that the task's `loss()` sums over.

    Raises:
        UsageError: `count()` returned something else than a whole number.
    """
    count = task.count(targets)
    if type(count) is int:
        return count
    # Such as the sum of a mask.
    try:
        whole = int(count)
        if whole == float(count):
            return whole
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError(
        f"task {task.name!r}: count() gave {count!r}; it must be the number of items of the batch "
        "that loss() sums over"
    )


class Classifier(Task):
    """A task with scores [..., classes] as outputs and class numbers [...] as targets."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross entropy over all targets, in nats."""
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")

    def count(self, targets: Tensor) -> int:
        """Count the targets."""
        return targets.numel()

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the correct predictions. Scalar."""
        return (outputs.argmax(dim=-1) == targets).sum()

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the correct predictions. Shape [1]."""
        return self.correct(outputs, targets).reshape(1)

    def metrics(self, score: Tensor, count: int) -> Mapping[str, float]:
        """Return the share of correct predictions."""
        return {"accuracy": score[0].item() / count}

    def predictions(self, outputs: Tensor, targets: Tensor) -> Mapping[str, object]:
        """Return the likeliest class, its probability, and the target. Shape of each: [...]."""
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        probability, prediction = wide.softmax(dim=-1).max(dim=-1)
        return {"prediction": prediction, "probability": probability, "target": targets}

    def weights(self) -> Tensor:
        """Give every class the same total weight: each sample's weight is 1 / size of its class."""
        return class_weights(targets_of(self.train()))


class ResidentClassifier(Classifier):
    """A classifier with all samples in memory."""

    def __init__(self, *, train: Batch, test: Batch) -> None:
        self._train, self._test = train, test

    def train(self) -> Batch:
        """Return all training samples."""
        return self._train

    def test(self) -> Batch:
        """Return all test samples."""
        return self._test


class Perceptron(ResidentClassifier):
    """Classifies rows of numbers, [n, features] float, with two hidden layers."""

    features: int
    """Numbers in a row."""
    hidden: int
    """Units of each hidden layer."""
    classes: int
    """Number of classes."""

    def identity(self) -> Mapping[str, str | int]:
        """Return the sizes, which tell runs apart."""
        return {"hidden": self.hidden, "train_samples": len(self._train)}

    def model(self) -> nn.Module:
        """Make the network, [batch, features] to [batch, classes]."""
        return nn.Sequential(
            nn.Linear(self.features, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.classes),
        )

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> "Mapping[str, ParallelStyle]":
        """Shard the first matrix by outputs, the second by inputs, the last by class.

        So the first exchange follows the second matrix: before it, each rank has its own hidden
        units.
        """
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        check_divisible("hidden units", self.hidden, ranks)
        by_class = loss_parallel and classes_can_be_sharded(self.classes, ranks)
        return {
            "0": ColwiseParallel(),
            "2": RowwiseParallel(),
            "4": ColwiseParallel(
                output_layouts=Shard(-1) if by_class else Replicate(),
                use_local_output=not by_class,
            ),
        }


def class_weights(targets: Tensor) -> Tensor:
    """Weight each sample by 1 / size of its class. Shape [samples], float64.

    Raises:
        UsageError: the targets are not one class number per sample.
    """
    whole = not (targets.is_floating_point() or targets.is_complex())
    if targets.dim() != 1 or not whole or (targets < 0).any():
        raise UsageError(
            f"the targets of the training data, {list(targets.shape)} {targets.dtype}, are not one "
            "class number, 0 or more, per sample: define weights() in the task, or leave out "
            "--sampling balanced"
        )
    targets = targets.long()
    return 1.0 / torch.bincount(targets).double()[targets]


def classes_can_be_sharded(classes: int, ranks: int) -> bool:
    """Whether each rank gets at least one class; torch's loss_parallel crashes otherwise."""
    chunk = -(-classes // ranks)
    return (ranks - 1) * chunk < classes


def check_divisible(what: str, size: int, ranks: int) -> None:
    """Refuse a size that tensor parallelism cannot divide evenly.

    Raises:
        UsageError: shows the arithmetic and valid values.
    """
    if size % ranks:
        fitting = [str(n) for n in range(2, size + 1) if size % n == 0]
        raise UsageError(
            f"--tp {ranks} does not divide the {size} {what}: {size} = {size // ranks} x {ranks} + "
            f"{size % ranks}; use --tp {', '.join(fitting[:-1])} or {fitting[-1]}"
        )
