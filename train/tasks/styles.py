"""What torch.distributed.tensor.parallel lacks for a model to be cut well."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ParallelStyle


class Replicated(ParallelStyle):
    """Every rank has the whole module; its parameters become DTensors like all others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class PartwiseDropout(ParallelStyle):
    """Dropout where each rank has its own part of a tensor, such as its part of the sequence.

    Ranks that share matrices share their random numbers too, so that what all of them compute is
    the same. Here that would drop the same places of every part.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Dropout), "a plan names a dropout layer here"
        drop_by_rank(module, device_mesh.get_local_rank())
        return module


def drop_by_rank(module: nn.Dropout, rank: int) -> None:
    """Have a rank of a tensor-parallel group draw numbers of its own in a dropout layer."""
    module.forward = partial(_drop, module, rank)  # type: ignore[method-assign]


def _drop(module: nn.Dropout, rank: int, inputs: Tensor) -> Tensor:
    if not module.training or module.p == 0:
        return inputs
    # Drawn by all ranks alike, so that their common generator stays common.
    seed = int(torch.randint(2**62, ()).item()) + rank
    generator = torch.Generator(inputs.device).manual_seed(seed)
    kept = torch.empty_like(inputs).bernoulli_(1 - module.p, generator=generator)
    return inputs * kept / max(1 - module.p, 1e-9)
