"""Detect a model or a loss that mixes the samples of a batch.

With such a model, a batch cut by ranks or by micro-batches trains something else than one process
with the whole batch. The plain model runs on some samples, then on each of two parts of these: the
outputs of the parts must equal those of the whole, and the losses of the parts must add up.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..cli.compatibility import ACCEPTED
from ..data.order import Batch
from ..model.recomputation import left_alone
from ..model.trees import mapped, tensors_of
from ..parallel.base import summed_loss
from ..tasks.base import Task, item_count
from .control_flow import Read, by_the_batch, reads

BATCH_NORM, LAYER, LOSS = ACCEPTED
MEAN = "mean"
SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A layer or a loss with a value that depends on the cut of the batch."""

    kind: str
    """A kind that `--accept` takes, or `mean`."""
    text: str
    """The observation, with the name of the layer and the sizes."""


class Snapshot:
    """A model's parameters and buffers, to restore after a pass: the tensors and their values."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = [
            (table, name, tensor, tensor.detach().clone())
            for module in model.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore all parameters and buffers, and drop gradients."""
        for table, name, tensor, value in self._tensors:
            table[name] = tensor  # type: ignore[assignment]  # each in its own table
            tensor.copy_(value)
            tensor.grad = None


def mixtures(
    task: Task, model: nn.Module, samples: Batch, *, synchronised: bool, tolerance: float
) -> list[Mixture]:
    """List the mixtures of samples; `model` is in training mode, and stays unchanged.

    Args:
        task: the task with the loss.
        model: the plain model.
        samples: a batch of `SAMPLES` samples.
        synchronised: whether BatchNorm layers normalise over all parts of a batch.
        tolerance: the limit of rounding, relative to the largest value.
    """
    found = []
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if norms and not synchronised:
        name, layer = norms[0]
        more = f" and {len(norms) - 1} more" if norms[1:] else ""
        found.append(
            Mixture(
                kind=BATCH_NORM,
                text=f"layer {name!r} ({type(layer).__name__}){more} normalises over the samples "
                "of one pass",
            )
        )
    try:
        # With running statistics, only other layers mix samples.
        for _, layer in norms:
            layer.eval()
        found += _others(task, model, samples, tolerance)
    finally:
        for _, layer in norms:
            layer.train()
    return found


@dataclass(frozen=True, kw_only=True)
class _Pass:
    loss: Tensor
    outputs: list[Tensor]
    calls: list[tuple[str, nn.Module, list[Tensor], list[Tensor]]]
    reads: list[Read]
    reads_of_loss: list[Read]
    count: int
    size: int


def _run(
    task: Task,
    model: nn.Module,
    batch: Batch,
    answers: Mapping[int, Any] | None = None,
    answers_of_loss: Mapping[int, Any] | None = None,
) -> _Pass:
    calls: list[tuple[str, nn.Module, list[Tensor], list[Tensor]]] = []
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = [t.detach().clone() for t in tensors_of((args, kwargs))]
        calls.append(
            (names[module], module, given, [t.detach().clone() for t in tensors_of(output)])
        )

    handles = [m.register_forward_hook(note, with_kwargs=True) for m in names]
    before, attributes = Snapshot(model), ExitStack()
    for module in names:
        # Such as a count of passes.
        attributes.enter_context(left_alone(module))
    try:
        with reads(model, answers) as of_model:
            outputs = model(batch.inputs)
        with reads(model, answers_of_loss) as of_loss:
            loss = summed_loss(task, outputs, batch.targets)
        kept = mapped(lambda t: t.detach() if isinstance(t, Tensor) else t, outputs)
        return _Pass(
            loss=loss.detach().double(),
            outputs=tensors_of(kept),
            calls=calls,
            reads=of_model,
            reads_of_loss=of_loss,
            count=item_count(task, batch.targets),
            size=len(batch),
        )
    finally:
        for handle in handles:
            handle.remove()
        before.put_back()
        attributes.close()


