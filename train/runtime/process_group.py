"""The process group: which backend, which device, and the few things that ranks agree on."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store

from train.cli.compatibility import backend_problem
from train.cli.config import Config
from train.errors import PeerError, TrainError, UsageError
from train.parallel.layout import ALONE
from train.runtime.rank import RankInfo
from train.runtime.rendezvous import keys_of_this_try, meet

Value = TypeVar("Value")


class RankGroup:
    """The ranks of a run. Works unchanged, and without any exchange, when there is only one."""

    def __init__(self, *, rank_info: RankInfo, device: torch.device) -> None:
        """Describe the group; `open_group()` makes the connections."""
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
        """Add a number that the device is still computing, and others; waits for it only once.

        Args:
            computed: a scalar.
            values: the rest.
        """
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

    def gather(self, value: Value) -> list[Value]:
        """Give every rank every rank's value, by rank."""
        if not self.connected:
            return [value]
        values: list[Value | None] = [None] * self.rank_info.world_size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # every rank has filled its place

    def broadcast(self, value: Value, *, source: int = 0) -> Value:
        """Give every rank the source rank's value."""
        if not self.connected:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=source)
        return values[0]

    def broadcast_tensors(self, tensors: dict[str, Tensor], *, source: int) -> dict[str, Tensor]:
        """Give every rank the source rank's tensors; the others' argument is ignored."""
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
            # As bytes: backends do not know every type.
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=source)
            received[name] = tensor
        return received

    def on_rank_0(self, action: Callable[[], None]) -> None:
        """Do something on rank 0 while the others wait, and let all know how it ended.

        Raises:
            TrainError: on rank 0, what the action raised.
            PeerError: on the other ranks, the same message.
        """
        error: TrainError | None = None
        if self.rank_info.rank == 0:
            try:
                action()
            except TrainError as caught:
                error = caught
        # Not a barrier: one that rank 0 never reaches would leave the others waiting.
        message = self.broadcast(str(error) if error else None)
        if error:
            raise error
        if message:
            raise PeerError(f"rank 0: {message}")


def device_and_backend(
    rank_info: RankInfo, wanted: str = "auto", device: str = "auto"
) -> tuple[torch.device, str]:
    """A GPU per local rank where there are GPUs, else the CPU; and what its ranks talk through.

    Args:
        rank_info: which rank of how many on this node.
        wanted: a backend's name; `auto`: NCCL on GPUs, else gloo.
        device: `cpu` or `cuda`; `auto`: the GPUs, where the process sees some.

    Raises:
        UsageError: this build of torch, or this node, cannot have that backend or device, or the
            node has fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # MPI's tensors stay in the host's memory: few builds of it know GPUs.
    on_gpu = bool(gpus) and wanted != "mpi" and device != "cpu"
    # Ranks that were started by hand may lack the number of ranks per node.
    ranks = max(rank_info.local_world_size, rank_info.local_rank + 1)
    if device == "cuda" and not on_gpu:
        reason = "--backend mpi works in the host's memory" if gpus else "this process sees none"
        raise UsageError(
            f"--device cuda needs a GPU for each rank, but on {socket.gethostname()} {reason}; "
            "mend the driver or CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    # One may be the rank's own, which `agree_on_device()` finds out.
    if on_gpu and 1 < gpus < ranks:
        raise UsageError(
            f"{socket.gethostname()} has {gpus} GPUs for {ranks} ranks: start {gpus} ranks there, "
            "or train on the CPU with --device cpu (or CUDA_VISIBLE_DEVICES=)"
        )
    backend = ("nccl" if on_gpu else "gloo") if wanted == "auto" else wanted
    if not dist.is_backend_available(backend):
        backends = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
        raise UsageError(
            f"--backend {backend}: this build of torch {torch.__version__} has no such backend; "
            f"it has {', '.join(backends)}"
        )
    if backend == "nccl" and not on_gpu:
        raise UsageError(
            f"--backend nccl needs a GPU for each rank, but {socket.gethostname()} has {gpus} for "
            f"{ranks}: use --backend gloo, or start {gpus or 'no'} ranks there"
        )
    # A scheduler may show each of its tasks the task's own GPU only, which then is number 0.
    number = 0 if gpus == 1 else rank_info.local_rank
    return torch.device("cuda", number) if on_gpu else torch.device("cpu"), backend


def agree_on_device(store: Store, rank_info: RankInfo, device: torch.device) -> None:
    """Make sure that all ranks have chosen the same kind of device, and each a GPU of its own.

    Before the process group: its backend follows from the device, and NCCL and gloo would wait for
    each other until time is over.

    Raises:
        UsageError: on all ranks; names the hosts whose ranks have no GPU, while others have, or the
            ranks that would share one.
        PeerError: not all ranks have come.
    """
    store = keys_of_this_try("device", rank_info, store)
    mine = [device.type, socket.gethostname(), rank_info.local_rank, gpu_of(device)]
    store.set(str(rank_info.rank), json.dumps(mine))
    keys = [str(rank) for rank in range(rank_info.world_size)]
    try:
        store.wait(keys)
    except RuntimeError as error:
        missing = [key for key in keys if not store.check([key])]
        shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
        raise PeerError(f"waited in vain for rank {shown} of {rank_info.world_size}") from error
    choices = [json.loads(choice) for choice in store.multi_get(keys)]
    if not (problem := _device_problem(choices)):
        return
    # Rank 0 may be the store's home: it stays until all have read.
    if store.add("read", 1) == rank_info.world_size:
        store.set("all have read", "")
    if rank_info.rank == 0:
        store.wait(["all have read"])
    raise UsageError(problem)


def _device_problem(choices: Sequence[tuple[str, str, int, str]]) -> str:
    """Return the problem of the ranks' devices: kind, host, number on the host, which GPU."""
    if len({kind for kind, *_ in choices}) > 1:
        lacking = [
            f"  rank {rank} on {host}"
            for rank, (kind, host, local_rank, _) in enumerate(choices)
            if kind == "cpu" and local_rank == 0
        ]
        return (
            "some ranks have a GPU each, others have not (no driver, or fewer GPUs than ranks on "
            "that node); mend or leave out these nodes, or start all with CUDA_VISIBLE_DEVICES= to "
            "train on the CPU:\n" + "\n".join(lacking)
        )
    users: dict[tuple[str, str], list[str]] = {}
    for rank, (_, host, _, gpu) in enumerate(choices):
        if gpu:
            users.setdefault((host, gpu), []).append(str(rank))
    shared = [
        f"  ranks {', '.join(ranks)} on {host}"
        for (host, _), ranks in users.items()
        if len(ranks) > 1
    ]
    if not shared:
        return ""
    return (
        "some ranks would share one GPU; start one rank per GPU, have the launcher show each rank "
        "its own (CUDA_VISIBLE_DEVICES), or start all with CUDA_VISIBLE_DEVICES= to train on the "
        "CPU:\n" + "\n".join(shared)
    )


