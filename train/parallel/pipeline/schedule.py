"""Pipeline parallel: each rank runs one or two stages of the model on its whole share of a batch.

The share is cut into micro-batches that follow each other through the stages, so that all ranks
have work once the first micro-batch reaches the last stage. The schedule decides the order of
forward and backward passes on a rank; torch has seven schedules.

Each stage may also be sharded and tensor parallel. Never wrap a stage in DistributedDataParallel:
three of the schedules bypass the hooks that exchange gradients, and each replica would train alone,
without an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils._pytree import TreeSpec

from ...data.order import Batch
from ...errors import UsageError, is_collateral
from ...model import compilation
from ...model.modes import Modes
from ...model.trees import Tree, form_of, joined, mapped, named, tensors_of, unflattened
from ...tasks.base import item_count
from .. import cp, dropout, fsdp, hybrid, pieces, tp
from ..base import Parts, Strategy, Sums, Tally, full, summed_loss, tally
from ..consistency import some_of
from ..replacement import LossReads
from ..writes import Writes
from . import split, two_passes
from .stages import Relay, SharedParameters, Stage, Untransferable, plan

FEW = 2
"""Samples in a pass before training: batch normalisation rejects a single sample."""
IN_PLACE = "modified by an inplace operation"
"""torch's message about a tensor that has changed since a backward pass was prepared."""


