"""A world of any size with one real process: tensors without memory, collectives without peers.

torch brings both: `FakeTensorMode`, whose tensors have shapes only, and the `fake` process group,
whose collectives return at once. Results that need other ranks are computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    _create_work_from_future,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.optim import adam, sgd
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from train.dryrun.autocast import as_on_cuda
from train.dryrun.op_mode import wraps_others
from train.model.trees import Tree, sample_count
from train.parallel import consistency, cp, tp
from train.parallel.pipeline.stages import Relay, Untransferable
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo

ops = torch.ops
# What goes in at a stage of a pipeline, by its number and how many samples go through; known once
# the stage before has run.
Boundaries = dict[tuple[int, int], tuple[torch.Size, torch.dtype]]


@contextmanager
def pretend(rank_info: RankInfo, boundaries: Boundaries) -> Iterator[RankGroup]:
    """Become one rank of a world without the other ranks; tensors made meanwhile have no memory.

    Args:
        rank_info: which rank, of how many.
        boundaries: what other stages of a pipeline give; this rank's are added.
    """
    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank_info.rank, world_size=rank_info.world_size
    )
    try:
        with ExitStack() as stack:
            for patch in _patches(boundaries):
                stack.enter_context(patch)
            # Constants that a task has made before are as good.
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(as_on_cuda())
            stack.enter_context(_Answers())  # type: ignore[no-untyped-call]
            yield Rehearsing(rank_info=rank_info, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        # They remember meshes by their shape, with groups that are gone.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        _redistribute._gen_transform_infos.cache_clear()


class Rehearsing(RankGroup):
    """The group of a rank that is alone in its world."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Exchange as many bytes as in a real run; the sums are made up."""
        dist.all_reduce(torch.zeros(len(values), dtype=torch.float64, device=self.device))
        return [1.0] * len(values)


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers reads of the contents of tensors without contents."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if wraps_others(types):
            return NotImplemented
        if func is ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # A number read back, such as a count of items: any will do.
            return _number(args[0].dtype)
        if func is ops._c10d_functional.wait_tensor.default:
            # Without contents it would be a copy; a real one hands on what it has waited for.
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is ops.c10d.allreduce_.default:
            # The future of a fake collective holds nothing, but DDP reads its buckets from there.
            future: Future[list[Tensor]] = Future()
            future.set_result(list(args[0]))
            return args[0], _create_work_from_future(future).boxed()
        return result


def rehearsable(model: nn.Module) -> None:
    """Change what only a wrapped model shows: call it when the strategy is built."""
    if isinstance(model, DistributedDataParallel):
        model.reducer = _Reducer(model.reducer)  # type: ignore[assignment]


class _Reducer:
    """DDP's reducer, which keeps the buckets that it has.

    It would make new ones after the first step, and tell the others which, in a tensor's numbers.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _number(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return 1.0
    return True if dtype is torch.bool else 1


def _patches(boundaries: Boundaries) -> list[Any]:
    """List what of torch and of ours works otherwise while pretending."""
    make_mesh = DeviceMesh.__init__

    def on_real_tensors(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        # A mesh reads rank numbers from a tensor of its own.
        with _disable_current_modes():
            if isinstance(ranks := kwargs.get("_rank_map"), FakeTensor):
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int)
            make_mesh(self, *args, **kwargs)

    def stays(module: nn.Module, *args: object, **kwargs: object) -> nn.Module:
        # There is one device, and the parameters of a module cannot be swapped.
        return module

    def as_on_a_gpu(
        parameters: list[Tensor], differentiable: bool, use_fused: bool = False
    ) -> tuple[bool, bool]:
        return False, not any(isinstance(p, DTensor) for p in parameters)

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unobserved(self: ShardingPropagator, schema: Any) -> Any:
        # DTensor runs each operation on tensors of the whole shape to learn what it gives. They are
        # no part of the step, and real ranks have them without contents, too.
        with _disable_current_modes():
            return propagate(self, schema)

    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    def as_rebuilt(
        parameters: list[Tensor], limits: object, sparse: list[bool]
    ) -> tuple[list[list[int]], list[int]]:
        # DDP starts with one bucket of everything. After the first step they are of 1 and of 25
        # MiB, in the order in which gradients arrive: about the reverse of the parameters'.
        first: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
        sizes = [first, distributed._DEFAULT_BUCKET_CAP_MB * 2**20]
        buckets, bounds = assign(parameters[::-1], sizes, sparse[::-1])
        last = len(parameters) - 1
        # DDP will turn them round.
        return [[last - i for i in bucket] for bucket in buckets[::-1]], bounds[::-1]

    def cut(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
        # Where there are thousands of ranks, most get nothing: here all the same.
        chunks = list(torch.chunk(tensor, count, dim=dim))
        return chunks + [tensor.new_empty(0)] * (count - len(chunks))

    def hand_on(relay: Relay, inputs: Tree) -> dict[int, tuple[Tree, Tree]]:
        return _hand_on(relay, inputs, boundaries)

    return [
        _replaced(DeviceMesh, "__init__", on_real_tensors),
        _replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", unobserved),
        _replaced(nn.Module, "to", stays),
        _replaced(adam, "_default_to_fused_or_foreach", as_on_a_gpu),
        _replaced(sgd, "_default_to_fused_or_foreach", as_on_a_gpu),
        # Tensors that share memory are known although there is none.
        _replaced(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
        # Nothing is in the tensors, and nobody's could differ.
        _replaced(consistency, "fingerprint", lambda tensor: ""),
        _replaced(tp, "check_uncut_gradients", lambda *_, **__: None),
        # It reads shapes from tensors; here are no other ranks whose shapes could differ.
        _replaced(distributed, "_verify_param_shape_across_processes", lambda *_: None),
        _replaced(dist, "_compute_bucket_assignment_by_size", as_rebuilt),
        # As on a GPU, where the triangle is the kernel's business and no mask is made.
        _replaced(cp, "causal_lower_right", lambda *sizes: None),
        _replaced(_fsdp_param, "_chunk_with_empty", cut),
        _replaced(Relay, "run", hand_on),
    ]


def _hand_on(relay: Relay, inputs: Tree, boundaries: Boundaries) -> dict[int, tuple[Tree, Tree]]:
    """Run a rank's stages; derive the messages of other ranks from their known state."""
    passed = {}
    samples = sample_count(inputs)
    for number, stage in relay._stages.items():
        taken = inputs if number == 0 else _empty(*boundaries[number, samples])
        stage.eval()
        with torch.no_grad():
            given = stage(taken)
        passed[number] = (taken, given)
        if number + 1 in relay._owners:
            if not isinstance(given, Tensor):
                raise Untransferable(number, type(given).__name__)
            boundaries[number + 1, samples] = (given.shape, given.dtype)
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    return passed


def _empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Have an attribute be something else for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
