"""A run: start the ranks or join those of a launcher, and show one collective after another."""

import os
import tempfile
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from ..errors import EXIT_DONE, EXIT_FAILED, TrainError
from ..rundir.console import Console, end_process
from ..runtime.devices import agree_on_device, device_and_backend, use
from ..runtime.process_group import disconnect
from ..runtime.rank import RankInfo
from ..runtime.rendezvous import keys_of_this_try, meet
from .demo import (
    Ranks,
    WrongResult,
    demonstrate,
    demonstrate_barrier,
    demonstrate_monitored_barrier,
    print_table,
)
from .operations import COLLECTIVES, Collective
from .options import Options


def spawn(options: Options, nproc: int) -> int:
    """Start the ranks on this machine, and return the exit status of the first that failed."""
    # Use a new folder for the rendezvous: two runs could share a port, but not a folder.
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _spawned, args=(options, nproc, f"file://{folder}/meeting"), nprocs=nproc
            )
        except ProcessExitedException as error:
            return max(error.exit_code, EXIT_FAILED)
    return EXIT_DONE


def _spawned(rank: int, options: Options, nproc: int, meeting: str) -> None:
    # Ranks on one machine share its cores; each with a thread per core would slow all of them down.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // nproc))
    end_process(be_a_rank(options, RankInfo().of_spawned(rank, nproc, meeting)))


def be_a_rank(options: Options, rank_info: RankInfo) -> int:
    """Connect, show everything, and return the exit status; an error is printed before."""
    console, timeout = Console(rank=rank_info.rank), timedelta(seconds=options.timeout_s)
    try:
        device, backend = device_and_backend(rank_info)
        use(device)
        with meet(rank_info, "env://", timeout) as store:
            agree_on_device(store, rank_info, device)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank_info.rank,
                world_size=rank_info.world_size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
            board = keys_of_this_try("collectives", rank_info, store)
            ranks = Ranks(rank_info=rank_info, device=device, store=board, timeout=timeout)
            exit_status = run(options, ranks, console, COLLECTIVES)
            disconnect()
            return exit_status
    except TrainError as error:
        console.complain(str(error))
        return error.exit_status
    except (RuntimeError, OSError) as error:
        # Each rank reports its own error: this rank cannot know the cause.
        console.complain(f"{type(error).__name__}: {error}", every_rank=True)
        return EXIT_FAILED


def run(options: Options, ranks: Ranks, console: Console, collectives: Sequence[Collective]) -> int:
    """Show collectives until all are done or one is wrong; return the exit status."""
    console.say(f"{ranks.rank_info.world_size} ranks, {dist.get_backend()} on {ranks.device.type}")
    repeats = options.repeats if options.sizes_bytes else 0
    try:
        for collective in collectives:
            if collective.name in options.only:
                demonstrate(collective, ranks, console)
                print_table(collective, options.sizes_bytes, options.repeats, ranks, console)
        if "barrier" in options.only:
            demonstrate_barrier(ranks, console, repeats=repeats)
        if "monitored_barrier" in options.only:
            demonstrate_monitored_barrier(ranks, console)
    except WrongResult as error:
        console.complain(str(error))
        return error.exit_status
    return EXIT_DONE