def gpu_of(device: torch.device) -> str:
    """Name a GPU as no other is named; '' for the CPU."""
    if device.type != "cuda":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # Parts of one GPU, each a device of its own.
    if visible.startswith("MIG-"):
        return visible.split(",")[device.index or 0]
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def open_group(rank_info: RankInfo, config: Config) -> Iterator[RankGroup]:
    """Connect the ranks; disconnect them when all went well.

    `--timeout-s` ends a wait for a rank that is gone. After an error nothing is disconnected: that
    could wait for the dead, and the end of the process closes the connections, which is how the
    other ranks learn of it.

    Raises:
        UsageError: the backend or the device cannot be had, only some ranks have a GPU, some
            share one, or another run meets at the same place.
    """
    device, backend = device_and_backend(rank_info, config.backend, config.device)
    set_tf32(config.tf32, device)
    if problem := backend_problem(config, backend):
        raise UsageError(problem)
    group = RankGroup(rank_info=rank_info, device=device)
    if config.strategy_on(rank_info) in ALONE:
        _use(device)
        yield group
        return
    # Not torch's own 30 minutes, during which a missing rank is not reported.
    timeout = timedelta(seconds=config.timeout_s)
    if backend == "mpi":
        _connect_by_mpi(rank_info, timeout)
        yield group
        disconnect()
        return
    with meet(rank_info, config.init_method, timeout) as store:
        _use(device)
        agree_on_device(store, rank_info, device)
        dist.init_process_group(
            # Tensors in the host's memory (offloaded ones, pickled objects) need a way as well.
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
        draw_apart(mesh)
    return mesh


def draw_apart(mesh: DeviceMesh) -> None:
    """Let DTensors draw random numbers without asking other ranks.

    At the first dropout of one, torch would send rank 0's seed to all ranks of the run: those of
    other pipeline stages, which have none, would never take it. Ours are seeded before each step.
    """
    from torch.distributed.tensor import _random

    if _random._rng_tracker is None:
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def limit_waiting(group: ProcessGroup, *, timeout_s: int) -> None:
    """Have a group of some ranks wait no longer than the one of all: torch gives it 30 minutes."""
    with warnings.catch_warnings():
        # Other backends than gloo and NCCL have no limit.
        warnings.filterwarnings("ignore", message="Set timeout is now only supported")
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def disconnect() -> None:
    """Close the connections of all groups, of meshes and of checkpoints too.

    The objects are kept to the end of the process. Freeing one waits for its threads while it holds
    Python's lock (the GIL), and one of them may be waiting for that lock, to free the tensors of
    the last exchange: with gloo, a rank that has done everything hung in 3 of 8 runs.
    """
    _kept.extend(distributed_c10d._world.pg_map)
    dist.destroy_process_group()


_kept: list[object] = []


def set_tf32(wanted: str, device: torch.device) -> None:
    """Choose what a GPU multiplies single precision in; `auto` leaves it as torch has it.

    Raises:
        UsageError: it is to be used on the CPU, which has none.
    """
    if wanted == "on" and device.type != "cuda":
        raise UsageError("--tf32 on is for GPUs, and this rank has none: leave it out")
    if wanted != "auto":
        torch.backends.cuda.matmul.allow_tf32 = wanted == "on"
        torch.backends.cudnn.allow_tf32 = wanted == "on"


def _use(device: torch.device) -> None:
    """Make a GPU the one that this process means by `cuda`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _connect_by_mpi(rank_info: RankInfo, timeout: timedelta) -> None:
    """Let MPI, which has numbered the processes itself, connect them.

    Raises:
        UsageError: `RANK` has another value.
    """
    dist.init_process_group("mpi", timeout=timeout)
    if (dist.get_rank(), dist.get_world_size()) != (rank_info.rank, rank_info.world_size):
        raise UsageError(
            f"--backend mpi: to MPI this is rank {dist.get_rank()} of {dist.get_world_size()}, but "
            f"RANK and WORLD_SIZE say {rank_info.rank} of {rank_info.world_size}: set them from "
            "what mpirun sets, such as OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE"
        )
