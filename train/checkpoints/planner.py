"""Planning which tensor parts this rank writes, and copying them.

torch's planner for distributed checkpoints (DCP) decides. If several ranks hold the same part, one
of them writes it, chosen so that each rank writes about as much. The plan does not depend on the
strategy: a DTensor knows which part of a tensor a rank holds.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from ..errors import CheckpointError
from ..runtime.process_group import Channel
from .safetensors_file import TensorPart, size_of


class Planner:
    """Plans once, and again only when the tensors change: the first step adds optimizer moments."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._planned_for: object = None
        self._parts: tuple[TensorPart, ...] = ()
        self.total_bytes = 0
        """On rank 0: total size of the files of all ranks."""

    def parts(self, tensors: Mapping[str, Tensor], *, evenly: bool) -> tuple[TensorPart, ...]:
        """Return the tensor parts for this rank to write; all ranks call this at once.

        `evenly`: each rank writes about as much; else the lowest rank that holds a part writes it.

        Raises:
            CheckpointError: on all ranks; the parts do not make up whole tensors.
        """
        described = {
            name: (tensor.shape, tensor.dtype, getattr(tensor, "placements", None))
            for name, tensor in tensors.items()
        }
        if not self._channel.any(described != self._planned_for):
            return self._parts
        self._planned_for = None
        planner = DefaultSavePlanner(
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
            dedup_save_to_lowest_rank=not evenly,
        )
        planner.set_up_planner(dict(tensors), is_coordinator=self._channel.rank == 0)
        # Skip the empty parts of ranks beyond the end of a small tensor, but keep empty tensors.
        items = [
            item
            for item in planner.create_local_plan().items
            if (data := item.tensor_data) is None
            or math.prod(data.chunk.sizes) > 0
            or math.prod(data.size) == 0
        ]
        plans = self._channel.gather(SavePlan(items))
        answers: list[SavePlan | str] = []
        if self._channel.rank == 0:
            try:
                answers = list(planner.create_global_plan(plans)[0])
            except (AssertionError, ValueError) as error:
                answers = [f"the ranks' parts make up no whole tensors: {error}"] * len(plans)
        self.total_bytes = sum(
            size_of(_parts(plan)) for plan in answers if not isinstance(plan, str)
        )
        plan = self._channel.scatter(answers)
        if isinstance(plan, str):
            raise CheckpointError(plan)
        self._parts, self._planned_for = _parts(plan), described
        return self._parts


def _parts(plan: SavePlan) -> tuple[TensorPart, ...]:
    parts = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, "there are only tensors"
        parts.append(
            TensorPart(
                name=item.index.fqn,
                dtype=data.properties.dtype,
                offsets=tuple(data.chunk.offsets),
                sizes=tuple(data.chunk.sizes),
            )
        )
    return tuple(sorted(parts, key=TensorPart.order))


class Staging:
    """Buffers in host memory, reused for each checkpoint.

    The operating system provides new memory page by page, which takes longer than the copy. For a
    GPU the buffers are pinned, so that the copy runs at the speed of the bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[TensorPart, Tensor] = {}

    def copy(self, parts: Sequence[TensorPart], tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Copy this rank's part of each tensor; valid until the next call."""
        sources = [tensors[part.name].detach() for part in parts]
        sources = [s.to_local() if hasattr(s, "to_local") else s for s in sources]
        if self._buffers.keys() != set(parts):
            # The old buffers are freed before the new ones are allocated.
            self._buffers = {}
            self._buffers = {
                part: torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                for part, source in zip(parts, sources, strict=True)
            }
        buffers = [self._buffers[part] for part in parts]
        if buffers:
            torch._foreach_copy_(buffers, sources, non_blocking=True)
        for device in {source.device for source in sources if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return buffers