class Pipelined(Strategy):
    """Runs this rank's stages; the last stage's rank knows the loss."""

    def __init__(self, parts: Parts) -> None:
        layout, config, group = parts.layout, parts.config, parts.group
        split.check(config, layout)
        # On the host, so that the device never holds more than this rank's stages.
        model = parts.model(torch.device("meta" if config.meta_init else "cpu"))
        super().__init__(parts, model)
        at = layout.coordinates(group.rank_info.rank)
        self.axes = (self.shard, at["cp"], at["pp"])
        self._plan = plan(model, parts)
        self._owners = split.owners(config.pp_schedule, layout.pp)
        held = split.stages_of(at["pp"], config.pp_schedule, layout.pp)
        self._hooked = [
            name or type(module).__name__
            for name, module in model.named_modules()
            if module._forward_hooks or module._forward_pre_hooks
        ]
        self._stages = {number: Stage(model, self._plan[number], parts) for number in held}
        self._shared = SharedParameters(model, self._plan, self._owners, self._stages, parts)
        mesh = hybrid.build_mesh(parts)
        self.stage_group = mesh.get_group("pp")
        self._units: list[fsdp.Units] = []
        for number, stage in self._stages.items():
            if not config.meta_init:
                stage.to(group.device)
            self._slice, units = hybrid.parallelise(stage, self._plan[number], parts, mesh)
            self._units += [units] if units else []
            if isinstance(stage, FSDPModule):
                # Parameters stay gathered until the step's last backward pass. Otherwise each
                # micro-batch would gather them again. Schedules with a separate pass for weight
                # gradients would even look for other tensors, and silently skip these gradients.
                stage.set_reshard_after_forward(False)
        if config.meta_init:
            hybrid.materialise(self.modules(), parts)
        self._settlement = hybrid.Settlement(self.modules(), mesh, parts)
        self._filled: frozenset[str] = frozenset()
        self._modes = Modes(self.modules())
        self._relay = Relay(self._stages, self._owners, self.stage_group, group.device)
        self._holds_last = len(self._plan) - 1 in self._stages
        if self._holds_last:
            # torch's schedules accept one tensor or several, and no nested structure.
            self._stages[len(self._plan) - 1].register_forward_hook(self._flatten)
        # All ranks of a tensor-parallel group compute the same loss; only the first reports it.
        self._reports = self._holds_last and at["tp"] == 0
        self._predicts = self._reports and at["cp"] == 0
        self._form: TreeSpec | None = None
        self._schedule: Any = None
        self._made_for: object = None
        self._factor, self._losses, self._targets = 1.0, list[Tensor](), list[Tree]()
        whole = nn.ModuleList(self.modules())
        self.gradient_sync = fsdp.choose_gradient_sync(parts, whole, self.micro_batches())

    def modules(self) -> Sequence[nn.Module]:
        """Return this rank's stages."""
        return list(self._stages.values())

    def describe(self) -> str:
        """Describe which rank of the pipeline holds which pieces."""
        pp, schedule = self.parts.layout.pp, self.parts.config.pp_schedule
        stages = [
            f"stage {number} (rank {self._owners[number]}): {', '.join(names)}"
            for number, names in enumerate(self._plan)
        ]
        sync = str(self.gradient_sync)
        return f"pipeline of {pp}, {schedule}: {'; '.join([*stages, sync] if sync else stages)}"

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages."""
        return self._shared.named_parameters()

    def counted_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, each on only one rank of the pipeline."""
        return self._shared.counted_parameters()

    def without_gradient(self) -> frozenset[str]:
        """Name the parameters without a gradient from this rank's data in this step."""
        names = frozenset[str]().union(*(units.without_gradient() for units in self._units))
        return self._filled | self._shared.canonical(names)

    def has_written(self) -> bool:
        """Whether a pass of this step has written a parameter, or a gathered copy of one."""
        copies = [units.has_written() for units in self._units]
        return super().has_written() or any(copies)

    def written(self) -> list[str]:
        """Name the parameters that passes have written."""
        return [*super().written(), *(name for units in self._units for name in units.written())]

    def lost_write(self, names: Sequence[str]) -> str:
        """Describe why a write gives wrong results: several micro-batches are in flight."""
        return f"{some_of(names)}, between the forward and the backward passes of micro-batches"

    def micro_batches(self) -> int:
        """Count the micro-batches that `accumulate()` expects, all of the same size."""
        return split.micro_batches(self.parts.config, self.parts.layout)

    def warm_up(self, batch: Batch) -> None:
        """Refuse a model that cannot be cut, between its pieces or along sequences."""
        layout, schedule = self.parts.layout, self.parts.config.pp_schedule
        pieces.check_complete(self.parts, batch, flags=f"--pp {layout.pp} --pp-schedule {schedule}")
        if schedule in split.TWO_PASSES:
            two_passes.check(self.parts, batch, self._plan, flags=f"--pp-schedule {schedule}")
        problem = ""
        if len(batch):
            in_parts = schedule in split.TWO_PASSES
            writes = Writes(dict(self.named_parameters()), self.norm_device)
            writes.start(contents=True)
            borrowed = self._originals.watch_stages(self.modules(), in_parts=in_parts)
            try:
                part = self._slice.of(batch.part(0, FEW))
                with borrowed:
                    passed = self.passed(part.inputs)
                if self._holds_last:
                    problem = self._loss_reads(passed, part)
            except UsageError as error:
                problem = str(error)
            if borrowed.problem:
                problem = (
                    f"--pp {layout.pp} --pp-schedule {schedule}: task {self.task.name!r}: "
                    f"{borrowed.problem}; take it from its module in forward(), have pieces() name "
                    "a module around both, or use --strategy fsdp"
                )
            elif writes.any():
                problem = self._unkept(writes.names())
        self._refuse_any(problem)
        if self._hooked and len(batch):
            self._refuse_any(self._handed_over(batch.part(0, FEW)))
        if len(batch):
            inputs = self._slice.of(batch.part(0, FEW)).inputs
            run = partial(self.passed, inputs)
            dropout.draw_by_rank(self.modules(), run, inputs, self.parts)
        held, last = nn.ModuleList(self.modules()), len(self._plan) - 1
        cp.verify(held, lambda x: self.passed(x).get(last, (None, None))[1], batch, self.parts)

    def _refuse_any(self, problem: str) -> None:
        """Raise the first problem of any rank, on all ranks."""
        if problems := [one for one in self.parts.group.gather(problem) if one]:
            raise UsageError(problems[0])

    def _handed_over(self, batch: Batch) -> str:
        """Describe why the loss fails if only the last stage has run; '' if it does not."""
        outputs = self.passed(self._slice.of(batch).inputs)
        if not self._holds_last:
            return ""
        try:
            with torch.no_grad(), self.parts.autocast(), tp.losses_stay_apart(self.parts):
                given = unflattened(outputs[len(self._plan) - 1][1], self._form)
                summed_loss(self.task, given, self._slice.of(batch).targets)
        except Exception as error:
            if is_collateral(error):
                raise
            return (
                f"--pp {self.parts.layout.pp}: loss() of task {self.task.name!r} fails where only "
                f"the outputs of the model are known ({type(error).__name__}: {error}); layer "
                f"{self._hooked[0]!r} has a forward hook, and what that hands to the loss stays on "
                "the rank of the layer's stage: return it from the model, or leave out --pp"
            )
        return ""

    def _loss_reads(self, passed: dict[int, tuple[Tree, Tree]], part: Batch) -> str:
        """Describe why a loss that reads weights would be wrong; '' if it reads none."""
        reads = LossReads(self.modules(), self.parts)
        outputs = unflattened(passed[len(self._plan) - 1][1], self._form)
        # Any other error occurs again in the first step, which names the failing part.
        with suppress(Exception), torch.no_grad(), self.parts.autocast(), reads:
            self.task.loss(outputs, part.targets)
        return reads.problem()

    def passed(self, inputs: Tree) -> dict[int, tuple[Tree, Tree]]:
        """Send a batch through all stages; return the inputs and outputs of this rank's stages.

        Raises:
            UsageError: a stage's output is not a tensor; raised on this stage's and later ranks.
        """
        self._modes.evaluate()
        try:
            return self._relay.run(inputs)
        except Untransferable as error:
            number, kind = error.args
            raise UsageError(
                f"--pp {self.parts.layout.pp}: stage {number} of task {self.task.name!r}, which "
                f"ends with {self._plan[number][-1]!r}, gives a {kind}; from stage to stage goes "
                "one tensor, and the last gives tensors only: cut elsewhere by pieces(), have that "
                "module give what it may, or leave out --pp"
            ) from error

    def accumulate(self, micro_batches: Sequence[Batch], factor: float = 1.0) -> Sums:
        """Add the gradients of the summed loss; all ranks of a pipeline take part."""
        batches = [self._slice.of(batch) for batch in micro_batches]
        schedule = self._schedule_for(batches)
        self._modes.train()
        inputs = [joined([b.inputs for b in batches])] if 0 in self._stages else []
        # torch's schedule can split only one tensor, so it gets the micro-batches' numbers.
        numbers = torch.arange(len(batches)) if self._holds_last else None
        self._targets = [batch.targets for batch in batches]
        self._factor, self._losses = factor, []
        for units in self._units:
            units.begin_step()
        try:
            with tp.losses_stay_apart(self.parts):
                schedule.step(*inputs, target=numbers, return_outputs=False)
        except RuntimeError as error:
            # torch refuses a backward pass through tensors written since the forward pass.
            if self.has_written():
                raise UsageError(self._unkept(self.written())) from error
            if any(IN_PLACE in str(each) for each in (error, error.__cause__)):
                raise UsageError(self._overwritten()) from error
            raise
        if self.parts.config.compile:
            compilation.check_compiled(self.task)
        self._settlement.run()
        self._filled = self._shared.sum_gradients()
        if not self._reports:
            return Sums(loss=torch.zeros((), device=self.norm_device), count=0)
        count = sum(item_count(self.task, batch.targets) for batch in batches)
        return Sums(loss=torch.stack(self._losses).sum(), count=count)

    def _overwritten(self) -> str:
        """Describe a buffer that changes while micro-batches are in flight."""
        stages = self._stages.values()
        moved = [name for s in stages for name, b in s.named_buffers() if b._version > 0]
        return (
            f"--pp {self.parts.layout.pp}: forward() of the model of task {self.task.name!r} "
            f"changes in place what backward passes of earlier micro-batches still need "
            f"({some_of(frozenset(moved)) or 'an activation'}); replace it instead "
            "(`self.scale = 0.9 * self.scale`), or leave out --pp"
        )

    def _unkept(self, names: Sequence[str]) -> str:
        return (
            f"--pp {self.parts.layout.pp}: forward() of the model of task {self.task.name!r} "
            f"writes {self.lost_write(names)}; write parameters in model() only and keep what "
            "moves in buffers of floats, or leave out --pp"
        )

    def _flatten(self, stage: nn.Module, arguments: object, outputs: Tree) -> Tree:
        """Flatten the outputs of the last stage, and record their structure."""
        self._form = form_of(outputs)
        if self._form is None:
            return outputs
        for name, leaf in named("", outputs):
            if not isinstance(leaf, Tensor):
                raise Untransferable(len(self._plan) - 1, f"{type(leaf).__name__} as output{name}")
        return tuple(tensors_of(outputs))

    def _loss(self, outputs: Tree, number: Tensor) -> Tensor:
        # `number` is a slice of all numbers, so its storage offset equals the number. Tensors have
        # an offset even in a rehearsal, but no contents.
        targets = self._targets[int(number.storage_offset())]
        with self.parts.autocast():
            loss = summed_loss(self.task, unflattened(outputs, self._form), targets)
        self._losses.append(loss.detach())
        return loss if self._factor == 1.0 else loss * self._factor

    def evaluate(self, batch: Batch) -> Tally:
        """Run the model without gradients; batches may have any size, as none is cut."""
        batch = self._slice.of(batch)
        with tp.losses_stay_apart(self.parts):
            passed = self.passed(batch.inputs)
            if self._holds_last:
                with torch.no_grad(), self.parts.autocast():
                    outputs = unflattened(passed[len(self._plan) - 1][1], self._form)
                    sums = tally(self.task, outputs, batch.targets)
                if self._reports:
                    return sums
        zero = torch.zeros((), device=self.norm_device)
        return Tally(loss=zero, score=zero.new_zeros(0), count=0)

    def predict(self, batch: Batch) -> Tree | None:
        """Run the model without gradients; one rank of the last stage returns the outputs."""
        own = self._slice.of(batch)
        passed = self.passed(own.inputs)
        if not self._holds_last:
            return None
        outputs = unflattened(passed[len(self._plan) - 1][1], self._form)
        outputs = self._slice.joined(mapped(full, outputs), own)
        return outputs if self._predicts else None

    def _schedule_for(self, batches: Sequence[Batch]) -> Any:
        """Return torch's schedule for micro-batches like these, all of the same size.

        The schedule gets the inputs and outputs of each stage, and the number of micro-batches.
        Without them, torch would make an extra training pass, which changes the running statistics
        of batch normalisation. The pass here changes nothing.
        """
        made_for = (len(batches), [(t.shape, t.dtype) for t in tensors_of(batches[0].inputs)])
        if any(len(batch) != len(batches[0]) for batch in batches):
            sizes = ", ".join(str(len(batch)) for batch in batches)
            raise ValueError(f"micro-batches of a pipeline must be of one size, not {sizes}")
        if self._made_for == made_for:
            return self._schedule
        # Connects the whole group, which a first exchange between two of its ranks may not.
        dist.all_reduce(torch.zeros(1, device=self.norm_device), group=self.stage_group)
        stages = [
            PipelineStage(
                self._stages[number],
                number,
                len(self._plan),
                self.norm_device,
                input_args=tuple(_like(t, wants_gradient=number > 0) for t in tensors_of(inputs)),
                output_args=tuple(_like(t, wants_gradient=True) for t in tensors_of(outputs)),
                group=self.stage_group,
            )
            for number, (inputs, outputs) in self.passed(batches[0].inputs).items()
        ]
        # Sums, not means: `scale_grads` would divide by the number of micro-batches.
        arguments = {"n_microbatches": len(batches), "loss_fn": self._loss, "scale_grads": False}
        name = self.parts.config.pp_schedule
        single = name in split.ONE_STAGE
        self._schedule = get_schedule_class(name)(stages[0] if single else stages, **arguments)
        self._made_for = made_for
        return self._schedule


def _like(tensor: Tensor, *, wants_gradient: bool) -> Tensor:
    """Describe a tensor to torch, without its contents."""
    described = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return described.requires_grad_(wants_gradient and tensor.is_floating_point())
