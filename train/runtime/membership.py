"""Checking the processes of a run: every rank once, and the same world size on all of them."""

import dataclasses
import json
import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import PeerError, TrainError, UsageError
from .rank import RankInfo

GRACE_S = 5.0
"""How long rank 0 stays after a refusal: its process may serve the store from which the others read
the reason."""
_VERDICT = "verdict"
"""The key of the verdict for all ranks; its first value stays."""
_COMPLETE = "complete"
_LEAVING = "a rank has left"


class EndingError(PeerError):
    """The run that met here before is about to leave: a retry helps."""


@dataclass(frozen=True, kw_only=True)
class RankClaim:
    """The identity that a process enters at the rendezvous."""

    rank: int
    world_size: int
    launch: str | None
    """torchrun's rendezvous ID; None: it has none."""
    host: str
    pid: int
    started: str
    """Start time of the process, as the kernel counts: a later process may get the same ID."""
    token: str
    """Unique to this claim: the same process may make another one."""

    @classmethod
    def of(cls, rank_info: RankInfo) -> "RankClaim":
        """Make this process's claim to its rank."""
        return cls(
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            launch=rank_info.launch,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            token=uuid.uuid4().hex,
        )

    def put(self, store: Store, key: str) -> "RankClaim":
        """Write the claim unless the key already holds one; return the claim under the key."""
        text = store.compare_set(key, "", json.dumps(dataclasses.asdict(self)))
        return RankClaim(**json.loads(text))

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} (process {self.pid} on {self.host})"

    def is_left_over(self, rank_info: RankInfo) -> bool:
        """Whether its process has ended, or is about to be ended by our own launcher."""
        if self.launch is not None and self.launch == rank_info.launch:
            return True
        here = self.host == socket.gethostname() and self.started != ""
        return here and _started(self.pid) != self.started


def _started(pid: int) -> str:
    """Return a process's start time; '' for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    state, *fields = text.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def gather(store: Store, rank_info: RankInfo, where: str) -> Store:
    """Wait until all ranks have come, each of them once; return their part of the store.

    One atomic operation on the store claims a rank, and one decides the verdict. So the order of
    the operations does not matter: ranks of one run meet, ranks of two runs are refused.

    Raises:
        UsageError: on all ranks; two processes claim the same rank or have another world size. Only
            on the later process if the others have met before.
        EndingError: the ranks that have met here are just leaving.
        PeerError: not all ranks have come, or one has died and come again.
    """
    store = PrefixStore(f"train/{rank_info.attempt}", store)
    try:
        if rivals := enter(store, rank_info):
            first, second = rivals
            reason = f"both {first} and {second} have come"
            refusal = json.dumps([reason, first.is_left_over(rank_info)])
            # If the other ranks have already met, they continue: only this rank is refused.
            if _decide(store, refusal) == _COMPLETE:
                if store.check([_LEAVING]):
                    raise EndingError(f"{where}: the run that met here before has not ended yet")
                raise _error(refusal, rank_info, where)
    except DistNetworkError as error:
        raise EndingError(f"{where}: rank 0 left as this rank came") from error
    try:
        store.wait([_VERDICT])
    except DistNetworkError as error:
        raise PeerError(f"rank 0 ended before all ranks had met at {where}") from error
    except RuntimeError as error:
        keys = [f"rank {rank}" for rank in range(rank_info.world_size)]
        raise missing_ranks(store, keys) from error
    verdict = store.get(_VERDICT).decode()
    if verdict == _COMPLETE:
        return store
    _have_read(store)
    if rank_info.rank == 0:
        with suppress(RuntimeError):
            store.wait([f"{rank_info.world_size} have read"], timedelta(seconds=GRACE_S))
    raise _error(verdict, rank_info, where)


def enter(store: Store, rank_info: RankInfo) -> tuple[RankClaim, RankClaim] | None:
    """Claim a rank; return the two claims that exclude each other, if any do."""
    claim = RankClaim.of(rank_info)
    holder = claim.put(store, f"rank {rank_info.rank}")
    if holder != claim:
        return holder, claim
    first = claim.put(store, "first")
    if first.world_size != claim.world_size:
        return first, claim
    # This counts different ranks with the same world size: once it reaches that size, all are here.
    if store.add("members", 1) == rank_info.world_size:
        _decide(store, _COMPLETE)
    return None


def veto(store: Store, rank_info: RankInfo) -> None:
    """Refuse the ranks that wait at a port that another run's rank 0 wanted to serve.

    Otherwise they would accept that run's other ranks as their own.
    """
    refusal = json.dumps([f"{RankClaim.of(rank_info)} wanted to serve the same port", False])
    store = PrefixStore(f"train/{rank_info.attempt}", store)
    _decide(store, refusal)
    _have_read(store)


def leave(store: Store, rank_info: RankInfo) -> None:
    """Leave the rendezvous; rank 0 leaves last, as its process may serve the store."""
    store.set(_LEAVING, "")
    rank_0_stays_until_all(store, rank_info, "have left")


def rank_0_stays_until_all(store: Store, rank_info: RankInfo, done: str) -> None:
    """Count the ranks that have done something; rank 0 waits until all have."""
    if store.add(done, 1) == rank_info.world_size:
        store.set(f"all {done}", "")
    if rank_info.rank == 0:
        store.wait([f"all {done}"])


def missing_ranks(store: Store, keys: Sequence[str]) -> PeerError:
    """Make the error that names the ranks with missing keys; keys are in order of rank."""
    missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
    return PeerError(f"timed out waiting for rank {shown} of {len(keys)}")


def _decide(store: Store, verdict: str) -> str:
    """Set the verdict unless there is one; return the verdict in force."""
    return store.compare_set(_VERDICT, "", verdict).decode()


def _have_read(store: Store) -> None:
    """Let rank 0 know that one more rank has read the verdict."""
    store.set(f"{store.add('readers', 1)} have read", "")


def _error(refusal: str, rank_info: RankInfo, where: str) -> TrainError:
    reason, transient = json.loads(refusal)
    this = f"this is rank {rank_info.rank} of {rank_info.world_size}"
    text = f"--init-method {where}: {this}, but {reason}: "
    if transient:
        return PeerError(text + "one of them is left over from an earlier start; restart all ranks")
    return UsageError(
        text + "two runs meet at the same place, or RANK is set alike for two processes, or "
        "WORLD_SIZE is not alike for all"
    )
