"""Any combination of sharded data, tensor and context parallelism, and each of them alone.

The order matters. Tensor parallelism cuts matrices first, then context parallelism splits attention
along the sequence. The data axes come last: `fully_shard` receives the cut parameters, and shards
them again along another dimension of the same mesh.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..data.order import Batch
from ..model import batchnorm, compilation
from ..model.trees import Tree, mapped
from ..runtime.process_group import arrange, limit_waiting
from . import consistency, cp, dropout, fsdp, pieces, tp
from .base import Parts, Sums, Tally, WholeModel, copy_part, full
from .consistency import named_tensors, some_of
from .replacement import LossReads

DATA = ("dp_replicate", "fsdp")
"""Mesh dimensions with different samples, or different parts of a sequence, on each rank."""


class Composed(WholeModel):
    """Applies a layout to one model."""

    gradient_sync: fsdp.GradientSync

    def __init__(self, parts: Parts) -> None:
        meta = parts.config.meta_init
        super().__init__(parts, parts.model(torch.device("meta") if meta else None))
        mesh = build_mesh(parts)
        names = self.task.pieces(self.model)
        self._slice, self._units = parallelise(self.model, names, parts, mesh)
        at = parts.layout.coordinates(parts.group.rank_info.rank)
        # All ranks of a tensor-parallel group compute the same loss; only the first reports it.
        self._reports = at["tp"] == 0
        self._predicts = at["tp"] == at["cp"] == 0
        self.axes = (self.shard, at["cp"])
        if meta:
            materialise([self.model], parts)
        self._settlement = Settlement([self.model], mesh, parts)
        self._has_lost = False
        self.gradient_sync = fsdp.choose_gradient_sync(parts, self.model, self.micro_batches())

    def warm_up(self, batch: Batch) -> None:
        """Refuse a model if its sequences cannot be cut, or its pieces cannot be sharded."""
        if self._units:
            flags = f"--strategy {self.parts.config.strategy_on(self.parts.group.rank_info)}"
            pieces.check_at_home(self.parts, batch, self._units.pieces, flags=flags)
        cp.verify(self.model, self.outputs, batch, self.parts)
        if len(batch):
            inputs = self.own_part(batch.part(0, 2)).inputs
            dropout.draw_by_rank([self.model], lambda: self.outputs(inputs), inputs, self.parts)

    def own_part(self, batch: Batch) -> Batch:
        """Cut this rank's part out of each sequence."""
        return self._slice.of(batch)

    def accumulate(self, micro_batches: Sequence[Batch], factor: float = 1.0) -> Sums:
        """Add the gradients of the summed loss; `gradient_sync` decides when to reduce them."""
        self.start_training()
        if self._units:
            self._units.begin_step()
        sums = []
        for number, batch in enumerate(micro_batches, start=1):
            self.gradient_sync.prepare(self.model, last=number == len(micro_batches))
            with tp.losses_stay_apart(self.parts):
                sums.append(self.backward(batch, factor))
        self._settlement.run()
        total = self.total(sums)
        return total if self._reports else Sums(loss=torch.zeros_like(total.loss), count=0)

    def without_gradient(self) -> frozenset[str]:
        """Name the parameters without a gradient from this rank's data in this step."""
        return self._units.without_gradient() if self._units else frozenset()

    def loss_reads(self) -> AbstractContextManager[object]:
        """Refuse a loss that reads sharded weights; only the first step is checked."""
        if self._has_lost or self.parts.layout.world_size == 1:
            return nullcontext()
        self._has_lost = True
        return LossReads(self.modules(), self.parts)

    def has_written(self) -> bool:
        """Whether a pass of this step has written a parameter, or a gathered copy of one."""
        copies = self._units is not None and self._units.has_written()
        return super().has_written() or copies

    def written(self) -> list[str]:
        """Name the parameters that passes have written."""
        return [*super().written(), *(self._units.written() if self._units else ())]

    def lost_write(self, names: Sequence[str]) -> str:
        """Describe why a write is lost: units free their gathered copies."""
        if self._units:
            return f"{some_of(names)} (ranks gather copies of it and drop them after use)"
        return super().lost_write(names)

    def evaluate(self, batch: Batch) -> Tally:
        """Run the model without gradients; all ranks take part in every batch."""
        with tp.losses_stay_apart(self.parts):
            sums = super().evaluate(batch)
        if self._reports:
            return sums
        return Tally(loss=torch.zeros_like(sums.loss), score=torch.zeros_like(sums.score), count=0)

    def predict(self, batch: Batch) -> Tree | None:
        """Run the model without gradients; one rank per shared batch returns the outputs."""
        own = self._slice.of(batch)
        outputs = self._slice.joined(mapped(full, self.outputs(own.inputs)), own)
        return outputs if self._predicts else None


