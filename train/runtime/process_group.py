"""The process group: connecting the ranks, and the exchanges between them."""

import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..cli.compatibility import backend_problem
from ..cli.config import Config
from ..errors import PeerError, TrainError, UsageError
from ..parallel.layout import ALONE
from .devices import agree_on_device, device_and_backend, set_tf32, use
from .rank import RankInfo
from .rendezvous import meet

Value = TypeVar("Value")


class RankGroup:
    """The ranks of a run. Works unchanged, and without any exchange, when there is only one."""

    def __init__(self, *, rank_info: RankInfo, device: torch.device) -> None:
        self.rank_info = rank_info
        self.device = device

    @property
    def connected(self) -> bool:
        """Whether there is anything to exchange."""
        return dist.is_initialized()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add numbers over all ranks, in double precision; one collective for all of them."""
        if self.rank_info.world_size == 1 or not self.connected:
            return list(values)
        vector = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(vector)
        total: list[float] = vector.tolist()
        return total

    def sum_with(self, computed: Tensor, values: Sequence[float]) -> list[float]:
        """Add a scalar that the device is still computing, and others; wait for it only once."""
        if self.rank_info.world_size == 1 or not self.connected:
            return [computed.item(), *values]
        on_gpu = self.device.type == "cuda"
        vector = torch.tensor([0.0, *values], dtype=torch.float64, pin_memory=on_gpu)
        vector = vector.to(self.device, non_blocking=True)
        vector[0] = computed
        if self.rank_info.world_size == 2 and not on_gpu:
            # Gloo sums in two rounds, a scatter and a gather; two ranks need only one.
            both = torch.empty(2, len(vector), dtype=vector.dtype)
            dist.all_gather(list(both), vector)
            vector = both.sum(0)
        else:
            dist.all_reduce(vector)
        total: list[float] = vector.tolist()
        return total

    def agree_on_restart(self) -> None:
        """Give all ranks one restart number, the highest.

        After a failure, one torchrun may count a restart where another has only seen a change of
        membership. With a lower number, a rank's failure would not replace the outcome; with a
        higher one, rank 0 would be fenced.
        """
        highest = max(self.gather(self.rank_info.restart))
        self.rank_info = replace(self.rank_info, restart=highest)

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, by rank."""
        if not self.connected:
            return [value]
        values: list[Value | None] = [None] * self.rank_info.world_size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # every rank has filled its place

    def broadcast(self, value: Value, *, source: int = 0) -> Value:
        """Return the source rank's value."""
        if not self.connected:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=source)
        return values[0]

    def broadcast_tensors(self, tensors: dict[str, Tensor], *, source: int) -> dict[str, Tensor]:
        """Return the source rank's tensors; the others' argument is ignored."""
        if not self.connected:
            return tensors
        mine = self.rank_info.rank == source
        shapes = self.broadcast([(k, t.shape, t.dtype) for k, t in tensors.items()], source=source)
        received = {}
        for name, shape, dtype in shapes:
            if mine:
                tensor = tensors[name].to(self.device).resolve_conj().resolve_neg().contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            # Send bytes: backends do not support every dtype.
            dist.broadcast(bytes_of(tensor), src=source)
            received[name] = tensor
        return received

    def on_rank_0(self, action: Callable[[], None]) -> None:
        """Run an action on rank 0 while the others wait, and report its result to all ranks.

        Raises:
            TrainError: on rank 0, raised by the action.
            PeerError: on the other ranks, with the same message.
        """
        error: TrainError | None = None
        if self.rank_info.rank == 0:
            try:
                action()
            except TrainError as caught:
                error = caught
        # Not a barrier: the others would hang if rank 0 never reached it.
        message = self.broadcast(str(error) if error else None)
        if error:
            raise error
        if message:
            raise PeerError(f"rank 0: {message}")


class Alone(RankGroup):
    """A group of one, in a process that is connected to others."""

    @property
    def connected(self) -> bool:
        """Never: there is nothing to exchange."""
        return False


