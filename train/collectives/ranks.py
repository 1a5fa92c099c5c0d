"""The ranks of a demonstration, and how they compare notes without any collective."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from train.runtime.devices import agree_on_device, device_and_backend
from train.runtime.process_group import disconnect
from train.runtime.rank import RankInfo
from train.runtime.rendezvous import meet

Value = TypeVar("Value")


@dataclass(kw_only=True)
class Ranks:
    """This rank, and a notice board that all ranks can read."""

    rank_info: RankInfo
    """Which rank this is, of how many."""
    device: torch.device
    """Where its tensors lie."""
    store: Store
    """The notice board: a key-value store that rank 0 or the launcher serves."""
    timeout: timedelta
    """How long to wait for a rank."""
    rounds: int = field(default=0, init=False)
    """How many exchanges there have been: each has keys of its own."""

    def exchange(self, value: Value) -> list[Value]:
        """Give every rank every rank's value, by rank.

        Through the store, which is TCP and needs no collective: a broken collective could neither
        report nor hide that it is broken.
        """
        self.rounds += 1
        keys = [f"{self.rounds}/{rank}" for rank in range(self.rank_info.world_size)]
        self.store.set(keys[self.rank_info.rank], json.dumps(value))
        self.store.wait(keys, self.timeout)
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def synchronize(self) -> None:
        """Wait for the GPU's queued work, since a call returns earlier."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def connect(rank_info: RankInfo, *, timeout_s: int) -> Iterator[Ranks]:
    """Make the default process group; end it when all went well.

    Raises:
        UsageError: torch lacks the backend, or only some ranks have a GPU.
    """
    timeout = timedelta(seconds=timeout_s)
    device, backend = device_and_backend(rank_info)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with meet(rank_info, "env://", timeout) as store:
        agree_on_device(store, rank_info, device)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        board = PrefixStore(f"train/collectives/{rank_info.restart}", store)
        yield Ranks(rank_info=rank_info, device=device, store=board, timeout=timeout)
        disconnect()
