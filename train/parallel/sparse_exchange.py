"""The exchange of sparse gradients under data parallel.

DistributedDataParallel (torch 2.13) has three faults with such layers. Gradients that follow the
layer in the backward pass are divided by the number of ranks twice. A gradient that `loss()` has
made dense is rejected. A rank fails if its batch uses no row. So these parameters are exchanged
here instead: each rank sends the rows that its batch has used.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model import sparse

NONE, SPARSE, DENSE = 0, 1, 2


class SparseGradients:
    """The sparse gradients of one model; all ranks make the same calls."""

    def __init__(self, model: nn.Module) -> None:
        layers = sparse.layers(model)
        own = {id(layer.weight) for layer in layers.values()}
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        # DistributedDataParallel requires at least one parameter.
        self._parameters = [p for p in model.parameters() if id(p) in own and own != trained]
        shared = {id(p) for p in self._parameters}
        self.names = [
            name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in shared
        ]
        """All names of these parameters."""

    def average(self) -> None:
        """Replace the gradients with their means over all ranks."""
        if not self._parameters:
            return
        kinds = [_kind(parameter.grad) for parameter in self._parameters]
        agreed = torch.tensor(kinds, device=self._parameters[0].device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        for parameter, kind in zip(self._parameters, agreed.tolist(), strict=True):
            if kind == NONE:
                continue
            own = parameter.grad
            if own is None:
                own = torch.zeros_like(parameter)
                own = own.to_sparse(1) if kind == SPARSE else own
            if kind == SPARSE:
                own = _sum_of_rows(own.coalesce())
            else:
                own = own.to_dense()
                dist.all_reduce(own)
            parameter.grad = own / dist.get_world_size()


def _kind(gradient: Tensor | None) -> int:
    if gradient is None:
        return NONE
    return SPARSE if gradient.is_sparse else DENSE


def _sum_of_rows(own: Tensor) -> Tensor:
    """Sum the sparse tensors of all ranks by rows. Shape [rows, ...]."""
    ranks = dist.get_world_size()
    counts = torch.zeros(ranks, dtype=torch.int64, device=own.device)
    counts[dist.get_rank()] = own.values().shape[0]
    dist.all_reduce(counts)
    sizes = counts.tolist()
    everywhere = []
    for mine in (own.indices()[0], own.values()):
        padded = mine.new_zeros(max(sizes), *mine.shape[1:])
        padded[: len(mine)] = mine
        every = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(every, padded)
        everywhere.append(torch.cat([one[:n] for one, n in zip(every, sizes, strict=True)]))
    rows, values = everywhere
    summed = torch.sparse_coo_tensor(rows[None], values, own.shape, check_invariants=False)
    return summed.coalesce()
