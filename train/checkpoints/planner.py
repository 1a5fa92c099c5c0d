"""The rank that writes each part: torch's planner for distributed checkpoints (DCP) decides.

What several ranks have is written by one of them, so that each writes about as much. It does not
depend on the strategy: a DTensor knows which part of a tensor a rank has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from train.checkpoints.process_group import Channel
from train.checkpoints.safetensors_file import TensorPart, size_of
from train.errors import CheckpointError


class Planner:
    """Plans once, and again only when the tensors have changed: the first step adds moments."""

    def __init__(self, channel: Channel) -> None:
        """Exchange plans over `channel`."""
        self._channel = channel
        self._planned_for: object = None
        self._parts: tuple[TensorPart, ...] = ()
        self.total_bytes = 0
        """On rank 0: how long the files of all ranks are together."""

    def parts(self, tensors: Mapping[str, Tensor], *, evenly: bool) -> tuple[TensorPart, ...]:
        """Give the parts that this rank writes; all ranks call this at once.

        Args:
            tensors: this rank's.
            evenly: whether each rank shall write about as much; else each part is the lowest
                rank's that has it.

        Raises:
            CheckpointError: on all ranks; the parts do not make up whole tensors.
        """
        described = {name: _describe(tensor) for name, tensor in tensors.items()}
        if self._channel.any(described != self._planned_for):
            self._planned_for = None
            self._parts = self._plan(tensors, evenly)
            self._planned_for = described
        return self._parts

    def _plan(self, tensors: Mapping[str, Tensor], evenly: bool) -> tuple[TensorPart, ...]:
        planner = DefaultSavePlanner(
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
            dedup_save_to_lowest_rank=not evenly,
        )
        planner.set_up_planner(dict(tensors), is_coordinator=self._channel.rank == 0)
        local = planner.create_local_plan()
        plans = self._channel.gather(SavePlan([i for i in local.items if not _is_empty(i)]))
        answers: list[SavePlan | str] = []
        if self._channel.rank == 0:
            try:
                answers = list(planner.create_global_plan(plans)[0])
            except (AssertionError, ValueError) as error:
                answers = [f"the ranks' parts make up no whole tensors: {error}"] * len(plans)
        self.total_bytes = sum(
            size_of(_parts(plan)) for plan in answers if not isinstance(plan, str)
        )
        mine = self._channel.scatter(answers)
        if isinstance(mine, str):
            raise CheckpointError(mine)
        return _parts(mine)


def _describe(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, getattr(tensor, "placements", None)


def _is_empty(item: WriteItem) -> bool:
    """Say whether this is nothing of something: ranks beyond the end of a small tensor."""
    data = item.tensor_data
    assert data is not None, "there are only tensors"
    return math.prod(data.chunk.sizes) == 0 and math.prod(data.size) > 0


def _parts(plan: SavePlan) -> tuple[TensorPart, ...]:
    return tuple(sorted((_part(item) for item in plan.items), key=TensorPart.order))


def _part(item: WriteItem) -> TensorPart:
    data = item.tensor_data
    assert data is not None, "there are only tensors"
    return TensorPart(
        name=item.index.fqn,
        dtype=data.properties.dtype,
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )
