"""Data parallel: every rank has the whole model and a slice of each batch.

`--reduce fast` uses torch's DistributedDataParallel, `--reduce exact` a custom exchange.
"""

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ..cli.compatibility import exact_problems
from ..data.order import Batch, seed_generators, seed_of, share_of
from ..errors import UsageError
from ..model import batchnorm, compilation, sparse
from ..model.trees import joined
from .base import Parts, Sums, WholeModel
from .consistency import some_of
from .sparse_exchange import SparseGradients
from .writes import Writes

_WAITING = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
"""The reducer's error message about missing gradients, with the parameters' numbers."""


class DataParallel(WholeModel):
    """Averages gradients over the ranks while the backward pass is still running."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, parts.model())
        device = parts.group.device
        compilation.compile_whole(self.model, parts.config)
        self._sparse = SparseGradients(self.model)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]  # torch's
            self.model, [*batchnorm.never_sent(self.model), *self._sparse.names]
        )
        # The wrapper, not the model, must run training passes: the wrapper exchanges gradients.
        self.run = self._ddp = DistributedDataParallel(
            self.model,
            # On the CPU a device number is an error.
            device_ids=[device.index] if device.type == "cuda" else None,
            # Gradients live in the communication buckets: no copy in, no copy out.
            gradient_as_bucket_view=True,
            # Running statistics are averaged instead, see batchnorm.py.
            forward_sync_buffers=False,
            bucket_cap_mb=_bucket_cap_mb(parts, self.model),
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
        self._running_statistics = batchnorm.moving_places(self.model)
        # In the order of the reducer's numbers.
        self._trainable = [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and name not in self._sparse.names
        ]
        self._frozen = Frozen(self.model, parts)

    def warm_up(self, batch: Batch) -> None:
        """Let DDP rebuild its buckets now, so that a resumed run sums in the same order.

        DDP rebuilds its buckets after the first backward pass, in the order in which gradients
        arrived. With three ranks or more, the position of a gradient in its bucket decides the
        order of summation over ranks, and so the last bits. An uninterrupted run has the initial
        buckets in step 0 only; a resumed run would have them again in its first step, and would
        differ. Two passes over zeros (the rebuild happens when the second one starts) give every
        run the final buckets from its first real step on. (With two ranks, a + b = b + a hides
        the difference.)
        """
        written = []
        for _ in range(2):
            with self.unchanged():
                writes = Writes(dict(self.named_parameters()), self.norm_device)
                writes.start()
                self._accumulate_zeros(batch)
                written.append({*writes.names()})
        if once := written[0] - written[1]:
            raise UsageError(
                f"--strategy ddp: forward() of the model of task {self.task.name!r} writes "
                f"{some_of(once)} in its first pass only, which ranks make on zeros; have model() "
                "write it, or use --strategy single"
            )

    def _accumulate_zeros(self, batch: Batch) -> None:
        try:
            self.accumulate([batch.zeros()])
        except RuntimeError as error:
            # torch's message does not name the parameter.
            if "sparse" not in str(error).lower():
                raise
            names = [*sparse.gradients(self.named_parameters()), *self.sparse_layers]
            sparse.refuse_exchange(names, task=self.task.name)

    def accumulate(self, micro_batches: Sequence[Batch], factor: float = 1.0) -> Sums:
        """Add the gradients of the summed loss; exchange them once, in the last backward pass."""
        self.start_training()
        sums = []
        for number, batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            # no_sync() must include the forward pass, which decides on the exchange.
            with nullcontext() if last else self._ddp.no_sync():
                # DDP takes the mean over ranks: this factor turns it back into a sum.
                sums.append(self.backward(batch, factor * self.shards))
        self._frozen.check()
        self._complete()
        self._sparse.average()
        batchnorm.average_buffers(self._running_statistics)
        return self.total(sums)

    def _complete(self) -> None:
        """Send zeros for parameters that the last backward pass missed: other ranks wait for them.

        `find_unused_parameters=True` would do so as well, but it walks through the whole graph in
        every step, and leaves zeros for parameters without a gradient on any rank.
        """
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            if (waiting := _WAITING.search(str(error))) is None:
                raise
            missing = [self._trainable[int(number)] for number in waiting[1].split()]
            # Earlier micro-batches may have left a gradient.
            self._without_gradient = frozenset(n for n, p in missing if p.grad is None)
            parameters = [parameter for _, parameter in missing]
            # forward() may have frozen some since the start, for which the reducer waits as well.
            frozen = [p for p in parameters if not p.requires_grad]
            for parameter in frozen:
                parameter.requires_grad_(True)
            torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])
            for parameter in frozen:
                parameter.requires_grad_(False)
            self._ddp.reducer._check_reducer_finalized()
        else:
            self._without_gradient = frozenset()


class ExactDataParallel(WholeModel):
    """Sums the gradients of virtual shards in fixed order: the same bits on any number of ranks.

    With DistributedDataParallel, the last bits depend on the number of ranks: floats are summed in
    another order, batches have another shape, and dropout draws other numbers. Here the global
    batch is always cut into the same V virtual shards. Each shard is computed separately, on any
    rank, with a seed for this shard. Its gradient is one row of a table, which is summed from top
    to bottom. Each rank sums a range of columns, so each number is sent twice, as in any
    all-reduce. The costs: communication does not overlap with the backward pass, and V rows need
    memory.
    """

    def __init__(self, parts: Parts) -> None:
        if problems := exact_problems(parts.config, parts.layout):
            raise UsageError("\n".join(problems))
        super().__init__(parts, parts.model())
        # Make every rank compute the same bits, in every run.
        if parts.group.device.type == "cuda":
            # Must be set before the first matrix multiplication.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.benchmark = False
            torch.use_deterministic_algorithms(True)
        else:
            # The number of threads changes how sums are split, and a single process may use more
            # threads than one of several ranks.
            torch.set_num_threads(1)
        compilation.compile_whole(self.model, parts.config)
        self._ranks, self._virtual = parts.layout.world_size, parts.config.virtual_shards
        self._step = 0
        # Whole-number buffers that change by different amounts in the virtual shards.
        self._uneven: list[str] = []
        # Frozen parameters must get no gradients.
        self._trainable = [p for p in self.model.parameters() if p.requires_grad]
        self._frozen = Frozen(self.model, parts)

    def warm_up(self, batch: Batch) -> None:
        """Refuse nondeterministic operations before the first step.

        torch reports some of them in a pass over zeros.

        Raises:
            UsageError: names the operation.
        """
        if not (torch.are_deterministic_algorithms_enabled() and len(batch)):
            return
        try:
            with self.unchanged():
                self.start_training()
                self.backward(batch.zeros(), 1.0)
                self.evaluate(batch.zeros())
        except RuntimeError as error:
            if "does not have a deterministic implementation" not in str(error):
                raise
            raise UsageError(
                f"--reduce exact: the model or the loss of task {self.task.name!r} uses an "
                f"operation that is not deterministic here: {str(error).partition(',')[0]}; "
                "use another one, or leave out --reduce exact"
            ) from error

    def passes(self) -> int:
        """Count this rank's passes in a step: at least one per virtual shard."""
        return self._virtual // self._ranks * self.parts.config.micro_batches(self._virtual)

    def begin_step(self, step: int) -> None:
        """Store the step, which seeds random numbers."""
        self._step = step

    def accumulate(self, micro_batches: Sequence[Batch], factor: float = 1.0) -> Sums:
        """Add the gradients of the summed loss over all ranks: the same on each."""
        self.start_training()
        buffers = batchnorm.numeric_buffers(self.model)
        start = {name: buffer.clone() for name, buffer in buffers.items()}
        rows, count = [], 0
        lacking = {name for name, p in self.model.named_parameters() if p.requires_grad}
        for number, batch in self._virtual_shards(micro_batches):
            seed = seed_of("virtual", self.parts.config.seed, self._step, number)
            seed_generators(seed, self.parts.group.device)
            # Keep only this virtual shard's gradients in the parameters.
            self.model.zero_grad(set_to_none=True)
            passes = batch.split_into(self.parts.config.micro_batches(self._virtual))
            sums = self.total([self.backward(part, factor) for part in passes if len(part)])
            if lacking:
                lacking -= {n for n, p in self.model.named_parameters() if p.grad is not None}
            rows.append(self._row(start, sums.loss))
            count += sums.count
            # Listed again: a model may replace its buffers.
            for name, buffer in batchnorm.numeric_buffers(self.model).items():
                buffer.copy_(start[name])
        self._frozen.check()
        self._without_gradient = frozenset(lacking)
        own_loss = torch.stack([row[-1] for row in rows]).sum()
        table = torch.stack(rows)
        loss = self._apply(table, sum_rows(table, self._ranks))
        if self.parts.group.rank_info.rank > 0:
            # Rank 0 reports the total; only the rank with a non-finite loss reports that loss.
            loss = own_loss * 0.0
        elif not loss.isfinite():
            loss = own_loss
        return Sums(loss=loss, count=count)

    def _virtual_shards(self, micro_batches: Sequence[Batch]) -> list[tuple[int, Batch]]:
        """Cut this rank's slice into virtual shards, independently of the number of ranks."""
        whole = Batch(
            inputs=joined([batch.inputs for batch in micro_batches]),
            targets=joined([batch.targets for batch in micro_batches]),
        )
        each = self._virtual // self._ranks
        first = self.shard * each
        total = self.parts.config.global_batch
        offset, _ = share_of(total, shard=first, shards=self._virtual)
        shards = []
        for number in range(first, first + each):
            start, stop = share_of(total, shard=number, shards=self._virtual)
            part = whole.part(start - offset, stop - offset)
            # A copy: the alignment of a tensor in memory affects how its sum is computed.
            shards.append((number, part.mapped(Tensor.clone)))
        return shards

    def _row(self, start: dict[str, Tensor], loss: Tensor) -> Tensor:
        """Concatenate the gradients, the changes of buffers, and the loss."""
        columns = [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self._trainable
        ]
        columns += [
            batchnorm.change(b, start[name]).reshape(-1)
            for name, b in batchnorm.numeric_buffers(self.model).items()
        ]
        return torch.cat([*columns, loss.reshape(1)])

    def has_written(self) -> bool:
        """Whether a pass has written a parameter, or whole numbers that differ between shards."""
        return super().has_written() or bool(self._uneven)

    def lost_write(self, names: Sequence[str]) -> str:
        """Describe why the writes of passes cannot be summed; '' if they can."""
        if self._uneven:
            names = some_of(self._uneven)
            return f"{names}, whole numbers, in each virtual shard by its own samples"
        return super().lost_write(names)

    def _apply(self, table: Tensor, total: Tensor) -> Tensor:
        """Assign the total to gradients and buffers; `table` has this rank's rows."""
        named = batchnorm.numeric_buffers(self.model)
        sizes = [t.numel() for t in (*self._trainable, *named.values())]
        columns = torch.split(total[:-1], sizes)
        own = torch.split(table[:, :-1], sizes, dim=1)
        self._uneven = []
        for parameter, column in zip(self._trainable, columns, strict=False):
            parameter.grad = column.view_as(parameter).to(parameter.dtype)
        first = len(self._trainable)
        for (name, buffer), column, rows in zip(
            named.items(), columns[first:], own[first:], strict=True
        ):
            moved = column.view_as(buffer) / self._virtual
            # Step counters are whole numbers, and change equally in all virtual shards.
            if not buffer.is_floating_point() and not rows.eq(column / self._virtual).all():
                self._uneven.append(name)
            buffer += (moved if buffer.is_floating_point() else moved.round()).to(buffer.dtype)
        return total[-1]