def build_mesh(parts: Parts) -> DeviceMesh:
    """Create the mesh with the dimensions along which parameters are cut.

    The ranks of one sequence (cp) have the same parameters and different gradients, just like ranks
    with different samples. Both form one dimension here, `fsdp`.
    """
    layout = parts.layout
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "fsdp": layout.dp_shard * layout.cp,
        "tp": layout.tp,
    }
    return arrange(parts.group, sizes, timeout_s=parts.config.timeout_s)


class Settlement:
    """The work on each rank after a step's last backward pass, besides the reduction into shards.

    Gradients of cut parameters get the layout of their parameters, gradients of uncut parameters
    are compared, and running statistics are averaged.
    """

    def __init__(self, modules: Sequence[nn.Module], mesh: DeviceMesh, parts: Parts) -> None:
        """Set the model or this rank's stages, once no tensor is on the device `meta`."""
        self._modules, self._parts = modules, parts
        self._running_statistics = [p for m in modules for p in batchnorm.moving_places(m)]
        self._data_groups = [group for group in map(mesh.get_group, DATA) if group.size() > 1]
        self._mesh, self._first_step = mesh, True

    def run(self) -> None:
        """Do this work; all ranks call this. Gradients are compared in the first step only."""
        for module in self._modules:
            tp.finish_gradients(module, self._parts.layout.tp)
        if self._first_step:
            name, halves = self._parts.task.name, self._parts.config.precision != "fp32"
            tp.check_uncut_gradients(self._modules, self._mesh["tp"], task=name, halves=halves)
            self._first_step = False
        batchnorm.average_buffers(self._running_statistics, self._data_groups)


def parallelise(
    model: nn.Module, pieces: Sequence[str], parts: Parts, mesh: DeviceMesh
) -> tuple[cp.SequenceSlice, fsdp.Units | None]:
    """Split a model, or one pipeline stage of it, by the layout.

    Returns this rank's part of each sequence, and the units that are sharded along the data axes;
    None if there are none.
    """
    layout, config = parts.layout, parts.config
    if layout.tp > 1:
        tp.apply(model, parts.task, mesh["tp"], config)
    sequence = cp.apply(model, parts)
    if config.sync_batch_norm:
        # Other ranks have the same samples, or another stage.
        group = mesh[DATA]._flatten("data").get_group()
        limit_waiting(group, timeout_s=config.timeout_s)
        batchnorm.limit_to_group(model, group)
    compilation.compile_pieces(model, pieces, config, cut=layout.tp > 1)
    units, name = None, parts.task.name
    if layout.dp_replicate > 1:
        # Even without sharding: DDP does not support tensor-parallel parameters.
        units = fsdp.apply(model, pieces, mesh["dp_replicate", "fsdp"], config, task=name)
    elif layout.dp_shard * layout.cp > 1:
        units = fsdp.apply(model, pieces, mesh["fsdp"], config, task=name)
    return sequence, units


def materialise(modules: Sequence[nn.Module], parts: Parts) -> None:
    """Initialise modules on the device `meta`: rank 0 makes the weights and sends them.

    Rank 0 sends one tensor at a time, so other ranks never hold more than their own parts and one
    whole tensor.
    """
    device = parts.group.device
    # Stages may share parameters with each other.
    together = nn.ModuleList(modules)
    ties = consistency.ties_of(together)
    # FSDP requires offloaded parameters to be in host memory from the start.
    together.to_empty(device="cpu" if parts.config.cpu_offload else device)
    fsdp.tie_again(together, ties)
    for owner in together.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = buffer.to(device)
    mine = {name: tensor for module in modules for name, tensor in named_tensors(module).items()}
    first = parts.group.rank_info.rank == 0
    weights = named_tensors(parts.sketch(torch.device("cpu"))) if first else {}
    names_of: dict[int, list[str]] = {}
    for name, tensor in weights.items():
        names_of.setdefault(id(tensor), []).append(name)
    for names in parts.group.broadcast(list(names_of.values())):
        sent = {names[0]: weights[names[0]].detach()} if first else {}
        whole = parts.group.broadcast_tensors(sent, source=0)[names[0]]
        # Look up every name: a stage may hold the tensor only under its second name.
        own = next((mine[name] for name in names if name in mine), None)
        if own is not None:
            copy_part(whole, own)
