"""Several ranks on one GPU through NCCL, on machines that have no more GPUs than one.

NCCL refuses ranks of one host that share a GPU, and so does `train`. A rank in a UTS namespace of
its own has a host name of its own: for both it is a host, and NCCL talks through sockets. That is
slow, but nothing else differs. `TEST_RANKS_PER_GPU=4 make test-gpu`, as root.
"""

import ctypes
import os
import socket
import sys

_CLONE_NEWUTS = 0x04000000

RANKS_PER_GPU = int(os.environ.get("TEST_RANKS_PER_GPU", "1"))
MODULE = "tests.train.support.shared_gpu"


def ranks_at_most() -> int:
    """How many ranks can have a GPU, or their share of the only one."""
    import torch  # late: a rank of torchrun comes through here

    return torch.cuda.device_count() * RANKS_PER_GPU


def become_a_host(rank: int) -> None:
    """Give this process a host name of its own, and the GPU, if ranks are to share it."""
    if RANKS_PER_GPU == 1:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare: ranks can share a GPU for root only")
    socket.sethostname(f"{socket.gethostname()}-{rank}")
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    for backend in ("NCCL", "GLOO"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")


def started_by_torchrun(*argv: str) -> tuple[str, ...]:
    """What torchrun is to start, so that each rank becomes a host first; `argv` are Python's."""
    if RANKS_PER_GPU == 1:
        return argv
    return ("--no-python", sys.executable, "-m", MODULE, *argv)


if __name__ == "__main__":
    become_a_host(int(os.environ["RANK"]))
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
