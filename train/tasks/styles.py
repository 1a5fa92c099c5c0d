"""Parallel styles missing from torch.distributed.tensor.parallel."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ParallelStyle


class Replicated(ParallelStyle):
    """Every rank holds the whole module; its parameters become replicated DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class PartwiseDropout(ParallelStyle):
    """Dropout for tensors that are split over the ranks, for instance along the sequence.

    Tensor-parallel ranks use the same random numbers, so that replicated results are the same on
    all ranks. Here the same numbers would drop the same elements of every part.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Dropout), "a plan names a dropout layer here"
        drop_by_rank(module, device_mesh.get_local_rank())
        return module


def drop_by_rank(module: nn.Dropout, rank: int) -> None:
    """Make a dropout layer draw different random numbers on each tensor-parallel rank."""
    module.forward = partial(_drop, module, rank)  # type: ignore[method-assign]


def _drop(module: nn.Dropout, rank: int, inputs: Tensor) -> Tensor:
    if not module.training or module.p == 0:
        return inputs
    # All ranks draw this seed, so that their shared generator stays in step.
    seed = int(torch.randint(2**62, ()).item()) + rank
    generator = torch.Generator(inputs.device).manual_seed(seed)
    kept = torch.empty_like(inputs).bernoulli_(1 - module.p, generator=generator)
    return inputs * kept / max(1 - module.p, 1e-9)
