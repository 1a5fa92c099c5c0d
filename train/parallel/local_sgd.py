"""Local SGD: ranks train by themselves, and become one model again every few steps.

With slow links between ranks, exchanging gradients each step is what takes the time. Here each rank
makes optimizer steps of its own on its slice of each batch; every `--local-steps` steps all take
the mean of their weights (Stich, "Local SGD Converges Fast and Communicates Little", 2019), and in
the first `--local-start` steps after each (post-local SGD, Lin et al. 2020). It computes something
else than one process does: only with SGD and an averaging after every step is it the same.

Not torch.distributed.algorithms.model_averaging: that averages weights but not the optimizer's
moments, and counts steps by itself, so no checkpoint would hold the whole state.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.order import Batch
from ..model import batchnorm, compilation
from .base import Parts, Sums, WholeModel, scale


class LocalSgd(WholeModel):
    """Averages weights and the optimizer's moments now and then."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, parts.model())
        compilation.compile_whole(self.model, parts.config)
        self._last_step = 0
        self._step_count, self._factor = 0, 1.0
        # Items seen since the last averaging: a rank with more of them weighs more.
        self._items = 0

    def accumulate(self, micro_batches: Sequence[Batch], factor: float = 1.0) -> Sums:
        """Add the gradients of this rank's summed loss; nothing is exchanged."""
        sums = super().accumulate(micro_batches, factor)
        self._step_count, self._factor = sums.count, factor
        self._items += sums.count
        return sums

    def scale_gradients(self, factor: float) -> None:
        """Make the gradients those of the mean over this rank's items alone."""
        if self.parts.config.local_steps == 1:
            self._fill_gradients()
        scale(self.named_parameters(), 1.0 / (max(self._step_count, 1) * self._factor))

    def _fill_gradients(self) -> None:
        """Give a parameter zeros where only other ranks' samples reach it, as experts of a router.

        One process steps with their gradient, which this rank's step must be a part of: by weight
        decay and momentum it is one.
        """
        trained = [p for _, p in self.named_parameters() if p.requires_grad]
        reached = self.parts.group.sum([p.grad is not None for p in trained])
        for parameter, ranks in zip(trained, reached, strict=True):
            if ranks and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def agree_on_norm(self, norm: float) -> float:
        """Keep each rank's own norm, unless one of them is not finite: then all must stop."""
        bad_ranks = self.parts.group.sum([not math.isfinite(norm)])[0]
        return math.nan if bad_ranks else norm

    def after_step(self, step: int) -> None:
        """Average after each of the first steps, then after every so many."""
        self._last_step = step
        if self.settled(step):
            self._average()

    def finish(self) -> None:
        """Average at the end, whenever that is."""
        if not self.settled(self._last_step):
            self._average()

    def unlike(self, names: Sequence[str]) -> list[str]:
        """Name the parameters that differ, unless all do as ranks have made steps of their own."""
        return super().unlike(names) if self.settled(self._last_step) else []

    def settled(self, step: int) -> bool:
        """Whether the ranks have been averaged after this step."""
        config = self.parts.config
        return step <= config.local_start or step % config.local_steps == 0

    def _average(self) -> None:
        """Take the mean over the ranks, weighted by items, in one exchange.

        It is taken of what differs between ranks: weights, moments, running statistics.
        """
        if not self.parts.group.connected:
            return
        weights = [parameter.detach() for _, parameter in self.named_parameters()]
        state = self._state_of_all()
        # Counters of steps are alike by now; a mean could only round them.
        moments = [tensor for key, tensor in state.items() if not key.endswith("/step")]
        tensors = [*weights, *moments, *batchnorm.moving_buffers(self.model)]
        device = self.parts.group.device
        # The weight travels along, as the last number.
        columns = [tensor.reshape(-1).to(device) for tensor in tensors]
        # torch joins numbers of any types but those of one byte.
        columns = [c.float() if c.itemsize == 1 else c for c in columns]
        flat = torch.cat([*columns, torch.ones(1, device=device)]) * self._items
        dist.all_reduce(flat)
        flat /= flat[-1].clone()
        means = torch.split(flat[:-1], [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))
        self._items = 0

    def _state_of_all(self) -> dict[str, Tensor]:
        """Return the optimizer's state, with that of parameters that only other ranks have trained.

        It starts at zero here; counters of steps become the largest of any rank.
        """
        state, group = self._optimizer.tensors(), self.parts.group
        mine = {name: 0.0 for name, _ in self.named_parameters()}
        for key, tensor in state.items():
            name, _, slot = key.rpartition("/")
            mine[name] = max(mine[name], tensor.item() if slot == "step" else 1.0)
        counters = list(mine.values())
        sums = group.sum([*counters, *(counter**2 for counter in counters)])
        ranks, half = group.rank_info.world_size, len(counters)
        if all(ranks * b == a * a for a, b in zip(sums[:half], sums[half:], strict=True)):
            return state
        slots = {key: (tensor.shape, tensor.dtype) for key, tensor in state.items()}
        steps = {key: tensor.item() for key, tensor in state.items() if key.endswith("/step")}
        of_ranks = group.gather((slots, steps))
        wanted = {key: slot for theirs, _ in of_ranks for key, slot in theirs.items()}
        state = self._optimizer.allocate(
            {key: slot for key, slot in wanted.items() if key not in state}
        )
        for _, theirs in of_ranks:
            for key, step in theirs.items():
                state[key].fill_(max(state[key].item(), step))
        return state
