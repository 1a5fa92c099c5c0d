"""The device of each rank, a separate GPU or the CPU, and its memory."""

import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..errors import UsageError
from .membership import missing_ranks, rank_0_stays_until_all
from .rank import RankInfo
from .rendezvous import keys_of_this_try

if TYPE_CHECKING:
    from .process_group import RankGroup

_CGROUPS = Path("/sys/fs/cgroup")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def device_and_backend(
    rank_info: RankInfo, wanted: str = "auto", device: str = "auto"
) -> tuple[torch.device, str]:
    """Choose the device, one GPU per local rank or else the CPU, and the backend.

    Args:
        rank_info: this rank, and the number of ranks on its node.
        wanted: a backend's name; `auto`: NCCL on GPUs, else gloo.
        device: `cpu` or `cuda`; `auto`: the GPUs, if the process sees any.

    Raises:
        UsageError: this build of torch, or this node, cannot have that backend or device, or the
            node has fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # With MPI, tensors stay in host memory: few MPI builds support GPUs.
    on_gpu = bool(gpus) and wanted != "mpi" and device != "cpu"
    # Ranks that were started by hand may lack the number of ranks per node.
    ranks = max(rank_info.local_world_size, rank_info.local_rank + 1)
    if device == "cuda" and not on_gpu:
        reason = "--backend mpi works in the host's memory" if gpus else "this process sees none"
        raise UsageError(
            f"--device cuda needs a GPU for each rank, but on {socket.gethostname()} {reason}; "
            "fix the driver or CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    # A single GPU may belong to this rank alone, which `agree_on_device()` checks.
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
    # A scheduler may show each task only its own GPU, which then is number 0.
    number = 0 if gpus == 1 else rank_info.local_rank
    return torch.device("cuda", number) if on_gpu else torch.device("cpu"), backend


def agree_on_device(store: Store, rank_info: RankInfo, device: torch.device) -> None:
    """Make sure that all ranks use the same kind of device, and no two ranks the same GPU.

    Call it before making the process group: its backend follows from the device, and NCCL and gloo
    would wait for each other until the timeout.

    Raises:
        UsageError: on all ranks; lists the hosts without GPUs, if others have them, or the ranks
            that would share a GPU.
        PeerError: not all ranks have come.
    """
    store = keys_of_this_try("device", rank_info, store)
    mine = [device.type, socket.gethostname(), rank_info.local_rank, gpu_of(device)]
    store.set(str(rank_info.rank), json.dumps(mine))
    keys = [str(rank) for rank in range(rank_info.world_size)]
    try:
        store.wait(keys)
    except RuntimeError as error:
        raise missing_ranks(store, keys) from error
    choices = [json.loads(choice) for choice in store.multi_get(keys)]
    if not (problem := _device_problem(choices)):
        return
    rank_0_stays_until_all(store, rank_info, "have read")
    raise UsageError(problem)


def _device_problem(choices: Sequence[tuple[str, str, int, str]]) -> str:
    """Return the problem, if any; each choice: kind, host, number on the host, GPU."""
    if len({kind for kind, *_ in choices}) > 1:
        lacking = [
            f"  rank {rank} on {host}"
            for rank, (kind, host, local_rank, _) in enumerate(choices)
            if kind == "cpu" and local_rank == 0
        ]
        return (
            "some ranks have a GPU each, others have not (no driver, or fewer GPUs than ranks on "
            "that node); fix or leave out these nodes, or start all with CUDA_VISIBLE_DEVICES= to "
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
    """Return a GPU's unique name; '' for the CPU."""
    if device.type != "cuda":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # MIG instances: parts of one GPU that are separate devices.
    if visible.startswith("MIG-"):
        return visible.split(",")[device.index or 0]
    return str(torch.cuda.get_device_properties(device).uuid)


def use(device: torch.device) -> None:
    """Make a GPU the default `cuda` device of this process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def set_tf32(wanted: str, device: torch.device) -> None:
    """Choose the precision of a GPU's float32 matrix products; `auto` keeps torch's default.

    Raises:
        UsageError: the device is the CPU, which has no TF32.
    """
    if wanted == "on" and device.type != "cuda":
        raise UsageError("--tf32 on is for GPUs, and this rank has none: leave it out")
    if wanted != "auto":
        torch.backends.cuda.matmul.allow_tf32 = wanted == "on"
        torch.backends.cudnn.allow_tf32 = wanted == "on"


def memory_of_a_rank(group: "RankGroup") -> int:
    """Return the bytes of a rank's device; ranks on the CPU share the host's memory evenly."""
    if group.device.type == "cuda":
        return int(torch.cuda.get_device_properties(group.device).total_memory)
    return memory_of_the_host() // group.rank_info.local_world_size


def memory_of_the_host(
    cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the bytes that this process may use: the machine's, or the job's if fewer.

    Slurm, Kubernetes and containers limit memory by control groups (version 2), which are mounted
    at `cgroups`; the file `membership` names the group of this process.
    """
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return size
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return size
    # The limits of all enclosing groups apply as well.
    for folder in (cgroups / own, *(cgroups / own).parents):
        if folder == cgroups.parent:
            break
        try:
            size = min(size, int((folder / "memory.max").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue  # The outermost has no such file; "max" means no limit.
    return size


def parse_size(text: str) -> int:
    """Parse an amount of memory, as people write it.

    Raises:
        UsageError: the text is not an amount of memory.

    >>> parse_size("80GiB")
    85899345920
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)", text.strip())
    size = int(float(match[1]) * (_UNITS | _DECIMAL)[match[2]]) if match else 0
    if size < 1:
        raise UsageError(
            f"--device-memory {text!r} is not a memory size: write a number and a unit, such as "
            "80GiB"
        )
    return size


def written(size: float) -> str:
    """Format an amount of memory with a suitable unit.

    >>> written(481280), written(12), written(3 * 2**30)
    ('470.0 KiB', '12 B', '3.0 GiB')
    """
    for unit, factor in reversed(_UNITS.items()):
        if abs(size) >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:.0f} B"
