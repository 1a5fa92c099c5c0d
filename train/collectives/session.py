"""Start the ranks or join those that a launcher started, and show one collective after another."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

import torch
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from train.collectives.demo import (
    WrongResult,
    demonstrate,
    demonstrate_barrier,
    demonstrate_monitored_barrier,
    print_table,
)
from train.collectives.operations import COLLECTIVES, Collective
from train.collectives.options import Options
from train.collectives.ranks import Ranks, connect
from train.errors import EXIT_DONE, EXIT_FAILED, TrainError
from train.rundir.console import Console
from train.runtime.rank import Place


def spawn(options: Options, nproc: int) -> int:
    """Start the ranks on this machine, and return the exit status of the first that failed."""
    # They meet in a new folder: no two runs can, as they could at a port.
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _spawned, args=(options, nproc, f"file://{folder}/meeting"), nprocs=nproc
            )
        except ProcessExitedException as error:
            return max(error.exit_code, EXIT_FAILED)
    return EXIT_DONE


def _spawned(rank: int, options: Options, nproc: int, meeting: str) -> None:
    place = Place(
        rank=rank,
        world_size=nproc,
        local_rank=rank,
        local_world_size=nproc,
        launched=True,
        meeting=meeting,
    )
    # Several ranks on one machine: each with all its cores would only be in the others' way.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // nproc))
    exit_status = be_a_rank(options, place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)


def be_a_rank(options: Options, place: Place) -> int:
    """Connect, show everything, and return the exit status; an error is printed before."""
    console = Console(rank=place.rank)
    try:
        with connect(place, timeout_s=options.timeout_s) as ranks:
            return run(options, ranks, console, COLLECTIVES)
    except TrainError as error:
        console.complain(str(error))
        return error.exit_status
    except (RuntimeError, OSError) as error:
        # Each rank reports its own error: the cause cannot be known from here.
        console.complain(f"{type(error).__name__}: {error}", every_rank=True)
        return EXIT_FAILED


def run(options: Options, ranks: Ranks, console: Console, collectives: Sequence[Collective]) -> int:
    """Show collectives until all are done or one is wrong."""
    backend = torch.distributed.get_backend()
    console.say(f"{ranks.place.world_size} ranks, {backend} on {ranks.device.type}")
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
