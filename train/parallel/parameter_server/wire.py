"""The calls between trainers and server, over torch.distributed.rpc (TensorPipe).

Tensors travel from and to the CPU on every device: TensorPipe's own ways between GPUs need a map of
devices for each pair of ranks, and a parameter server on GPUs is bound by its network anyway.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.futures import Future

from ...errors import PeerError
from ...runtime.process_group import RankGroup
from ...runtime.rendezvous import keys_of_this_try
from .server import Gradient, Server, Stretch, Work

_serving: list[Server] = []
"""This process's own, when it is rank 0: calls name a function, not an object."""
_leaving = threading.Event()
"""On trainers: set when this process means to leave."""
_SCHEME = "train-group"


@contextmanager
def connect(group: RankGroup, server: Server | None, *, timeout_s: float) -> Iterator[None]:
    """Connect trainers and server; disconnect them when all went well, as `open_group()` does.

    The ranks are connected already, and meet in the same store. `server` is what trainers shall
    reach on rank 0; a call has failed after `timeout_s`.

    Raises:
        PeerError: another rank has gone.
    """
    rank_info = group.rank_info
    if server is not None:
        _serving[:] = [server]
    _leaving.clear()
    options = rpc.TensorPipeRpcBackendOptions(
        # A trainer that must wait keeps a thread of the server's, and must not keep out another.
        num_worker_threads=rank_info.world_size + 4 if rank_info.rank == 0 else 4,
        rpc_timeout=timeout_s,
        init_method=_rendezvous_url(group),
        # TCP only. Between ranks of a node TensorPipe prefers shared memory, which it polls without
        # rest: where there are more ranks than idle cores a call then took up to eight times as
        # long, and containers often have little of such memory.
        _transports=["uv"],
        _channels=["basic"],
    )
    with _others_may_be_gone(), warnings.catch_warnings():
        # torch makes the group that RPC starts on in a way that it warns of itself.
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            _name(rank_info.rank),
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            rpc_backend_options=options,
        )
    if server is not None:
        for rank in range(1, rank_info.world_size):
            _watch(server, rank)
    yield
    with _others_may_be_gone():
        leave(timeout_s=timeout_s)
    # The shutdown counts calls in the store, whose home rank 0 may be: it must not go before all
    # have counted.
    group.sum([0.0])


def leave(*, timeout_s: float | None = None) -> None:
    """Disconnect, when all ranks do so too; without a time-out."""
    _leaving.set()
    rpc.shutdown(graceful=timeout_s is not None, timeout=timeout_s or 0)


def draw(trainer: int, stretch: int) -> Work | Stretch:
    """Request work from the server; waits until there is some.

    Raises:
        PeerError: the server has gone.
    """
    with _others_may_be_gone():
        return rpc.rpc_sync(_name(0), _draw, args=(trainer, stretch))  # type: ignore[no-any-return]


def push(gradient: Gradient) -> None:
    """Send the server a gradient.

    Raises:
        PeerError: the server has gone.
    """
    with _others_may_be_gone():
        rpc.rpc_sync(_name(0), _push, args=(gradient,))


def _draw(trainer: int, stretch: int) -> Work | Stretch:
    return _serving[0].draw(trainer, stretch)


def _push(gradient: Gradient) -> None:
    _serving[0].push(gradient)


def _stay() -> None:
    _leaving.wait()


def _watch(server: Server, rank: int) -> None:
    """Learn at once that a trainer has died: a call that it never answers fails then."""

    def answered(future: Future[Any]) -> None:
        try:
            future.value()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            server.lose(f"rank {rank}, a trainer, is gone: {reason}")

    # No time-out: it is answered at the end of the run.
    rpc.rpc_async(_name(rank), _stay, timeout=0).add_done_callback(answered)


def _rendezvous_url(group: RankGroup) -> str:
    """Have RPC meet in the store of the process group, wherever that is.

    `env://` would be right under torchrun alone, while ranks may have met at a port or in a file.
    """

    def meet(url: str, **unused: object) -> Iterator[tuple[Store, int, int]]:
        world = dist.group.WORLD
        assert world is not None, "a parameter server has trainers"
        # What an earlier try has left there are the addresses of the dead.
        store = keys_of_this_try("rpc", group.rank_info, world.get_group_store())
        yield store, group.rank_info.rank, group.rank_info.world_size

    # Once per process; tests connect more often.
    if _SCHEME not in _known_schemes:
        register_rendezvous_handler(_SCHEME, meet)  # type: ignore[no-untyped-call]
        _known_schemes.add(_SCHEME)
    return f"{_SCHEME}://"


_known_schemes: set[str] = set()


def _name(rank: int) -> str:
    return f"rank{rank}"


@contextmanager
def _others_may_be_gone() -> Iterator[None]:
    """Raise a PeerError for the transport's report of a lost or slow peer."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "tensorpipe" in text or "RPC ran for more than" in text:
            raise PeerError(f"the parameter server's ranks are cut off: {text}") from error
        raise
