"""What torch.distributed.tensor.parallel lacks for a model to be cut well."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ParallelStyle


class Replicated(ParallelStyle):
    """Every rank has the whole module; its parameters become DTensors like all others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)
