"""Exchange between ranks that does not meet that of training."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from train.checkpoints.safetensors_file import bytes_of
from train.runtime.process_group import RankGroup

Value = TypeVar("Value")


class Channel:
    """A process group of its own over all ranks, on the CPU; nothing at all if there is only one.

    A thread that used the group of training would take part in that group's collectives whenever it
    gets there, while ranks match them by their order: gradients would meet manifests, or wait for
    each other for ever.
    """

    def __init__(self, group: RankGroup, *, timeout_s: int = 600) -> None:
        """Connect; all ranks do so at once."""
        self.rank, self.size = group.rank_info.rank, group.rank_info.world_size
        self._group: dist.ProcessGroup | None = None
        if group.connected:
            timeout = timedelta(seconds=timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def any(self, flag: bool) -> bool:
        """Say whether something is so on any rank."""
        if self._group is None:
            return flag
        count = torch.tensor(int(flag))
        dist.all_reduce(count, group=self._group)
        return bool(count)

    def gather(self, value: Value) -> list[Value]:
        """Give rank 0 every rank's value, by rank; to the others, nothing."""
        if self._group is None:
            return [value]
        values = [value] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def scatter(self, values: Sequence[Value]) -> Value:
        """Give each rank its value of rank 0's list."""
        if self._group is None:
            return values[0]
        received: list[Value | None] = [None]
        given = list(values) if self.rank == 0 else None
        dist.scatter_object_list(received, given, src=0, group=self._group)
        return received[0]  # type: ignore[return-value]  # rank 0 has filled it

    def broadcast(self, value: Value) -> Value:
        """Give every rank rank 0's value."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor to rank 0."""
        if tensor.numel():
            dist.send(bytes_of(tensor), dst=0, group=self._group)

    def receive(self, nbytes: int, source: int) -> Tensor:
        """Receive a tensor's bytes."""
        content = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            dist.recv(content, src=source, group=self._group)
        return content

    def sees_one(self, directory: Path) -> bool:
        """Say whether a directory is the same on all ranks: one leaves a mark, all look for it."""
        mark: Path | None = None
        if self.rank == 0 and self.size > 1:
            mark = directory / f".shared-{secrets.token_hex(8)}"
            try:
                mark.touch()
            except OSError:
                mark = None
        name = self.broadcast(mark.name if mark else "")
        missing = self.any(not name or not (directory / name).exists())
        if mark:
            with suppress(OSError):
                mark.unlink()
        return self.size == 1 or not missing
