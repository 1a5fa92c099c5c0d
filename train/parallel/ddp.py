"""DistributedDataParallel: every rank has the whole model and a slice of each batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from train.data.order import Batch
from train.model import batchnorm, compilation
from train.parallel.base import Parts, Sums, WholeModel

# How the reducer reports the parameters that it still waits for, and their numbers.
_WAITING = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class DataParallel(WholeModel):
    """Averages gradients over the ranks while the backward pass is still running."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, parts.model())
        device = parts.group.device
        compilation.compile_whole(self.model, parts.config)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]  # torch's
            self.model, batchnorm.never_sent(self.model)
        )
        # The wrapper, not the model, must run the training passes: it is what exchanges gradients.
        self.run = self._ddp = DistributedDataParallel(
            self.model,
            # On the CPU a device number is an error.
            device_ids=[device.index] if device.type == "cuda" else None,
            # Gradients live in the communication buckets: no copy in, no copy out.
            gradient_as_bucket_view=True,
            # Running statistics are averaged instead, see batchnorm.py.
            forward_sync_buffers=False,
        )
        # Compress the gradients that are exchanged: half the bytes, or factors of low rank.
        match parts.config.comm_hook:
            case "fp16":
                self._ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
            case "bf16":
                self._ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
            case "powersgd":
                # Its first steps are exact; it starts after DDP has rebuilt its buckets.
                state = powerSGD_hook.PowerSGDState(
                    process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=10
                )
                self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self._running_statistics = batchnorm.moving_buffers(self.model)
        # In the order in which the reducer numbers them.
        self._trainable = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def warm_up(self, batch: Batch) -> None:
        """Let DDP rebuild its buckets now, so that a resumed run sums in the same order.

        DDP sorts its buckets anew after the first backward pass, in the order in which gradients
        arrived. From three ranks on, the place of a gradient in its bucket decides in which order
        the ranks' numbers are added, hence the last bits. An unbroken run has old buckets in step
        0 only; a resumed one would have them again in its first step, and would differ. Two
        passes over zeros (the rebuild happens when the second one starts) leave every run with
        the final buckets from its first real step on. (With two ranks a + b = b + a hides all
        this.)
        """
        with self.unchanged():
            for _ in range(2):
                self.accumulate([batch.zeros()])

    def accumulate(self, micro_batches: Sequence[Batch], factor: float = 1.0) -> Sums:
        """Add the gradients of the summed loss; exchange them once, in the last backward pass."""
        self.start_training()
        sums = []
        for number, batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            # The forward pass belongs inside as well: it decides whether its backward exchanges.
            with nullcontext() if last else self._ddp.no_sync():
                # DDP takes the mean over the ranks: this turns it back into a sum.
                sums.append(self.backward(batch, factor * self.shards))
        self._complete()
        batchnorm.average_buffers(self._running_statistics)
        return self.total(sums)

    def _complete(self) -> None:
        """Send zeros for what the last backward pass did not reach: the other ranks wait for it.

        This is what `find_unused_parameters=True` is for, which walks through the whole graph in
        every step, and leaves zeros for parameters without a gradient on any rank.
        """
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            if (waiting := _WAITING.search(str(error))) is None:
                raise
            missing = [self._trainable[int(number)] for number in waiting[1].split()]
            # Of earlier micro-batches there may be one.
            self._without_gradient = frozenset(n for n, p in missing if p.grad is None)
            parameters = [parameter for _, parameter in missing]
            torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])
            self._ddp.reducer._check_reducer_finalized()
        else:
            self._without_gradient = frozenset()
