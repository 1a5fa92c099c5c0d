"""The rendezvous of a run's ranks: a key-value store that all ranks can reach.

`env://` names the store of torchrun, or of any launcher that sets MASTER_ADDR and MASTER_PORT;
`tcp://` names a fixed port on rank 0's host; `file://` names a file that all ranks see.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..errors import PeerError, PortError, UsageError
from .membership import GRACE_S, EndingError, gather, leave, veto
from .rank import RankInfo

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torchrun sets it for its workers; "True": all workers are clients of torchrun's store."""
_KNOCK_S = 5.0
_PAUSE_S = 0.02
"""How long and how often to look for a store that is not served yet; then torch's client takes
over."""
_kept: list[Store] = []
"""Keeps every FileStore alive: freeing one may create its file again."""

Reached = TypeVar("Reached")


@contextmanager
def meet(rank_info: RankInfo, init_method: str, timeout: timedelta) -> Iterator[Store]:
    """Reach the store where all ranks meet; all ranks leave it together when all went well.

    Raises:
        UsageError: another run is there already.
        PortError: another process has taken the port that torchrun chose.
        PeerError: not all ranks have come.
    """
    if init_method == "env://" and rank_info.meeting:
        # The process that spawned the ranks has made a file for them.
        init_method = rank_info.meeting
    if init_method.startswith("file://"):
        with _meet_in_file(Path(init_method.removeprefix("file://")), rank_info, timeout) as store:
            yield store
    elif init_method.startswith("tcp://"):
        # Rank 0 serves this store, whether or not torchrun serves another one.
        os.environ.pop(AGENT_STORE, None)
        store = _patiently(lambda: _meet_at_port(init_method, rank_info, timeout), timeout)
        yield store
        leave(store, rank_info)
    else:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        await_server(host, port, rank_info, timeout)
        chosen = AGENT_STORE in os.environ
        with _explained(f"{host}:{port}", timeout, chosen=chosen):
            store = _store_of_environment(init_method, timeout, patient=chosen)
        store.set_timeout(timeout)
        yield store
        # torchrun sets "False" if its own store is not shared: rank 0 then serves another store.
        if os.environ.get(AGENT_STORE) != "True":
            leave(store, rank_info)


def _store_of_environment(init_method: str, timeout: timedelta, *, patient: bool) -> Store:
    """Reach the store at MASTER_ADDR and MASTER_PORT; rank 0 serves it unless torchrun does.

    `patient`: whether rank 0 tries a taken port again. torchrun releases the free port of its
    choice before rank 0 binds the port, so a connection of another process may have the port for
    an instant.
    """
    deadline = time.monotonic() + _KNOCK_S
    while True:
        try:
            store: Store = next(rendezvous(init_method, timeout=timeout))[0]
        except DistNetworkError as error:
            taken = "EADDRINUSE" in str(error)
            if not (taken and patient) or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)
            continue
        return store


def keys_of_this_try(purpose: str, rank_info: RankInfo, store: Store) -> Store:
    """Separate the keys of this restart from those of the previous one, if both share a store.

    Only torchrun's shared store outlives a restart. Elsewhere the restart number must not be part
    of a key: each torchrun agent counts for itself, and after a failure one agent may count a
    restart where another has only seen a change of membership.
    """
    restart = rank_info.restart if os.environ.get(AGENT_STORE) == "True" else 0
    return PrefixStore(f"train/{purpose}/{restart}", store)


def await_server(
    host: str | None, port: str | int | None, rank_info: RankInfo, timeout: timedelta
) -> None:
    """Return as soon as rank 0 serves its store.

    torch's own client retries only after a quarter of a second, and then at growing intervals: that
    delay was a twentieth of the time to the first step of two ranks. A wrong address and missing
    ranks are left to torch's client to report.
    """
    deadline, pause_s = time.monotonic() + min(_KNOCK_S, timeout.total_seconds()), 0.02
    while rank_info.rank != 0 and host and port and time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=pause_s + 1).close()
            return
        except ConnectionRefusedError:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.1, 0.2)
        except (OSError, ValueError):
            return


@contextmanager
def _explained(where: str, timeout: timedelta, *, chosen: bool = False) -> Iterator[None]:
    """Explain why the store at an address cannot be reached.

    `chosen`: whether torchrun has chosen the port; it chooses one for each start.
    """
    try:
        yield
    except (DistNetworkError, DistStoreError) as error:
        if "EADDRINUSE" not in str(error):
            patience = f"{timeout.total_seconds():g} s (--timeout-s)"
            reason = str(error).partition("\n")[0]
            raise PeerError(
                f"not all ranks have met at {where} within {patience} [{reason}]"
            ) from error
        if chosen:
            raise PortError(
                f"{where}: another process of {socket.gethostname()} has taken the port since "
                "torchrun chose it; the next start gets another one"
            ) from error
        raise UsageError(
            f"{where}: the port is taken on {socket.gethostname()}, by another run perhaps; choose "
            "another one"
        ) from error


