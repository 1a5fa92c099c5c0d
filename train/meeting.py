"""Where the ranks of a run meet: a key-value store that each of them can reach.

`env://` is torchrun's (or anybody's who sets MASTER_ADDR and MASTER_PORT), `tcp://` a port of rank
0's that was agreed on beforehand, `file://` a file that all ranks see.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from train.environment import Place
from train.errors import PeerError, UsageError

# torchrun sets it for its workers; "True": all of them are clients of a store that torchrun serves.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# How long to look often for a store that is not served yet; torch's client goes on from there.
_KNOCK_S = 5.0
# A FileStore that is freed may make its file anew: they live as long as the process.
_kept: list[Store] = []


@contextmanager
def meet(place: Place, init_method: str, timeout: timedelta) -> Iterator[Store]:
    """Reach the store where all ranks meet; leave it together when all went well.

    Raises:
        UsageError: somebody else is there already.
    """
    if init_method == "env://" and place.meeting:
        # The process that spawned us has made a place of its own.
        init_method = place.meeting
    if init_method.startswith("file://"):
        with _file(Path(init_method.removeprefix("file://")), place, timeout) as store:
            yield store
    elif init_method.startswith("tcp://"):
        # With it, rank 0 too would only knock at the port, which nobody serves.
        os.environ.pop(AGENT_STORE, None)
        url = f"{init_method}?rank={place.rank}&world_size={place.world_size}"
        address = urlsplit(init_method)
        await_server(address.hostname, address.port, place, timeout)
        store = _alone(_served(url, timeout, init_method), place, init_method)
        yield store
        _leave(store, place)
    else:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        await_server(host, port, place, timeout)
        store = _served(init_method, timeout, f"{host}:{port}")
        yield store
        # Also under torchrun, where it says "False": told not to share its store, it lets rank 0
        # serve another.
        if os.environ.get(AGENT_STORE) != "True":
            _leave(store, place)


def keys_of_this_try(purpose: str, place: Place, store: Store) -> Store:
    """Keep our keys apart from those of the try before, if it has had the same store.

    Only torchrun's shared store outlives a restart. Elsewhere the number of the restart must not be
    part of a key: torchrun's agents count for themselves, and after a failure one may count a
    restart where another has only seen that ranks come and go.
    """
    restart = place.restart if os.environ.get(AGENT_STORE) == "True" else 0
    return PrefixStore(f"train/{purpose}/{restart}", store)


def await_server(
    host: str | None, port: str | int | None, place: Place, timeout: timedelta
) -> None:
    """Return as soon as rank 0 serves its store.

    torch's own client, refused once, tries again only after a quarter of a second and then ever
    later: of two ranks that start together, that was a twentieth of the way to the first step. What
    is wrong with an address, or that nobody comes, is left for it to say.
    """
    deadline, pause_s = time.monotonic() + min(_KNOCK_S, timeout.total_seconds()), 0.02
    while place.rank != 0 and host and port and time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=pause_s + 1).close()
            return
        except ConnectionRefusedError:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.1, 0.2)
        except (OSError, ValueError):
            return


def _served(url: str, timeout: timedelta, where: str) -> Store:
    """Reach the store of an address; rank 0 serves it.

    Raises:
        UsageError: somebody else is there already.
        PeerError: not all ranks have come.
    """
    store: Store
    try:
        store, _, _ = next(rendezvous(url, timeout=timeout))
    except (DistNetworkError, DistStoreError) as error:
        if "EADDRINUSE" not in str(error):
            patience = f"{timeout.total_seconds():g} s (--timeout-s)"
            reason = str(error).partition("\n")[0]
            raise PeerError(
                f"not all ranks have met at {where} within {patience} [{reason}]"
            ) from error
        raise UsageError(
            f"{where}: the port is taken on {socket.gethostname()}, by another run perhaps; choose "
            "another one"
        ) from error
    store.set_timeout(timeout)
    return store


@contextmanager
def _file(path: Path, place: Place, timeout: timedelta) -> Iterator[Store]:
    """Meet in a file of this try's own.

    What an earlier run has left in a file would be taken for the answers of this one's ranks, which
    then wait for the dead.
    """
    tries = [
        path.with_name(f"{path.name}.attempt-{place.attempt}.restart-{number}")
        for number in range(place.restart + 1)
    ]
    path, guard = tries[-1], _guard(tries[-1])
    try:
        handle = _remove_if_stale(path, guard)
    except OSError as error:
        raise UsageError(
            f"--init-method file://{path}: {error.strerror}; all ranks must be able to write there "
            "and to lock files, or use tcp://HOST:PORT"
        ) from error
    try:
        store = FileStore(str(path), place.world_size)
        _kept.append(store)
        store.set_timeout(timeout)
        own = _alone(store, place, f"file://{path}")
        yield own
        _leave(own, place)
        if place.rank == 0:
            for ours in tries:
                ours.unlink(missing_ok=True)
                _guard(ours).unlink(missing_ok=True)
    finally:
        os.close(handle)


def _guard(path: Path) -> Path:
    """Name the file that is locked in place of another, which torch locks for each access."""
    return path.with_name(f"{path.name}.lock")


def _remove_if_stale(path: Path, guard: Path) -> int:
    """Remove a file that no living process uses, and take a share of its lock.

    Each rank holds a share as long as it lives, and has it before it writes. So the whole lock is
    to be had only where nobody has written who still lives.
    """
    while True:
        handle = os.open(guard, os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(handle, guard):
                path.unlink(missing_ok=True)
        fcntl.flock(handle, fcntl.LOCK_SH)
        # The rank 0 of a run that was just ending may have removed it meanwhile.
        if _is_at(handle, guard):
            return handle
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    """Say whether a path still leads to an open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def _alone(store: Store, place: Place, where: str) -> Store:
    """Make sure that no other run has come to the same place.

    Raises:
        UsageError: another process says that it is this rank.
    """
    store = PrefixStore(f"train/{place.attempt}/{place.restart}", store)
    taken = store.add(f"rank {place.rank}", 1) > 1
    sizes = store.add(f"ranks of {place.world_size}", 1), store.add("ranks", 1)
    if taken or len(set(sizes)) > 1:
        raise UsageError(
            f"--init-method {where}: this is rank {place.rank} of {place.world_size}, but another "
            f"rank {place.rank}, or one of another number of ranks, is there already: two runs "
            "meet at the same place, or RANK is set alike for two processes"
        )
    return store


def _leave(store: Store, place: Place) -> None:
    """Let rank 0, whose process may be the store's home, be the last to leave."""
    if store.add("left", 1) == place.world_size:
        store.set("all have left", "")
    if place.rank == 0:
        store.wait(["all have left"])
