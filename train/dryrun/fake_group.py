"""A world of any size with one real process: tensors without memory, collectives without peers.

torch provides both: tensors of `FakeTensorMode` have shapes only, and collectives of the `fake`
process group return at once. Results that need other ranks are computed here.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

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

from ..model.trees import Tree, sample_count
from ..parallel import consistency, cp, tp
from ..parallel.pipeline.stages import Relay, Untransferable
from ..runtime.process_group import RankGroup
from ..runtime.rank import RankInfo
from .autocast import as_on_cuda
from .counters import wraps_others

ops = torch.ops
StageInputs = dict[tuple[int, int], tuple[torch.Size, torch.dtype]]
"""Shape and type of a pipeline stage's input, by the stage's number and the count of samples. An
entry is known once the stage before has run."""


@contextmanager
def fake_world(rank_info: RankInfo, stage_inputs: StageInputs) -> Iterator[RankGroup]:
    """Become one rank of a world without the other ranks; new tensors have no memory.

    Args:
        rank_info: the rank, and the number of ranks.
        stage_inputs: the inputs of pipeline stages; those that this rank finds are added.
    """
    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank_info.rank, world_size=rank_info.world_size
    )
    try:
        with ExitStack() as stack:
            for replacement in _replacements(stage_inputs):
                stack.enter_context(replacement)
            # A task may have made constants before: real tensors.
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(as_on_cuda())
            stack.enter_context(_ValuesOfFakeTensors())  # type: ignore[no-untyped-call]
            yield FakeGroup(rank_info=rank_info, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        # These caches keep meshes by shape, and the meshes' groups no longer exist.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        _redistribute._gen_transform_infos.cache_clear()


class FakeGroup(RankGroup):
    """The group of a rank that is alone in its world."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Exchange as many bytes as in a real run; the sums are those of ranks that are alike."""
        dist.all_reduce(torch.zeros(len(values), dtype=torch.float64, device=self.device))
        return [float(value) * self.rank_info.world_size for value in values]


class _ValuesOfFakeTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes up what a program reads out of tensors that have no contents."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if wraps_others(types):
            return NotImplemented
        if func is ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # `item()`, of a count of items for instance: any number of the tensor's type will do.
            dtype = args[0].dtype
            return 1.0 if dtype.is_floating_point else dtype is torch.bool or 1
        if func is ops._c10d_functional.wait_tensor.default:
            # A fake tensor would be copied here; a real collective returns the tensor itself.
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is ops.c10d.allreduce_.default:
            # The future of a fake collective holds nothing, but DDP reads its buckets from there.
            future: Future[list[Tensor]] = Future()
            future.set_result(list(args[0]))
            return args[0], _create_work_from_future(future).boxed()
        return result


def keep_buckets(model: nn.Module) -> None:
    """Keep DDP's buckets, if the model is one of DDP's.

    After the first step the reducer would make new buckets and broadcast their sizes, as the
    contents of a tensor.
    """

    class FixedBuckets:
        def __init__(self, reducer: Any) -> None:
            self._reducer = reducer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reducer, name)

        def _rebuild_buckets(self) -> bool:
            return False

    if isinstance(model, DistributedDataParallel):
        model.reducer = FixedBuckets(model.reducer)  # type: ignore[assignment]


def _replacements(stage_inputs: StageInputs) -> list[AbstractContextManager[object]]:
    """List the patches that a fake world needs in torch and in our own code."""
    make_mesh = DeviceMesh.__init__
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    assign_buckets = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    def mesh_of_real_numbers(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        # A mesh reads its rank numbers from a tensor, which must be a real one.
        with _disable_current_modes():
            if isinstance(ranks := kwargs.get("_rank_map"), FakeTensor):
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int)
            make_mesh(self, *args, **kwargs)

    def propagate_uncounted(self: ShardingPropagator, schema: Any) -> Any:
        # DTensor first runs each operation with the whole shape, to find the shape of the result.
        # These runs do not count as part of the step; real ranks also use fake tensors for them.
        with _disable_current_modes():
            return propagate(self, schema)

    def foreach_as_on_a_gpu(
        parameters: list[Tensor], differentiable: bool, use_fused: bool = False
    ) -> tuple[bool, bool]:
        return False, not any(isinstance(p, DTensor) for p in parameters)

    def rebuilt_buckets(
        parameters: list[Tensor], limits: object, sparse: list[bool]
    ) -> tuple[list[list[int]], list[int]]:
        # DDP starts with one bucket of everything. After the first step its buckets have 1 and 25
        # MiB, in the order in which gradients arrive: about the reverse of the parameters'.
        first: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
        sizes = [first, distributed._DEFAULT_BUCKET_CAP_MB * 2**20]
        buckets, bounds = assign_buckets(parameters[::-1], sizes, sparse[::-1])
        last = len(parameters) - 1
        # DDP reverses the list of buckets.
        return [[last - i for i in bucket] for bucket in buckets[::-1]], bounds[::-1]

    def chunks_with_one_empty(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
        # With thousands of ranks, most chunks are empty: one tensor serves them all.
        chunks = list(torch.chunk(tensor, count, dim=dim))
        return chunks + [tensor.new_empty(0)] * (count - len(chunks))

    def run_own_stages(relay: Relay, inputs: Tree) -> dict[int, tuple[Tree, Tree]]:
        # Messages of other ranks are replaced by tensors of the same shape.
        passed = {}
        samples = sample_count(inputs)
        for number, stage in relay._stages.items():
            stage_input = inputs
            if number > 0:
                shape, dtype = stage_inputs[number, samples]
                stage_input = torch.empty(shape, dtype=dtype)
            with torch.no_grad():
                outputs = stage(stage_input)
            passed[number] = (stage_input, outputs)
            if number + 1 in relay._owners:
                if not isinstance(outputs, Tensor):
                    raise Untransferable(number, type(outputs).__name__)
                stage_inputs[number + 1, samples] = (outputs.shape, outputs.dtype)
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return passed

    return [
        patch.object(DeviceMesh, "__init__", mesh_of_real_numbers),
        patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_uncounted),
        # There is one device, and a module's parameters cannot be swapped for fake tensors.
        patch.object(nn.Module, "to", lambda module, *_, **__: module),
        patch.object(adam, "_default_to_fused_or_foreach", foreach_as_on_a_gpu),
        patch.object(sgd, "_default_to_fused_or_foreach", foreach_as_on_a_gpu),
        # A fake tensor has no address; its storage identifies tensors that share memory.
        patch.object(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
        # Fake tensors have no contents that could differ between ranks.
        patch.object(consistency, "fingerprint", lambda tensor: ""),
        patch.object(tp, "check_uncut_gradients", lambda *_, **__: None),
        # The check reads shapes out of tensors, and no other rank's shapes could differ.
        patch.object(distributed, "_verify_param_shape_across_processes", lambda *_: None),
        patch.object(dist, "_compute_bucket_assignment_by_size", rebuilt_buckets),
        # A GPU kernel skips the triangle itself and needs no mask.
        patch.object(cp, "causal_lower_right", lambda *sizes: None),
        patch.object(_fsdp_param, "_chunk_with_empty", chunks_with_one_empty),
        patch.object(Relay, "run", run_own_stages),
    ]
