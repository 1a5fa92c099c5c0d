"""`torchrun … -m train`: command line, readiness to stop, training, exit status."""

import faulthandler
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from .cli import flags
from .errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    RefusedError,
    TrainError,
    UsageError,
)
from .failure.record import tell, tell_torchrun
from .rundir.console import Console, end_process, keep_lines_whole
from .rundir.files import RunDirectory
from .runtime.phases import Phases
from .runtime.rank import RankInfo
from .runtime.signals import StopRequest
from .runtime.spawn import spawn


def main() -> int:
    """Train, and return the exit status; an unexpected error is raised."""
    try:
        rank_info = RankInfo.from_environ(os.environ)
    except UsageError as error:
        tell(RankInfo(), str(error))
        return error.exit_status
    console = Console(rank=rank_info.rank)
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        console.say(flags.usage())
        return EXIT_DONE
    directory: RunDirectory | None = None
    named = os.environ.get(flags.RUN_DIR)
    # A dry run, an evaluation or a prediction does not count as an attempt at the run.
    if named and flags.trains(sys.argv[1:]):
        directory = RunDirectory(Path(named), rank_info)
    # Install the handler first: a signal may arrive during the second that importing torch takes.
    stop = StopRequest()
    stop.install(at_once=lambda name: end_early(directory, name))
    try:
        request = flags.parse(sys.argv[1:], os.environ, rank_info)
        if request.only_looking:
            return look(request, console)
        config = request.config
        reads = config.infers or config.verify_only
        directory = None if reads else RunDirectory(config.directory, rank_info)
        # Import these late, as they import torch: a mistyped flag is then reported at once.
        if config.spawn is not None and not rank_info.launched:
            exit_status = spawn(config.spawn, sys.argv[1:], stop)
            if exit_status == EXIT_PREEMPTED:
                # The ranks may have had no time to record it.
                record_end(directory, "preempted", f"stopped by {stop.signal_name or 'a signal'}")
            return exit_status
        if config.infers:
            from .inference.session import infer

            return infer(config, rank_info, stop, console)
        if config.verify_only:
            from .proof.session import prove_only

            return prove_only(config, rank_info, console)
        from .session import train

        phases = Phases.of_process(os.environ, restart=rank_info.restart)
        phases.end("imports")
        exit_status = train(config, rank_info, stop, console, phases)
        if exit_status == EXIT_PREEMPTED:
            tell_torchrun(f"stopped by {stop.signal_name or 'a signal to another rank'}")
        return exit_status
    except TrainError as error:
        if isinstance(error, UsageError) and not isinstance(error, RefusedError):
            record_end(directory, "fatal", str(error))
        tell(rank_info, str(error))
        return error.exit_status


def look(request: flags.Request, console: Console) -> int:
    """Write the configuration or show the plan: neither needs training."""
    if request.write_config is not None:
        if console.rank == 0:
            flags.write_file(request.write_config, request.config)
        console.say(f"wrote the configuration to {request.write_config}; nothing was trained")
        return EXIT_DONE
    from . import dryrun

    return dryrun.show(request.config, console)


def end_early(directory: RunDirectory | None, signal_name: str) -> None:
    """Record a stop before the ranks could agree on one."""
    reason = f"stopped by {signal_name}"
    if directory is not None and directory.rank_info.rank == 0:
        record_end(directory, "preempted", reason)
    # torchrun also sends the signal to the ranks that are left when one has failed.
    tell_torchrun(reason, echo=True)


def record_end(directory: RunDirectory | None, status: str, reason: str) -> None:
    """Record an end that came before the run directory was claimed; see `may_forestall()`.

    Any rank records its refusal: torchrun ends the others, rank 0 perhaps before it could.
    """
    if directory is None or not directory.path.is_dir():
        return
    old = directory.read_outcome()
    outcome = directory.outcome_after(old, status, reason, steps=old.steps if old else None)
    with suppress(OSError):
        directory.write_outcome(outcome, early=True)


def enter() -> NoReturn:
    """Run `main()` as the entry point of this process, and end the process."""
    # After a crash in C++, show where Python was.
    faulthandler.enable()
    keep_lines_whole()
    try:
        exit_status = main()
    except Exception as error:
        traceback.print_exc()
        tell_torchrun("".join(traceback.format_exception_only(error)).strip())
        exit_status = EXIT_FAILED
    end_process(exit_status)


if __name__ == "__main__":
    enter()
