"""Data parallel: every rank has the whole model and a slice of each batch.

`--reduce fast` is torch's DistributedDataParallel, `--reduce exact` an exchange of our own.
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
"""How the reducer reports the parameters that it still waits for, and their numbers."""


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
        # The wrapper, not the model, must run the training passes: it is what exchanges gradients.
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
        # In the order in which the reducer numbers them.
        self._trainable = [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and name not in self._sparse.names
        ]
        self._frozen = Frozen(self.model, parts)

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
            # torch names no parameter.
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
            # The forward pass belongs inside as well: it decides whether its backward exchanges.
            with nullcontext() if last else self._ddp.no_sync():
                # DDP takes the mean over the ranks: this turns it back into a sum.
                sums.append(self.backward(batch, factor * self.shards))
        self._frozen.check()
        self._complete()
        self._sparse.average()
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


class ExactDataParallel(WholeModel):
    """Sums the gradients of virtual shards in fixed order: the same bits on any number of ranks.

    DistributedDataParallel gives other last bits on other numbers of ranks: floats are summed in
    another order, batches have another shape, and dropout draws other numbers. Here the global
    batch is always cut in the same V virtual shards. Each is worked on as if it were alone, with
    random numbers of its own, on any rank; and its gradient is one row of a table that is summed
    from top to bottom. A rank does that for a range of columns, so each number goes over the wire
    twice, as in any all-reduce; but nothing is exchanged while the backward pass runs, and there
    are V rows to keep.
    """

    def __init__(self, parts: Parts) -> None:
        if problems := exact_problems(parts.config, parts.layout):
            raise UsageError("\n".join(problems))
        super().__init__(parts, parts.model())
        # So that one rank computes the same bits again, and as another would.
        if parts.group.device.type == "cuda":
            # Must be in the environment before the first matrix is multiplied.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.benchmark = False
            torch.use_deterministic_algorithms(True)
        else:
            # More threads cut sums in other pieces, and a single process may use more than a rank
            # of several does.
            torch.set_num_threads(1)
        compilation.compile_whole(self.model, parts.config)
        self._ranks, self._virtual = parts.layout.world_size, parts.config.virtual_shards
        self._step = 0
        # Buffers of whole numbers that virtual shards have moved by their own samples.
        self._uneven: list[str] = []
        # Frozen parameters must get no gradients.
        self._trainable = [p for p in self.model.parameters() if p.requires_grad]
        self._frozen = Frozen(self.model, parts)

    def warm_up(self, batch: Batch) -> None:
        """Refuse operations that do not give the same bits again, before the first step.

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
                f"operation whose bits are left to chance here: {str(error).partition(',')[0]}; "
                "use another one, or leave out --reduce exact"
            ) from error

    def passes(self) -> int:
        """Count a step's passes on this rank: one for each virtual shard at least."""
        return self._virtual // self._ranks * self.parts.config.micro_batches(self._virtual)

    def begin_step(self, step: int) -> None:
        """Note the step, on which random numbers depend."""
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
            # Leaves the gradients of this virtual shard alone in the parameters.
            self.model.zero_grad(set_to_none=True)
            passes = batch.split_into(self.parts.config.micro_batches(self._virtual))
            sums = self.total([self.backward(part, factor) for part in passes if len(part)])
            if lacking:
                lacking -= {n for n, p in self.model.named_parameters() if p.grad is not None}
            rows.append(self._row(start, sums.loss))
            count += sums.count
            # Anew: a model may replace its buffers.
            for name, buffer in batchnorm.numeric_buffers(self.model).items():
                buffer.copy_(start[name])
        self._frozen.check()
        self._without_gradient = frozenset(lacking)
        own_loss = torch.stack([row[-1] for row in rows]).sum()
        table = torch.stack(rows)
        loss = self._apply(table, sum_rows(table, self._ranks))
        if self.parts.group.rank_info.rank > 0:
            # Rank 0 reports for all; a loss that is not finite is its own rank's to report.
            loss = own_loss * 0.0
        elif not loss.isfinite():
            loss = own_loss
        return Sums(loss=loss, count=count)

    def _virtual_shards(self, micro_batches: Sequence[Batch]) -> list[tuple[int, Batch]]:
        """Cut this rank's slice anew: how it was cut so far depends on the number of ranks."""
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
            # A copy: how a tensor is aligned in memory decides how it is summed.
            shards.append((number, part.mapped(Tensor.clone)))
        return shards

    def _row(self, start: dict[str, Tensor], loss: Tensor) -> Tensor:
        """Put side by side: gradients, how far the buffers have moved, the loss."""
        columns = [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self._trainable
        ]
        columns += [
            (b - start[name]).reshape(-1)
            for name, b in batchnorm.numeric_buffers(self.model).items()
        ]
        return torch.cat([*columns, loss.reshape(1)])

    def has_written(self) -> bool:
        """Whether a pass has written a parameter, or whole numbers by its own samples."""
        return super().has_written() or bool(self._uneven)

    def lost_write(self, names: Sequence[str]) -> str:
        """Describe why what passes have written has no sum."""
        if self._uneven:
            names = some_of(self._uneven)
            return f"{names}, whole numbers, in each virtual shard by its own samples"
        return super().lost_write(names)

    def _apply(self, table: Tensor, total: Tensor) -> Tensor:
        """Take the sum of all rows, of which the table has this rank's, apart; gives the loss."""
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
            # Counters of steps are whole numbers, and move alike in all virtual shards.
            if not buffer.is_floating_point() and not rows.eq(column / self._virtual).all():
                self._uneven.append(name)
            buffer += (moved if buffer.is_floating_point() else moved.round()).to(buffer.dtype)
        return total[-1]