class Channel:
    """A separate gloo process group over all ranks, for checkpoints; none for a single rank.

    The checkpoint thread communicates through it. In the process group of training, the thread's
    collectives would mix with those of training at any time, while ranks match collectives by their
    order: gradients would be exchanged with manifests, or ranks would hang.
    """

    def __init__(self, group: RankGroup, *, timeout_s: int = 600) -> None:
        """Connect; all ranks do so at once."""
        self.rank, self.size = group.rank_info.rank, group.rank_info.world_size
        self._group: dist.ProcessGroup | None = None
        if group.connected:
            timeout = timedelta(seconds=timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self._group is None:
            return flag
        count = torch.tensor(int(flag))
        dist.all_reduce(count, group=self._group)
        return bool(count)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, by rank, on rank 0; an empty list on the others."""
        if self._group is None:
            return [value]
        values = [value] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def scatter(self, values: Sequence[Value]) -> Value:
        """Return this rank's entry of rank 0's list."""
        if self._group is None:
            return values[0]
        received: list[Value | None] = [None]
        sent = list(values) if self.rank == 0 else None
        dist.scatter_object_list(received, sent, src=0, group=self._group)
        return received[0]  # type: ignore[return-value]  # rank 0 has filled it

    def broadcast(self, value: Value) -> Value:
        """Return rank 0's value."""
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
        """Whether all ranks see one directory: rank 0 leaves a mark, all look for it."""
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


def bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor's memory as bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


@contextmanager
def open_group(rank_info: RankInfo, config: Config) -> Iterator[RankGroup]:
    """Connect the ranks; disconnect them when all went well.

    `--timeout-s` limits the wait for a rank that has ended. After an error, the ranks do not
    disconnect: that could wait for dead ranks. The end of the process closes the connections, and
    the other ranks notice.

    Raises:
        UsageError: the backend or the device is not available, only some ranks have a GPU, some
            share one, or another run uses the same rendezvous.
    """
    device, backend = device_and_backend(rank_info, config.backend, config.device)
    set_tf32(config.tf32, device)
    if problem := backend_problem(config, backend):
        raise UsageError(problem)
    group = RankGroup(rank_info=rank_info, device=device)
    # Not torch's own 30 minutes, during which a missing rank is not reported.
    timeout = timedelta(seconds=config.timeout_s)
    if config.strategy_on(rank_info) in ALONE:
        use(device)
        yield group
        return
    if backend == "mpi":
        # MPI has numbered the processes itself.
        dist.init_process_group("mpi", timeout=timeout)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if (rank, ranks) != (rank_info.rank, rank_info.world_size):
            raise UsageError(
                f"--backend mpi: to MPI this is rank {rank} of {ranks}, but RANK and WORLD_SIZE "
                f"say {rank_info.rank} of {rank_info.world_size}: set them from what mpirun sets, "
                "such as OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE"
            )
        yield group
        disconnect()
        return
    with meet(rank_info, config.init_method, timeout) as store:
        use(device)
        agree_on_device(store, rank_info, device)
        dist.init_process_group(
            # Tensors in host memory (offloaded ones, pickled objects) need a backend as well.
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=store,
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        yield group
        disconnect()


def arrange(group: RankGroup, sizes: Mapping[str, int], *, timeout_s: int) -> DeviceMesh:
    """Arrange the ranks in a mesh of named dimensions, outermost first."""
    names = tuple(sizes)
    mesh = init_device_mesh(group.device.type, tuple(sizes.values()), mesh_dim_names=names)
    for name in names:
        limit_waiting(mesh.get_group(name), timeout_s=timeout_s)
    if group.device.type == "cuda":
        # DTensors must draw random numbers without communication: at the first dropout of a
        # DTensor, torch would send rank 0's seed to all ranks of the run, but pipeline stages
        # without DTensors would never receive it. Our ranks are seeded before each step.
        from torch.distributed.tensor import _random

        if _random._rng_tracker is None:
            _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
    return mesh


def limit_waiting(group: ProcessGroup, *, timeout_s: int) -> None:
    """Set the timeout of a subgroup; torch's default is 30 minutes."""
    with warnings.catch_warnings():
        # Only gloo and NCCL have a timeout.
        warnings.filterwarnings("ignore", message="Set timeout is now only supported")
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def disconnect() -> None:
    """Close the connections of all groups, including those of meshes and checkpoints.

    The objects are kept to the end of the process. Freeing one waits for its threads while it holds
    the GIL, and a thread may be waiting for the GIL to free the tensors of the last exchange: with
    gloo, a finished rank hung in 3 of 8 runs.
    """
    _kept.extend(distributed_c10d._world.pg_map)
    dist.destroy_process_group()


_kept: list[object] = []
