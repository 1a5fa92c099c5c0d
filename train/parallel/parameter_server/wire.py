"""The calls between trainers and server, over torch.distributed.rpc (TensorPipe).

Tensors are sent from CPU to CPU, even with GPUs: direct transfers between GPUs in TensorPipe need a
device map for each pair of ranks, and a parameter server on GPUs is bound by its network anyway.
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
"""The server of this process on rank 0: RPC calls name a function, not an object."""
_leaving = threading.Event()
"""On trainers: set before this process leaves."""
_SCHEME = "train-group"


@contextmanager
def connect(group: RankGroup, server: Server | None, *, timeout_s: float) -> Iterator[None]:
    """Connect trainers and server; disconnect them after success, as `open_group()` does.

    The ranks are already connected, and use the same store again. `server` receives the trainers'
    calls on rank 0. A call fails after `timeout_s`.

    Raises:
        PeerError: another rank has gone.
    """
    rank_info = group.rank_info
    if server is not None:
        _serving[:] = [server]
    _leaving.clear()
    options = rpc.TensorPipeRpcBackendOptions(
        # A waiting trainer occupies a thread of the server, and must not block other trainers.
        num_worker_threads=rank_info.world_size + 4 if rank_info.rank == 0 else 4,
        rpc_timeout=timeout_s,
        init_method=_rendezvous_url(group),
        # TCP only. Between ranks of a node, TensorPipe prefers shared memory and polls it busily.
        # With more ranks than idle cores, a call then took up to eight times as long. Containers
        # also often have little shared memory.
        _transports=["uv"],
        _channels=["basic"],
    )
    with _others_may_be_gone(), warnings.catch_warnings():
        # torch warns of the way in which it creates the process group of RPC.
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
    # The shutdown counts calls in the store, which rank 0 may host: rank 0 must wait until all
    # ranks have counted.
    group.sum([0.0])


def leave(*, timeout_s: float | None = None) -> None:
    """Disconnect; with a timeout, wait until all ranks disconnect."""
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
    """Detect a trainer's death at once: a call that is open until the end of the run fails."""

    def answered(future: Future[Any]) -> None:
        try:
            future.value()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            server.lose(f"rank {rank}, a trainer, is gone: {reason}")

    # No timeout: the trainer answers at the end of the run.
    rpc.rpc_async(_name(rank), _stay, timeout=0).add_done_callback(answered)


def _rendezvous_url(group: RankGroup) -> str:
    """Return a URL for RPC rendezvous in the store of the process group.

    `env://` works under torchrun only, but ranks may have met at a port or in a file.
    """

    def meet(url: str, **unused: object) -> Iterator[tuple[Store, int, int]]:
        world = dist.group.WORLD
        assert world is not None, "a parameter server has trainers"
        # Keys of an earlier try hold addresses of dead processes.
        store = keys_of_this_try("rpc", group.rank_info, world.get_group_store())
        yield store, group.rank_info.rank, group.rank_info.world_size

    # A process registers once, though tests connect several times.
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