class Frozen:
    """The parameters that no gradient is exchanged for, as they were frozen at the start."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        named = model.named_parameters()
        self._parameters = [(n, p) for n, p in named if not p.requires_grad]
        self._parts = parts

    def check(self) -> None:
        """Make sure that they still are.

        Raises:
            UsageError: names those that each rank would now train by its own samples.
        """
        if thawed := [name for name, p in self._parameters if p.requires_grad]:
            parts = self._parts
            raise UsageError(
                f"--strategy ddp: {some_of(thawed)} of task {parts.task.name!r} was frozen when "
                "the run started and requires a gradient now, which ranks would not exchange: "
                "let model() make it trainable and start again, which goes on from the last "
                "checkpoint, or use --strategy fsdp"
            )


def sum_rows(mine: Tensor, ranks: int) -> Tensor:
    """Add the rows of all ranks from top to bottom; the same bits on any number of ranks.

    Each rank has V / `ranks` rows of shape [n]; rank 0 has the topmost.
    """
    if ranks == 1:
        return _top_to_bottom(mine)
    rows, width = mine.shape
    columns = -(-width // ranks)
    padded = torch.nn.functional.pad(mine, (0, columns * ranks - width))
    # To each rank its columns, of all rows that are here.
    sent = padded.view(rows, ranks, columns).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    part = _top_to_bottom(received.view(ranks * rows, columns))
    total = part.new_empty(ranks * columns)
    dist.all_gather_single(total, part)
    return total[:width]


def _top_to_bottom(table: Tensor) -> Tensor:
    # Not table.sum(0): in which order that adds is its own affair.
    total = table[0].clone()
    for row in table[1:]:
        total += row
    return total


def _bucket_cap_mb(parts: Parts, model: nn.Module) -> int | None:
    """Return how large a bucket of gradients may be, in MiB; None leaves it to DDP.

    The exchanges of PowerSGD follow one another. With several buckets and a backend other than
    NCCL, the second one of a bucket and the first one of the next come in any order, another one on
    each rank, and gloo aborts with "collective mismatch". So all gradients are one bucket there.
    """
    nccl = parts.group.device.type == "cuda" and parts.config.backend in ("auto", "nccl")
    if parts.config.comm_hook != "powersgd" or nccl:
        return None
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    return size // 2**20 + 1
