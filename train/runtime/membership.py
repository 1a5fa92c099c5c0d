"""Which processes are the ranks of a run: each rank once, all of the same number of ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store

from train.errors import PeerError, TrainError, UsageError
from train.runtime.rank import RankInfo

# How long rank 0, whose process may be the store's home, stays for the others to read why they are
# refused.
GRACE_S = 5.0
# The key of the verdict for all ranks; its first value stays.
_VERDICT = "verdict"
_COMPLETE = "complete"
_LEAVING = "a rank has left"


class EndingError(PeerError):
    """The run that met here before is about to leave: coming again helps."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The identity that a process enters at the rendezvous."""

    rank: int
    world_size: int
    launch: str | None
    """Of torchrun; None: not named."""
    host: str
    pid: int
    started: str
    """When the process was started, as the kernel counts: another may have its number later."""
    token: str
    """Of this claim alone: the same process may come again."""

    @classmethod
    def of(cls, rank_info: RankInfo) -> Claim:
        """Claim a place for this process."""
        return cls(
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            launch=rank_info.launch,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            token=uuid.uuid4().hex,
        )

    def put(self, store: Store, key: str) -> Claim:
        """Write the claim if none exists; give the one that is there then."""
        text = store.compare_set(key, "", json.dumps(dataclasses.asdict(self)))
        return Claim(**json.loads(text))

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} (process {self.pid} on {self.host})"

    def is_left_over(self, rank_info: RankInfo) -> bool:
        """Say whether its process has ended, or its launcher, which is ours, is about to end it."""
        if self.launch is not None and self.launch == rank_info.launch:
            return True
        here = self.host == socket.gethostname() and self.started != ""
        return here and _started(self.pid) != self.started


def _started(pid: int) -> str:
    """Give a process's time of start; nothing for one that has ended."""
    try:
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        )
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def gather(store: Store, rank_info: RankInfo, where: str) -> Store:
    """Wait until all ranks have come, each of them once; give the part of the store for them.

    A rank is taken by one operation on the store, and the verdict is made by one: in whatever order
    the operations of all ranks arrive, those of one run meet, and those of two runs are refused.

    Raises:
        UsageError: on all ranks, two processes claim the same rank or count the ranks differently;
            on the later one alone where the others have met before.
        EndingError: the ranks that have met here are just leaving.
        PeerError: not all ranks have come, or one has died and come again.
    """
    store = PrefixStore(f"train/{rank_info.attempt}", store)
    try:
        _come(store, rank_info, where)
    except DistNetworkError as error:
        raise EndingError(f"{where}: rank 0 left as this rank came") from error
    try:
        store.wait([_VERDICT])
    except DistNetworkError as error:
        raise PeerError(f"rank 0 ended before all ranks had met at {where}") from error
    except RuntimeError as error:
        ranks = range(rank_info.world_size)
        missing = [str(rank) for rank in ranks if not store.check([_taken(rank)])]
        shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
        raise PeerError(f"waited in vain for rank {shown} of {rank_info.world_size}") from error
    verdict = store.get(_VERDICT).decode()
    if verdict == _COMPLETE:
        return store
    _have_read(store)
    if rank_info.rank == 0:
        with suppress(RuntimeError):
            store.wait([f"{rank_info.world_size} have read"], timedelta(seconds=GRACE_S))
    raise _error(verdict, rank_info, where)


def _come(store: Store, rank_info: RankInfo, where: str) -> None:
    """Be one more of the ranks that wait for the verdict; raise when it was made before."""
    if rivals := enter(store, rank_info):
        there, new = rivals
        refusal = json.dumps([f"both {there} and {new} have come", there.is_left_over(rank_info)])
        if _decide(store, refusal) == _COMPLETE:
            if store.check([_LEAVING]):
                raise EndingError(f"{where}: the run that met here before has not ended yet")
            raise _error(refusal, rank_info, where)


def enter(store: Store, rank_info: RankInfo) -> tuple[Claim, Claim] | None:
    """Claim a place among the ranks; give the two claims that exclude each other, if any do."""
    claim = Claim.of(rank_info)
    there = claim.put(store, _taken(rank_info.rank))
    if there != claim:
        return there, claim
    first = claim.put(store, "first")
    if first.world_size != claim.world_size:
        return first, claim
    # Counted are different ranks of the same number of ranks: so many are all of them.
    if store.add("members", 1) == rank_info.world_size:
        _decide(store, _COMPLETE)
    return None


def veto(store: Store, rank_info: RankInfo) -> None:
    """Refuse the ranks that wait at a port which another run's rank 0 wanted to serve.

    Its other ranks would come in place of theirs.
    """
    refusal = json.dumps([f"{Claim.of(rank_info)} wanted to serve the same port", False])
    store = PrefixStore(f"train/{rank_info.attempt}", store)
    _decide(store, refusal)
    _have_read(store)


def leave(store: Store, rank_info: RankInfo) -> None:
    """Let rank 0, whose process may be the store's home, be the last to leave."""
    store.set(_LEAVING, "")
    if store.add("left", 1) == rank_info.world_size:
        store.set("all have left", "")
    if rank_info.rank == 0:
        store.wait(["all have left"])


def _taken(rank: int) -> str:
    return f"rank {rank}"


def _decide(store: Store, verdict: str) -> str:
    """Make the verdict, unless it is made; give the one that holds."""
    return store.compare_set(_VERDICT, "", verdict).decode()


def _have_read(store: Store) -> None:
    """Let rank 0 know that one more rank has read the verdict."""
    store.set(f"{store.add('readers', 1)} have read", "")


def _error(refusal: str, rank_info: RankInfo, where: str) -> TrainError:
    """Make of a refusal what this rank raises."""
    reason, transient = json.loads(refusal)
    this = f"this is rank {rank_info.rank} of {rank_info.world_size}"
    text = f"--init-method {where}: {this}, but {reason}: "
    if transient:
        return PeerError(text + "one of them is left over from an earlier try; start all again")
    return UsageError(
        text + "two runs meet at the same place, or RANK is set alike for two processes, or "
        "WORLD_SIZE is not alike for all"
    )