def _meet_at_port(init_method: str, rank_info: RankInfo, timeout: timedelta) -> Store:
    address = urlsplit(init_method)
    host, port = address.hostname or "", address.port or 0
    await_server(host, port, rank_info, timeout)

    def connect(serves: bool, patience: timedelta) -> Store:
        # Do not use torch's wait for all ranks: it also counts connections of another run.
        options = {"wait_for_workers": False, "multi_tenant": True}
        return TCPStore(host, port, rank_info.world_size, serves, patience, **options)

    try:
        with _explained(init_method, timeout):
            store = connect(rank_info.rank == 0, timeout)
    except PeerError as error:
        # Before the timeout, this means that rank 0 of a run that was just ending has gone.
        raise EndingError(str(error)) from error
    except UsageError:
        # The other run's ranks, which still wait there, cannot tell our ranks from their own.
        with suppress(RuntimeError):
            veto(connect(False, timedelta(seconds=GRACE_S)), rank_info)
        raise
    return gather(store, rank_info, init_method)


def _patiently(reach: Callable[[], Reached], timeout: timedelta) -> Reached:
    """Call `reach` again until the previous run has gone."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return reach()
        except EndingError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


@contextmanager
def _meet_in_file(path: Path, rank_info: RankInfo, timeout: timedelta) -> Iterator[Store]:
    """Meet in a file that only this try uses.

    Otherwise ranks would mistake the keys of an earlier run for answers from this run, and wait for
    dead processes.
    """
    tries = [
        path.with_name(f"{path.name}.attempt-{rank_info.attempt}.restart-{number}")
        for number in range(rank_info.restart + 1)
    ]
    store, handle = _patiently(lambda: _open_file(tries[-1], rank_info, timeout), timeout)
    try:
        yield store
        os.pwrite(handle, b"leaving", 0)
        leave(store, rank_info)
        if rank_info.rank == 0:
            for earlier in tries[:-1]:
                with suppress(FileNotFoundError):
                    guard = os.open(_guard(earlier), os.O_RDWR)
                    _remove(earlier, guard)
                    _release(guard)
            # The other ranks give up their shares of the lock after they have left.
            deadline = time.monotonic() + GRACE_S
            while _is_leaving(handle) and not _remove(tries[-1], handle):
                if time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE_S)
    finally:
        _release(handle)


def _open_file(path: Path, rank_info: RankInfo, timeout: timedelta) -> tuple[Store, int]:
    """Meet in a file; return its store, and the open file that holds our share of its lock."""
    try:
        handle = _take_share(path)
    except OSError as error:
        raise UsageError(
            f"--init-method file://{path}: {error.strerror}; all ranks must be able to write there "
            "and to lock files, or use tcp://HOST:PORT"
        ) from error
    if handle is None:
        raise EndingError(f"file://{path}: the run that met there before has not ended yet")
    try:
        store = FileStore(str(path), rank_info.world_size)
        _kept.append(store)
        store.set_timeout(timeout)
        return gather(store, rank_info, f"file://{path}"), handle
    except BaseException:
        _release(handle)
        raise


def _guard(path: Path) -> Path:
    """Name the file that carries our lock: torch locks the store's own file for each access."""
    return path.with_name(f"{path.name}.lock")


def _take_share(path: Path) -> int | None:
    """Take a share of a file's lock; first remove the file if no living process has a share.

    Each rank takes a shared lock before it writes, and holds it until it ends. So a process gets an
    exclusive lock only if every writer is dead. A rank that comes while others are leaving gets no
    share (None): it would keep them from removing the file.
    """
    guard = _guard(path)
    while True:
        handle = os.open(guard, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(handle, guard):
                path.unlink(missing_ok=True)
                os.ftruncate(handle, 0)
        except BlockingIOError:
            if _is_leaving(handle):
                os.close(handle)
                return None
        fcntl.flock(handle, fcntl.LOCK_SH)
        # Rank 0 of a run that was just ending may have removed the guard meanwhile.
        if _is_at(handle, guard):
            return handle
        os.close(handle)


def _is_leaving(handle: int) -> bool:
    """Whether a rank has noted in the guard that its run is over."""
    return os.fstat(handle).st_size > 0


def _remove(path: Path, handle: int) -> bool:
    """Remove a file and its guard; return whether no other process had a share of the lock.

    This needs the exclusive lock: a rank of the next run with a share by then keeps its file.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if _is_at(handle, _guard(path)):
        path.unlink(missing_ok=True)
        _guard(path).unlink(missing_ok=True)
    return True


def _release(handle: int) -> None:
    """Give up a share, even if a data loader's worker has inherited the open file."""
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False
