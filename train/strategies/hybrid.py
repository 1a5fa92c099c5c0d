"""Any product of sharded data, tensor and context parallelism, and each of them alone.

Order matters. Matrices are cut first (tensor parallel), then attention is told that the sequence is
(context parallel), and last the data axes are laid around what is left: `fully_shard` sees the cut
parameters, and cuts them once more along another dimension of the same mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from train import batchnorm, buffers
from train.data import Batch
from train.distributed import arrange, limit_waiting
from train.strategies import cp, fsdp, tp
from train.strategies.base import Parts, Sums, Tally, WholeModel, local

# Dimensions of the mesh whose ranks see different samples, or different parts of a sequence.
DATA = ("dp_replicate", "fsdp")


class Composed(WholeModel):
    """Applies what the layout asks for to one model."""

    def __init__(self, parts: Parts) -> None:
        """Make the model, cut it and shard it."""
        meta = parts.config.meta_init
        super().__init__(parts, parts.model(torch.device("meta") if meta else None))
        mesh = build_mesh(parts)
        self._slice = parallelise(self.model, self.task.pieces(self.model), parts, mesh)
        at = parts.layout.coordinates(parts.group.place.rank)
        # Ranks of one tensor-parallel group compute the same loss: the first of them reports it.
        self._reports = at["tp"] == 0
        self.axes = (self.shard, at["cp"])
        if meta:
            materialise([self.model], parts)
        # After the tensors on the device `meta` have been replaced.
        self._running_statistics = buffers.moving(self.model)
        self._data_groups = data_groups(mesh)

    def warm_up(self, batch: Batch) -> None:
        """Refuse a model that does not bear cutting its sequences."""
        cp.verify(self.model, self._outputs, batch, self.parts)

    def _outputs(self, inputs: Tensor) -> Tensor:
        self.model.eval()
        with torch.no_grad(), self.parts.autocast():
            outputs: Tensor = self.model(inputs)
        return outputs

    def accumulate(self, micro_batches: Sequence[Batch], factor: float = 1.0) -> Sums:
        """Add the gradients of the summed loss; exchange them in the last backward pass."""
        self.start_training()
        sums = []
        for number, batch in enumerate(micro_batches, start=1):
            fsdp.exchange_gradients(self.model, number == len(micro_batches))
            with tp.losses_stay_apart(self.parts.config, self.parts.layout.tp):
                sums.append(self.backward(self._slice.of(batch), factor))
        tp.finish_gradients(self.model, self.parts.layout.tp)
        buffers.average(self._running_statistics, self._data_groups)
        total = self.total(sums)
        return total if self._reports else Sums(loss=torch.zeros_like(total.loss), count=0)

    def evaluate(self, batch: Batch) -> Tally:
        """Run the model without gradients; all ranks take part in every batch."""
        with tp.losses_stay_apart(self.parts.config, self.parts.layout.tp):
            found = super().evaluate(self._slice.of(batch))
        if self._reports:
            return found
        zeros = torch.zeros_like
        return Tally(loss=zeros(found.loss), score=zeros(found.score), count=0)


def build_mesh(parts: Parts) -> DeviceMesh:
    """Arrange the ranks in the dimensions along which parameters are cut.

    The ranks of one sequence (cp) have the same parameters and different gradients, just like those
    of different samples: both are one dimension here, `fsdp`.
    """
    layout = parts.layout
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "fsdp": layout.dp_shard * layout.cp,
        "tp": layout.tp,
    }
    return arrange(parts.group, sizes, timeout_s=parts.config.timeout_s)


def data_groups(mesh: DeviceMesh) -> list[ProcessGroup]:
    """Give this rank's groups along the dimensions whose ranks see different samples."""
    names = mesh.mesh_dim_names or ()
    return [mesh.get_group(n) for n in names if n in DATA and mesh.size(names.index(n)) > 1]


def parallelise(
    model: nn.Module, pieces: Sequence[str], parts: Parts, mesh: DeviceMesh
) -> cp.SequenceSlice:
    """Cut a model, or one pipeline stage of it, as the layout says; give this rank's sequence."""
    layout, config = parts.layout, parts.config
    if layout.tp > 1:
        tp.apply(model, parts.task, mesh["tp"], config)
    sequence = cp.apply(model, parts)
    if config.sync_batch_norm:
        # Others hold the same samples, or another stage.
        group = mesh[DATA]._flatten("data").get_group()
        limit_waiting(group, timeout_s=config.timeout_s)
        batchnorm.among(model, group)
    if config.compile:
        for name in pieces:
            model.get_submodule(name).compile()
    if layout.dp_replicate > 1:
        # Also where nothing is sharded: DDP does not know tensor-parallel parameters.
        fsdp.apply(model, pieces, mesh["dp_replicate", "fsdp"], config)
    elif layout.dp_shard * layout.cp > 1:
        fsdp.apply(model, pieces, mesh["fsdp"], config)
    return sequence


def materialise(modules: Sequence[nn.Module], parts: Parts) -> None:
    """Give modules on the device `meta` their weights: rank 0 makes them and sends them.

    One tensor at a time: no other rank ever holds more than its own parts and one whole tensor.
    """
    device = parts.group.device
    mine: dict[str, Tensor] = {}
    for module in modules:
        # Offloaded parameters live in the host's memory from the start; FSDP insists.
        module.to_empty(device="cpu" if parts.config.cpu_offload else device)
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                owner._buffers[name] = buffer.to(device)
        mine.update(_tensors(module))
    first = parts.group.place.rank == 0
    weights = _tensors(parts.model(torch.device("cpu"))) if first else {}
    for name in parts.group.broadcast(list(weights)):
        sent = {name: weights[name].detach()} if first else {}
        whole = parts.group.broadcast_tensors(sent, source=0)[name]
        if (own := mine.get(name)) is None:
            continue
        if isinstance(own, DTensor):
            mesh, placements = own.device_mesh, own.placements
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        with torch.no_grad():
            local(own).copy_(local(whole))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name parameters and buffers, also those that no checkpoint holds."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