def _others(task: Task, model: nn.Module, samples: Batch, tolerance: float) -> list[Mixture]:
    whole = _run(task, model, samples)
    found: dict[str, Mixture] = {}
    # Two cuts: a capacity per batch, for example, may give the same result for some sizes.
    for cut in (len(samples) // 4, len(samples) - 3):
        for mixture in _apart(task, model, samples, whole, cut, tolerance):
            found.setdefault(mixture.kind, mixture)
    return list(found.values())


def _apart(
    task: Task, model: nn.Module, samples: Batch, whole: _Pass, cut: int, tolerance: float
) -> list[Mixture]:
    size = len(samples)
    parts = [_run(task, model, samples.part(0, cut)), _run(task, model, samples.part(cut, size))]
    pairs = _Pairs(whole, parts, tolerance)
    if pairs.differ(whole.outputs, [part.outputs for part in parts]):
        layer = _mixing_layer(whole, parts, pairs)
        text = f"{layer} gives other outputs for a sample with other samples beside it"
        return [Mixture(kind=LAYER, text=text)]
    asked = _Asked(task, model, samples, whole, tolerance)
    if text := asked.branch_of_model(parts):
        return [Mixture(kind=LAYER, text=text)]
    total = parts[0].loss + parts[1].loss
    scale = max(one.loss.abs().item() for one in (whole, *parts))

    def near(a: Tensor, b: Tensor, times: float = 1.0) -> bool:
        # A NaN loss counts as near: it shows no difference.
        return not bool((a - b).abs() > 10 * tolerance * max(scale, 1e-6) * times)

    if near(whole.loss, total):
        text = asked.branch_of_loss(parts)
        return [Mixture(kind=LOSS, text=text)] if text else []
    numbers = (
        f"loss() gave {whole.loss.item():.6g} for {size} samples, and {parts[0].loss.item():.6g} "
        f"and {parts[1].loss.item():.6g} for {cut} and {size - cut} of them"
    )
    weights = {
        "samples": [one.size for one in (whole, *parts)],
        "items that count() counts": [one.count for one in (whole, *parts)],
    }
    for what, (n, *own) in weights.items():
        if near(n * whole.loss, own[0] * parts[0].loss + own[1] * parts[1].loss, n):
            text = f"{numbers}: the mean over the {what}, not the sum"
            return [Mixture(kind=MEAN, text=text)]
    return [Mixture(kind=LOSS, text=f"{numbers}, which do not add up")]


@dataclass(frozen=True)
class _Asked:
    """Tests whether the result of a pass depends on values that Python reads from its batch."""

    task: Task
    model: nn.Module
    samples: Batch
    whole: _Pass
    tolerance: float

    def branch_of_model(self, parts: Sequence[_Pass]) -> str:
        """Describe the line of a forward() that branches on its batch; '' if none does."""

        def outputs(answers: Mapping[int, Any]) -> Sequence[Tensor]:
            return _run(self.task, self.model, self.samples, answers).outputs

        whole = self.whole
        if read := self._branch(
            whole.reads, [part.reads for part in parts], outputs, whole.outputs
        ):
            name = f"module {read.module!r}" if read.module else "the model"
            return self._text(f"the forward() of {name}", read)
        return self._mixed_alone() if whole.reads else ""

    def branch_of_loss(self, parts: Sequence[_Pass]) -> str:
        """Describe the line of loss() that branches on its batch; '' if none does."""

        def loss(answers: Mapping[int, Any]) -> Sequence[Tensor]:
            return [_run(self.task, self.model, self.samples, None, answers).loss]

        whole = self.whole
        of_parts = [part.reads_of_loss for part in parts]
        read = self._branch(whole.reads_of_loss, of_parts, loss, [whole.loss])
        return self._text("loss()", read) if read else ""

    def _branch(
        self,
        whole: Sequence[Read],
        parts: Sequence[Sequence[Read]],
        result: Callable[[Mapping[int, Any]], Sequence[Tensor]],
        expected: Sequence[Tensor],
    ) -> Read | None:
        """Return a read that may differ in a part, and changes the result if it does."""
        for place in by_the_batch(whole, parts):
            for answer in whole[place].answers:
                # A failure, such as of an assertion, trains nothing else.
                with suppress(Exception):
                    if not self._same(expected, result({place: answer})):
                        return whole[place]
        return None

    def _mixed_alone(self) -> str:
        """Describe the layer that gives a sample alone other outputs; '' if there is none.

        Larger parts of a batch may all take the same branch.
        """
        alone: list[_Pass] = []
        # Some models reject a batch of one sample.
        with suppress(Exception):
            for number in range(len(self.samples)):
                sample = self.samples.part(number, number + 1)
                alone.append(_run(self.task, self.model, sample))
        pairs = _Pairs(self.whole, alone, self.tolerance)
        whole = len(alone) == len(self.samples)
        if not whole or not pairs.differ(self.whole.outputs, [one.outputs for one in alone]):
            return ""
        layer = _mixing_layer(self.whole, alone, pairs)
        return f"{layer} gives other outputs for a sample with other samples beside it"

    def _same(self, ours: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        return len(ours) == len(others) and all(
            one.shape == other.shape
            and not bool(((one - other).abs() > self.tolerance * _largest(one)).any())
            for one, other in zip(ours, others, strict=True)
            if one.is_floating_point() or one.is_complex()
        )

    @staticmethod
    def _text(where: str, read: Read) -> str:
        value = f"{read.value:.3g}" if isinstance(read.value, float) else str(read.value)
        return (
            f"{where} branches on a value of its batch ({read.line}, where Python reads {value}), "
            "as `if hidden.sum() > 0` does: a part of the batch may take another branch"
        )


@dataclass(frozen=True)
class _Pairs:
    """Compares tensors of the whole batch with those of its parts."""

    whole: _Pass
    parts: Sequence[_Pass]
    tolerance: float

    def differ(self, of_whole: Sequence[Tensor], of_parts: Sequence[Sequence[Tensor]]) -> bool:
        """Whether the rows of some tensor differ between the whole batch and its parts."""
        return any(
            self._rows_differ(tensor, [own[place] for own in of_parts])
            for place, tensor in enumerate(of_whole)
            if all(place < len(own) for own in of_parts)
        )

    def _rows_differ(self, whole: Tensor, parts: Sequence[Tensor]) -> bool:
        """Whether rows differ; a tensor without a sample dimension has no rows."""
        if not (whole.is_floating_point() or whole.is_complex()):
            return False
        if any(part.dim() != whole.dim() for part in parts):
            return False
        first = self.parts[0]
        for dim in range(whole.dim()):
            lengths = [part.shape[dim] for part in parts]
            # A dimension of samples, or of a fixed number of items per sample.
            if sum(lengths) != whole.shape[dim]:
                continue
            if lengths[0] * self.whole.size != whole.shape[dim] * first.size:
                continue
            if any(_beside(part, dim) != _beside(whole, dim) for part in parts):
                continue
            apart = (whole - torch.cat(list(parts), dim)).abs()
            return bool((apart > self.tolerance * _largest(whole)).any())
        return False


def _largest(tensor: Tensor) -> float:
    return max(tensor.abs().max().item() if tensor.numel() else 0.0, 1e-30)


def _beside(tensor: Tensor, dim: int) -> list[int]:
    return [size for place, size in enumerate(tensor.shape) if place != dim]


def _mixing_layer(whole: _Pass, parts: Sequence[_Pass], pairs: _Pairs) -> str:
    """Name the first module, by the end of its forward(), that mixes samples."""
    order = [name for name, *_ in whole.calls]
    changed: set[str] = set()
    for place, (name, module, given, gave) in enumerate(whole.calls):
        same = [part.calls[place] for part in parts if place < len(part.calls)]
        if len(same) < len(parts) or any(one[0] != name for one in same):
            break
        if pairs.differ(given, [one[2] for one in same]):
            changed.add(name)
        elif pairs.differ(gave, [one[3] for one in same]):
            # Inner modules end before the module around them.
            inside = [one for one in order if one.startswith(f"{name}." if name else "")]
            if first := next((one for one in order if one in changed and one in inside), None):
                around = f"module {name!r}" if name else "the model"
                return f"the forward() of {around}, before {first!r},"
            return f"layer {name!r} ({type(module).__name__})" if name else "the model's forward()"
    return "the model's forward()"
