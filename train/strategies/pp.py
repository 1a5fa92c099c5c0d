"""Pipeline parallel: each rank holds one or two stages of the model and sees all of its share.

The share is cut in micro-batches that follow each other through the stages, so that all ranks have
work once the first has arrived at the last stage. In which order a rank takes forward and backward
passes is the schedule's to say; torch has seven.

Each stage may itself be sharded and tensor parallel. Never wrap one in DistributedDataParallel: it
exchanges gradients in hooks that three of the schedules go around, and then each copy trains alone,
without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from train import buffers, stages
from train.data import Batch
from train.strategies import cp, hybrid, tp
from train.strategies.base import Parts, Strategy, Sums, Tally, one_number, tally
from train.strategies.cutting import Stage, plan
from train.strategies.relay import Relay


class Pipelined(Strategy):
    """Runs this rank's stages; the last stage's rank knows the loss."""

    def __init__(self, parts: Parts) -> None:
        """Make the model, keep this rank's stages of it, cut them further as the layout says."""
        layout, config, group = parts.layout, parts.config, parts.group
        stages.check(config, layout)
        self.parts, self.task = parts, parts.task
        at = layout.coordinates(group.place.rank)
        self.shard, self.shards = layout.shard(group.place.rank), layout.shards
        self.axes = (self.shard, at["cp"], at["pp"])
        self.norm_device = self._device = group.device
        # On the host: the device need never hold more than this rank's stages.
        model = parts.model(torch.device("meta" if config.meta_init else "cpu"))
        self._plan = plan(model, parts)
        held = stages.stages_of(at["pp"], config.pp_schedule, layout.pp)
        self._stages = {number: Stage(model, self._plan[number], parts.autocast) for number in held}
        mesh = hybrid.build_mesh(parts)
        self.stage_group = mesh.get_group("pp")
        for number, stage in self._stages.items():
            if not config.meta_init:
                stage.to(group.device)
            self._slice = hybrid.parallelise(stage, self._plan[number], parts, mesh)
            if isinstance(stage, FSDPModule):
                # Parameters stay gathered until the step's last backward pass. Otherwise each
                # micro-batch would gather them, and schedules that compute the gradients of weights
                # in a pass of their own would look for other tensors, and silently leave them out.
                stage.set_reshard_after_forward(False)
        if config.meta_init:
            hybrid.materialise(list(self._stages.values()), parts)
        # After the tensors on the device `meta` have been replaced.
        self._running_statistics = [b for s in self._stages.values() for b in buffers.moving(s)]
        self._data_groups = hybrid.data_groups(mesh)
        self._owners = stages.owners(config.pp_schedule, layout.pp)
        self._relay = Relay(
            self._stages, owners=self._owners, group=self.stage_group, device=group.device
        )
        self._holds_last = len(self._plan) - 1 in self._stages
        # Ranks of one tensor-parallel group compute the same loss: the first of them reports it.
        self._reports = self._holds_last and at["tp"] == 0
        self._schedule: Any = None
        self._made_for: object = None
        self._factor, self._losses = 1.0, list[Tensor]()

    def describe(self) -> str:
        """Say which rank of a pipeline holds what."""
        pp, schedule = self.parts.layout.pp, self.parts.config.pp_schedule
        return f"pipeline of {pp}, {schedule}: " + "; ".join(
            f"stage {number} (rank {self._owners[number]}): {', '.join(names)}"
            for number, names in enumerate(self._plan)
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Give the parameters of this rank's stages."""
        for stage in self._stages.values():
            yield from stage.named_parameters()

    def micro_batches(self) -> int:
        """Count the micro-batches that `accumulate()` expects, all of one size."""
        return stages.micro_batches(self.parts.config, self.parts.layout)

    def warm_up(self, batch: Batch) -> None:
        """Refuse a model that does not bear cutting its sequences."""
        last = len(self._plan) - 1
        held = nn.ModuleList(self._stages.values())
        cp.verify(held, lambda x: self._relay.run(x).get(last, (None, None))[1], batch, self.parts)

    def accumulate(self, micro_batches: Sequence[Batch], factor: float = 1.0) -> Sums:
        """Add the gradients of the summed loss; all ranks of a pipeline take part."""
        batches = [self._slice.of(batch) for batch in micro_batches]
        schedule = self._schedule_for(batches)
        for stage in self._stages.values():
            stage.train(True)
        inputs = [torch.cat([b.inputs for b in batches])] if 0 in self._stages else []
        targets = torch.cat([b.targets for b in batches]) if self._holds_last else None
        self._factor, self._losses = factor, []
        config, ranks = self.parts.config, self.parts.layout.tp
        with tp.losses_stay_apart(config, ranks):
            schedule.step(*inputs, target=targets, return_outputs=False)
        for stage in self._stages.values():
            tp.finish_gradients(stage, ranks)
        buffers.average(self._running_statistics, self._data_groups)
        if not self._reports:
            return Sums(loss=torch.zeros((), device=self._device), count=0)
        count = sum(self.task.count(batch.targets) for batch in batches)
        return Sums(loss=torch.stack(self._losses).sum(), count=count)

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute what a micro-batch is trained on, and note what is reported."""
        with self.parts.autocast():
            loss = one_number(self.task.loss(outputs, targets), self.task)
        self._losses.append(loss.detach())
        return loss if self._factor == 1.0 else loss * self._factor

    def evaluate(self, batch: Batch) -> Tally:
        """Run the model without gradients, batch after batch: of any size, as nothing is cut."""
        batch = self._slice.of(batch)
        with tp.losses_stay_apart(self.parts.config, self.parts.layout.tp):
            passed = self._relay.run(batch.inputs)
            if self._holds_last:
                with torch.no_grad(), self.parts.autocast():
                    found = tally(self.task, passed[len(self._plan) - 1][1], batch.targets)
                if self._reports:
                    return found
        zero = torch.zeros((), device=self._device)
        return Tally(loss=zero, score=zero.new_zeros(0), count=0)

    def model_state(self) -> dict[str, Tensor]:
        """Give parameters and buffers of this rank's stages."""
        return {
            name: tensor
            for stage in self._stages.values()
            for name, tensor in stage.state_dict().items()
        }

    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Put them in place."""
        for stage in self._stages.values():
            stage.load_state_dict({name: state[name] for name in stage.state_dict()})

    def _schedule_for(self, batches: Sequence[Batch]) -> Any:
        """Give torch's schedule for micro-batches like these, all of one size."""
        made_for = (len(batches), batches[0].inputs.shape, batches[0].inputs.dtype)
        if any(batch.inputs.shape != batches[0].inputs.shape for batch in batches):
            sizes = ", ".join(str(len(batch)) for batch in batches)
            raise ValueError(f"micro-batches of a pipeline must be of one size, not {sizes}")
        if self._made_for != made_for:
            self._schedule, self._made_for = self._make_schedule(batches), made_for
        return self._schedule

    def _make_schedule(self, batches: Sequence[Batch]) -> Any:
        """Tell torch what goes in and out of each stage, and how many micro-batches there are.

        torch would find that out itself with a training pass of its own, which moves the running
        statistics of batch normalisation. Ours changes nothing.
        """
        count, name = len(self._plan), self.parts.config.pp_schedule
        # Connects the whole group: the first exchange between two of its ranks may not.
        dist.all_reduce(torch.zeros(1, device=self._device), group=self.stage_group)
        made = [
            PipelineStage(
                self._stages[number],
                number,
                count,
                self._device,
                input_args=_like(taken, wants_gradient=number > 0),
                output_args=_like(given, wants_gradient=True),
                group=self.stage_group,
            )
            for number, (taken, given) in self._relay.run(batches[0].inputs).items()
        ]
        # Sums, not means: `scale_grads` would divide by the number of micro-batches.
        arguments = {"n_microbatches": len(batches), "loss_fn": self._loss, "scale_grads": False}
        single = name in stages.ONE_STAGE
        return get_schedule_class(name)(made[0] if single else made, **arguments)


def _like(tensor: Tensor, *, wants_gradient: bool) -> Tensor:
    """Describe a tensor to torch, without its contents."""
    described = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return described.requires_grad_(wants_gradient and tensor.is_floating_point())
