"""Local SGD: ranks train separately, and average their models every few steps.

With slow links between ranks, the exchange of gradients dominates the step time. Here each rank
makes local optimizer steps on its slice of each batch. Every `--local-steps` steps, all ranks
average their weights (Stich, "Local SGD Converges Fast and Communicates Little", 2019); during the
first `--local-start` steps, they average after each step (post-local SGD, Lin et al. 2020). The
result differs from that of one process, except with SGD and an average after every step.

torch.distributed.algorithms.model_averaging is not used: it averages weights but not the
optimizer's moments, and keeps a step count that no checkpoint would save.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data.order import Batch
from ..model import batchnorm, compilation
from .base import Parts, Sums, WholeModel, scale


class LocalSgd(WholeModel):
    """Averages weights and the optimizer's moments every few steps."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, parts.model())
        compilation.compile_whole(self.model, parts.config)
        self._last_step = 0
        self._step_count, self._factor = 0, 1.0
        # Items since the last average: they are this rank's weight in the next one.
        self._items = 0
        self._uneven = False
        self._parameters: list[tuple[str, nn.Parameter]] = []

    def accumulate(self, micro_batches: Sequence[Batch], factor: float = 1.0) -> Sums:
        """Add the gradients of this rank's summed loss; nothing is exchanged."""
        sums = super().accumulate(micro_batches, factor)
        self._step_count, self._factor = sums.count, factor
        self._items += sums.count
        self._parameters = list(self.named_parameters())
        lacking = [(n, p) for n, p in self._parameters if p.grad is None and p.requires_grad]
        self._without_gradient = frozenset(name for name, _ in lacking)
        if self.parts.config.local_steps == 1:
            # Other ranks' samples may reach the parameter, such as an expert behind a router. One
            # process would then step it. So momentum and weight decay apply here as well, for the
            # mean over all ranks.
            for _, parameter in lacking:
                parameter.grad = torch.zeros_like(parameter)
        return sums

    def scale_gradients(self, factor: float) -> None:
        """Scale gradients to those of the mean loss over this rank's items only."""
        scale(self._parameters, 1.0 / (max(self._step_count, 1) * self._factor))

    def agree_on_norm(self, norm: float) -> float:
        """Return this rank's norm, or NaN if any rank's norm is not finite: then all must stop."""
        bad_ranks = self.parts.group.sum([not math.isfinite(norm)])[0]
        return math.nan if bad_ranks else norm

    def after_step(self, step: int) -> None:
        """Average after each of the first steps, then every `--local-steps` steps."""
        self._last_step = step
        self._uneven |= self.unevenly_trained
        if self.settled(step):
            self._average()

    def finish(self) -> None:
        """Average after the last step, unless this has been done."""
        if not self.settled(self._last_step):
            self._average()

    def unlike(self, names: Sequence[str]) -> list[str]:
        """Name the parameters that differ; between averages all may differ, and none is named."""
        return super().unlike(names) if self.settled(self._last_step) else []

    def settled(self, step: int) -> bool:
        """Whether the ranks have been averaged after this step."""
        config = self.parts.config
        return step <= config.local_start or step % config.local_steps == 0

    def _average(self) -> None:
        """Average over the ranks, weighted by items, in one exchange.

        This includes all tensors that differ between ranks: weights, moments, running statistics.
        """
        if not self.parts.group.connected:
            return
        named = self.named_parameters()
        weights = [parameter.detach() for _, parameter in named if parameter.requires_grad]
        state = self._optimizer.tensors()
        if self._uneven and self.parts.config.local_steps > 1:
            state = self._state_of_all(state)
        # Step counters are already equal; a mean could only round them.
        moments = [tensor for key, tensor in state.items() if not key.endswith("/step")]
        tensors = [*weights, *moments, *batchnorm.moving_buffers(self.model)]
        device = self.parts.group.device
        # The last number carries the rank's weight.
        columns = [tensor.reshape(-1).to(device) for tensor in tensors]
        # torch.cat() joins tensors of different types, except one-byte types.
        columns = [c.float() if c.itemsize == 1 else c for c in columns]
        mine = torch.cat([*columns, torch.ones(1, device=device)])
        # If no rank has had an item, all weigh the same.
        for items in (self._items, 1):
            # Not a product: zero times the infinities of a mask is NaN.
            flat = mine * items if items else torch.zeros_like(mine)
            dist.all_reduce(flat)
            if flat[-1].real > 0:
                break
        flat /= flat[-1].clone()
        means = torch.split(flat[:-1], [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))
        self._items, self._uneven = 0, False

    def _state_of_all(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add optimizer state for parameters that only other ranks have trained.

        The new state is zero; step counters become the largest of any rank.
        """
        slots = {key: (tensor.shape, tensor.dtype) for key, tensor in state.items()}
        steps = {key: tensor.item() for key, tensor in state.items() if key.endswith("/step")}
        of_ranks = self.parts.group.gather((slots, steps))
        wanted = {key: slot for theirs, _ in of_ranks for key, slot in theirs.items()}
        state = self._optimizer.allocate(
            {key: slot for key, slot in wanted.items() if key not in state}
        )
        for _, theirs in of_ranks:
            for key, step in theirs.items():
                state[key].fill_(max(state[key].item(), step))
        return state
