"""A batch on its way through the stages of a pipeline, without gradients and without a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from train.model.trees import Tree


class Untransferable(Exception):
    """What a stage gives the next one is not one tensor; arguments: its number, its output."""

    def __init__(self, stage: int, kind: str) -> None:
        """Note the stage, and the name of the type that it gives."""
        super().__init__(stage, kind)
        self.stage, self.kind = stage, kind


class Relay:
    """Runs this rank's stages in turn, and sends their output to the rank of the next stage.

    Of any shape: each tensor is announced. So batches need no padding, and nothing depends on how
    many there are.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        owners: Mapping[int, int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Describe the pipeline.

        Args:
            stages: this rank's, by number, in the order of the forward pass.
            owners: which rank of the pipeline holds which stage.
            group: the ranks of the pipeline.
            device: where this rank's stages are.
        """
        self._stages, self._owners = stages, owners
        self._group, self._device = group, device

    def run(self, inputs: Tree) -> dict[int, tuple[Tree, Tree]]:
        """Send a batch through all stages; give what went in and out of this rank's.

        Raises:
            Untransferable: on this rank or one before it, a stage gives the next no single tensor.
        """
        passed: dict[int, tuple[Tree, Tree]] = {}
        hidden = inputs
        for number, stage in self._stages.items():
            if number > 0 and number - 1 not in self._stages:
                hidden = self._receive(self._owners[number - 1])
            stage.eval()
            with torch.no_grad():
                given = hidden if isinstance(hidden, Untransferable) else stage(hidden)
            if number + 1 in self._owners and not isinstance(given, Tensor | Untransferable):
                # The others hear of it, too: they wait for what this stage gives.
                given = Untransferable(number, type(given).__name__)
            passed[number] = (hidden, given)
            hidden = given
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    # Without a backward pass, gathered parameters must be freed here.
                    module.reshard()
            if number + 1 in self._owners and number + 1 not in self._stages:
                self._send(hidden, self._owners[number + 1])
        if isinstance(hidden, Untransferable):
            raise hidden
        return passed

    def _send(self, hidden: Any, rank: int) -> None:
        peer = dist.get_global_rank(self._group, rank)
        tensor = isinstance(hidden, Tensor)
        announced = [(hidden.shape, hidden.dtype) if tensor else hidden.args]
        dist.send_object_list(announced, dst=peer, group=self._group, device=self._device)
        if tensor:
            dist.send(hidden.contiguous(), dst=peer, group=self._group)

    def _receive(self, rank: int) -> Tensor | Untransferable:
        peer = dist.get_global_rank(self._group, rank)
        announced: list[Any] = [None]
        dist.recv_object_list(announced, src=peer, group=self._group, device=self._device)
        shape, dtype = announced[0]
        if not isinstance(dtype, torch.dtype):
            return Untransferable(*announced[0])
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(tensor, src=peer, group=self._group)
        return tensor
