"""The figures of `--dry-run` beside torch's own counters, on ranks that really train.

Bytes of memory by `MemTracker`, work by `FlopCounterMode`, bytes on the wire by torch's profiler.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.profiler import profile
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    FlopCounterMode,
    _FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from tests.train.dryrun.test_counts import WIDE
from tests.train.support.ladder import trainer_of
from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.data.order import Batch
from train.dryrun import examine
from train.dryrun.autocast import as_on_cuda
from train.dryrun.counters import EXCHANGES, GRADIENTS, OPTIMIZER, PARAMETERS
from train.dryrun.simulate import EVALUATION, TRAINING
from train.loop import Trainer
from train.parallel import cp
from train.parallel.base import local
from train.runtime.process_group import Alone, RankGroup
from train.runtime.rank import RankInfo

aten = torch.ops.aten
CHARS: dict[str, Any] = {"task": "chars", "global_batch": 16}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "single": CHARS,
        "single, many parameters": {"task": WIDE},
        "single, bf16": CHARS | {"precision": "bf16"},
        "single, evaluation": CHARS | {"eval_batch": 64},
    },
    2: {
        "ddp": CHARS | {"strategy": "ddp"},
        "ddp, several buckets": {"task": WIDE, "strategy": "ddp"},
        "fsdp": CHARS | {"strategy": "fsdp"},
        "fsdp, bf16": CHARS | {"strategy": "fsdp", "precision": "bf16"},
        "fsdp, reduced once": {
            **{"task": WIDE, "strategy": "fsdp", "global_batch": 8, "micro_batch": 2},
            **{"gradient_sync": "last"},
        },
        "fsdp, reduced each time": {
            **{"task": WIDE, "strategy": "fsdp", "global_batch": 8, "micro_batch": 2},
            **{"gradient_sync": "each"},
        },
        "fsdp, evaluation": CHARS | {"strategy": "fsdp", "eval_batch": 64},
        "tp": CHARS | {"tp": 2},
        "tp, loss parallel": CHARS | {"tp": 2, "loss_parallel": True},
        "cp": CHARS | {"cp": 2},
        "cp, ulysses": CHARS | {"cp": 2, "cp_method": "ulysses"},
        "pp": CHARS | {"pp": 2},
        "pp, evaluation": CHARS | {"pp": 2, "eval_batch": 64},
    },
    4: {
        "hsdp, reduced each time": {
            **{"task": WIDE, "dp_replicate": 2, "dp_shard": 2, "global_batch": 8},
            **{"micro_batch": 1, "gradient_sync": "each"},
        },
        "fsdp x tp": CHARS | {"dp_shard": 2, "tp": 2, "loss_parallel": True},
        "pp x fsdp": CHARS | {"pp": 2, "dp_shard": 2},
    },
}
FLOAT = 4
WIDTHS = {"c10::BFloat16": 2, "double": 8, "long int": 8, "unsigned char": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """What torch's counters say of one rank's step."""

    memory: dict[str, int]
    """Bytes at the peak of `training` and of `evaluation`."""
    state: dict[str, int]
    """Bytes of parameters, of their gradients before the step is made, and of the optimizer."""
    flops: float
    traffic: dict[tuple[str, int], float]
    """Calls by kind and bytes."""


class Bytes(MemTracker):  # type: ignore[no-untyped-call]
    """torch's counter without its books on modules, which may then run several times in a step."""

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None: ...
    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None: ...
    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None: ...
    def _post_bw_hook(self, module: nn.Module, args: Any) -> None: ...

    @property
    def peak(self) -> int:
        return max(self._peak_mem.values())

    def forget_the_peak(self) -> None:
        self._peak_mem.clear()


class LocalFlops(FlopCounterMode):
    """torch's counter for what this rank computes, where it would count whole DTensors."""

    def __enter__(self) -> LocalFlops:
        super().__enter__()  # type: ignore[no-untyped-call]
        assert self.mode is not None
        self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.mode = _LocalMode(self)
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        return self


class _LocalMode(_FlopCounterMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if active_fake_mode() is not None:
            # DTensor computes shapes.
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The CPU's attention; torch's table has only the GPU's."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


def counted(rank: int, world: int) -> dict[str, Counted]:
    """Count the third step of each case."""
    # The hooks of torch's counters are for models of one module.
    warnings.simplefilter("ignore")
    # As in a rehearsal: the kernel's business.
    setattr(cp, "causal_lower_right", lambda *sizes: None)  # noqa: B010  # its type is another's
    rank_info = RankInfo(
        rank=rank, world_size=world, local_rank=rank, local_world_size=world, launched=True
    )
    group = (Alone if world == 1 else RankGroup)(rank_info=rank_info, device=torch.device("cpu"))
    results = {}
    for name, chosen in CASES[world].items():
        config = Config(**chosen)
        with tempfile.TemporaryDirectory() as folder, as_on_cuda():
            trainer = trainer_of(config, config.layout_on(rank_info), group, Path(folder))
            results[name] = count(trainer, Path(folder))
            group.sum([0.0])
    return results


def count(trainer: Trainer, folder: Path) -> Counted:
    optimizer, strategy = trainer.optimizer, trainer.strategy
    if trainer.config.optimizer == "adamw":
        for group in optimizer._optimizer.param_groups:
            # As on a GPU.
            group["fused"] = True
    gradients: list[Tensor] = []
    step = optimizer.step

    def noted(lr: float | None = None) -> None:
        gradients[:] = [local(p.grad) for _, p in strategy.named_parameters() if p.grad is not None]
        step(lr)

    optimizer.step = noted  # type: ignore[method-assign]
    for _ in range(2):
        trainer.train_step()
    optimizer.step = step  # type: ignore[method-assign]
    state = {
        PARAMETERS: nbytes(p for _, p in strategy.named_parameters()),
        GRADIENTS: nbytes(gradients),
        OPTIMIZER: nbytes(optimizer.tensors().values()),
    }
    # DDP keeps its buckets, and gradients are views of them; others make gradients anew.
    kept = gradients if trainer.config.strategy == "ddp" else []
    memory = {}
    tested = trainer.test.take(torch.arange(trainer.config.eval_batch or 1))
    with tracked(trainer, kept) as tracker:
        gradients.clear()
        trainer.train_step()
        memory[TRAINING] = tracker.peak
        batch = tested.mapped(torch.clone)
        tracker.forget_the_peak()
        strategy.evaluate(batch)
        memory[EVALUATION] = tracker.peak
    with LocalFlops(display=False, custom_mapping=ATTENTION) as flops:
        trainer.train_step()
    with profile(record_shapes=True) as profiler:
        trainer.train_step()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    traced = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return Counted(
        memory=memory,
        state=state,
        flops=flops.get_total_flops(),
        traffic=collectives(traced, trainer.group.rank_info.world_size),
    )


@contextmanager
def tracked(trainer: Trainer, kept: Iterable[Tensor] = ()) -> Iterator[Bytes]:
    """Count the memory of allocations, without model, optimizer, and other permanent tensors.

    Of the data, the batch of the next step is counted, but not the order in which all are drawn,
    since a rehearsal leaves out the data set.
    """
    tracker, read = Bytes(), trainer.feed.batch
    batches = [read(0)]

    def once(samples_seen: int) -> Batch:
        trainer.feed.batch = read  # type: ignore[method-assign]
        return batches.pop()

    trainer.feed.batch = once  # type: ignore[method-assign]
    stages: dict[int, nn.Module] = getattr(trainer.strategy, "_stages", {})
    modules = list(stages.values()) or [trainer.strategy.model]  # type: ignore[attr-defined]
    data = tree_leaves((batches[0].inputs, batches[0].targets))
    tracker.track_external(*modules, trainer.optimizer._optimizer, *kept, *data)
    del data, kept
    with tracker:
        yield tracker


def collectives(events: Iterable[dict[str, Any]], world: int) -> dict[tuple[str, int], float]:
    """Read what the profiler has noted of each call of torch's process groups."""
    calls: Counter[tuple[str, int]] = Counter()
    for event in events:
        space, _, name = event.get("name", "").partition("::")
        kind = next((k for prefix, k in EXCHANGES.items() if name.startswith(prefix)), None)
        if space == "c10d" and kind is not None:
            noted = zip(event["args"]["Input Dims"], event["args"]["Input type"], strict=True)
            payload = max(numbers(shape) * WIDTHS.get(of, FLOAT) for shape, of in noted)
            # Of those that take a list for each rank, it has noted one rank's part.
            calls[kind, payload * (world if name in ("allgather_", "reduce_scatter_") else 1)] += 1
    return without_agreement(calls)


def without_agreement(calls: Mapping[tuple[str, int], float]) -> dict[tuple[str, int], float]:
    """Leave out what the loop agrees on: few numbers, whose type the profiler does not note."""
    return {key: times for key, times in calls.items() if key[1] > 10 * FLOAT}


def numbers(shape: list[Any]) -> int:
    """Count the numbers of a tensor, or of a list of tensors."""
    if shape and isinstance(shape[0], list):
        return sum(map(numbers, shape))
    return math.prod(shape) if shape else 0


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_torch_counts_what_the_rehearsal_does(world: int) -> None:
    by_rank = on_ranks(world, counted, world)
    for name, chosen in CASES[world].items():
        alone = {"ddp": "dp_replicate", "fsdp": "dp_shard"}.get(chosen.get("strategy", ""))
        plan = {**chosen, **({alone: world} if alone else {})}
        for rehearsed in examine(Config(**plan)).ranks:
            real = by_rank[rehearsed.rank][name]
            case = f"{name}, rank {rehearsed.rank}"
            memory = rehearsed.memory
            # A thread of gloo may free its send buffer a moment late.
            late = max((size for _, size in real.traffic), default=0)
            assert 0 <= max(real.memory.values()) - sum(memory.values()) <= late, case
            assert rehearsed.peak == max(real.memory, key=real.memory.__getitem__), case
            assert rehearsed.peak == (EVALUATION if "eval_batch" in chosen else TRAINING), case
            assert memory[PARAMETERS] == real.state[PARAMETERS], case
            assert memory[OPTIMIZER] == real.state[OPTIMIZER], case
            # At the peak, they may be gone or yet to come.
            assert memory[GRADIENTS] <= real.state[GRADIENTS], case
            assert rehearsed.flops == real.flops, case
            sent = {(e.kind, e.payload): calls for e, calls in rehearsed.traffic.items()}
            assert without_agreement(sent) == real.traffic, case