class Frozen:
    """The parameters that were frozen at the start: ranks exchange no gradients for them."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        named = model.named_parameters()
        self._parameters = [(n, p) for n, p in named if not p.requires_grad]
        self._parts = parts

    def check(self) -> None:
        """Make sure that these parameters are still frozen.

        Raises:
            UsageError: names parameters that each rank would now train with only its samples.
        """
        if thawed := [name for name, p in self._parameters if p.requires_grad]:
            parts = self._parts
            raise UsageError(
                f"--strategy ddp: {some_of(thawed)} of task {parts.task.name!r} was frozen when "
                "the run started and requires a gradient now, which ranks would not exchange: "
                "let model() make it trainable and start again to continue from the last "
                "checkpoint, or use --strategy fsdp"
            )


def sum_rows(mine: Tensor, ranks: int) -> Tensor:
    """Sum the rows of all ranks from top to bottom: the same bits on any number of ranks.

    Each rank has V / `ranks` rows of shape [n]; rank 0 has the top rows.
    """
    if ranks == 1:
        return _top_to_bottom(mine)
    rows, width = mine.shape
    columns = -(-width // ranks)
    padded = torch.nn.functional.pad(mine, (0, columns * ranks - width))
    # Send each rank its columns of this rank's rows.
    sent = padded.view(rows, ranks, columns).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    part = _top_to_bottom(received.view(ranks * rows, columns))
    total = part.new_empty(ranks * columns)
    dist.all_gather_single(total, part)
    return total[:width]


def _top_to_bottom(table: Tensor) -> Tensor:
    # Not table.sum(0): its order of summation is unspecified.
    total = table[0].clone()
    for row in table[1:]:
        total += row
    return total


def _bucket_cap_mb(parts: Parts, model: nn.Module) -> int | None:
    """Return the largest size of a gradient bucket, in MiB; None leaves the choice to DDP.

    PowerSGD makes two successive exchanges per bucket. With several buckets and a backend other
    than NCCL, the second exchange of a bucket and the first one of the next run in an order that
    differs between ranks, and gloo aborts with "collective mismatch". There, all gradients form a
    single bucket.
    """
    nccl = parts.group.device.type == "cuda" and parts.config.backend in ("auto", "nccl")
    if parts.config.comm_hook != "powersgd" or nccl:
        return None
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    return size // 2**20 + 1
