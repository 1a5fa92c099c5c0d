"""One attempt of a run on this machine, where several torchruns simulate several nodes.

Another process starts the next attempt: the role `keep`, if the file `start_again` exists, or a
scheduler that requeues a script by its exit status.
"""

import contextlib
import glob
import os
import random
import shutil
import signal
import socket
import sys
import time
from typing import IO, List, NamedTuple, Optional, Sequence

from . import run_lock
from .attempt import Attempt, Refused, folder_of, next_number, open_attempt, with_number
from .evidence.cause import Logs, few_gpus
from .evidence.files import last_lines, read
from .evidence.outcome import read_outcome
from .evidence.restarts import after_restarts
from .evidence.torchrun_report import has_exitcode, read_reports, report_lines
from .own_folder import OwnFolder, short_tmpdir
from .policy import NO_PROGRESS_STATUS, Verdict, count, decide, judge
from .process import Children, Signals, parent_lives
from .supervised import Policy, Supervised, lacks
from .watchdog_files import write_watchdog

AGAIN = "started again"
STOP_MARGIN_S = 10
"""Seconds beyond `stop.grace` after which a torchrun that still runs gets SIGTERM again."""

_KILLED = frozenset((134, 135, 137, 139))
"""Exit statuses of a torchrun killed by SIGABRT, SIGBUS, SIGKILL or SIGSEGV."""


class Options(NamedTuple):
    """Options from the command line."""

    run_dir: str
    mode: str
    command: Sequence[str]
    """torchrun and its arguments."""
    devices: Sequence[str]
    """The GPUs of each simulated node, as comma-separated numbers: one item per node."""
    ports: Sequence[int]
    """The first port for the rendezvous, and the number of ports."""
    static: bool
    """Whether the rendezvous is static: torchrun gets the node rank."""
    policy: Policy
    again: int = 0
    """The exit status on which the scheduler requeues the script; 0: it never does."""


def main(options: Options) -> int:
    """Make one attempt; return the exit status."""
    options = options._replace(run_dir=os.path.abspath(options.run_dir))
    signals = Signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    parent = os.getppid()
    try:
        lock = _lock_by_hand(options)
        attempt = open_attempt(options.run_dir, options.mode or _queued_again(options))
    except Refused as refused:
        print(f"{options.policy.job}: {refused}", file=sys.stderr)
        return 1
    status, own = 1, LocalAttempt(options, attempt, signals, parent)
    try:
        status = own.run()
    finally:
        own.close()
        attempt.write("exit_status", str(status))
        if lock is not None:
            lock.close()
    return options.again if options.again and _starts_again(attempt.logs) else status


def _lock_by_hand(options: Options) -> Optional[IO[bytes]]:
    """Hold the lock of a run that is continued by hand; None if its keeper holds the lock.

    Raises:
        Refused: the run is active.
    """
    path = os.path.join(options.run_dir, run_lock.NAME)
    if options.mode != "continue" or not os.path.exists(path):
        return None
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(run_lock.SCRIPT_LOCK), os.stat(path)):
            return None
    try:
        lock = run_lock.hold(options.run_dir, again=True)
    except BlockingIOError:
        raise Refused(f"{options.run_dir} is active") from None
    except OSError:
        return None
    run_lock.note_pid(lock, os.getpid())
    return lock


def _queued_again(options: Options) -> str:
    """Return the mode for a script that a scheduler restarts with the same arguments."""
    before = folder_of(options.run_dir, next_number(options.run_dir) - 1)
    return "restart" if options.again and _starts_again(before) else ""


def _starts_again(folder: str) -> bool:
    return os.path.exists(folder + "/start_again")


class LocalAttempt(Supervised):
    """An attempt on this machine, and its evidence."""

    def __init__(self, options: Options, attempt: Attempt, signals: Signals, parent: int) -> None:
        super().__init__(options.policy, attempt)
        self.options, self.signals, self.parent = options, signals, parent
        self.children = Children(options.policy.grace_s + STOP_MARGIN_S)
        self._folder = OwnFolder()
        self._at_end: Optional[Sequence[str]] = None

    # ---- The attempt

    def run(self) -> int:
        """Start the torchruns, wait for them, and decide what follows."""
        obstacle = self._obstacle()
        if obstacle:
            return self._refuse(obstacle)
        self._start()
        while self.children.look():
            self._heed_signals()
            if self.policy.restarts > 1 and not self.stopping:
                failure = self.repetitions.in_job(all_ended=False)
                if failure is not None:  # torchrun would start the workers again
                    self.attempt.write("repeated", failure.line())
                    self.children.status = self.children.status or 1
                    self._stop("repeated")
            self.tell_stalls()
            self.signals.wait(0.2)
        self._heed_signals()
        return self._conclude(self.children.status)

    def close(self) -> None:
        """Remove files that nobody else needs."""
        self._folder.remove()

    def _obstacle(self) -> str:
        missing = shutil.which(self.options.command[0]) is None
        what = "torchrun is not in PATH; activate the environment that has torch"
        return lacks(self.policy) or (what if missing else "")

    def _refuse(self, why: str) -> int:
        print(f"{self.policy.job}: {why}", file=sys.stderr)
        self.attempt.write("reason", f"fatal: {why}")
        self.tell("end", "fatal", f"ended: fatal: {why}", tries=3)
        return 1

    def _start(self) -> None:
        options, policy, attempt = self.options, self.policy, self.attempt
        prefix: List[str] = []
        if policy.stall != "never" or policy.protect_children or policy.warm:
            start = write_watchdog(
                attempt.path("watchdog"),
                watches=policy.stall != "never",
                reads_steps="TRAIN_LOG_PATTERN" in os.environ,
                children=policy.protect_children,
                warm=policy.warm,
            )
            prefix = ["sh", start, policy.stall]
        environ = {
            **os.environ,
            "TRAIN_RUN_DIR": options.run_dir,
            "TRAIN_ATTEMPT": str(attempt.number),
            "TRAIN_ATTEMPT_BEGAN": str(int(time.time())),
        }
        environ.update(short_tmpdir(environ, self._folder))
        environ.pop("TRAIN_RANK_PIDS", None)  # from a rank that started this run
        words = [with_number(word, attempt.number) for word in options.command]
        port = free_port(*options.ports)
        for node, devices in enumerate(options.devices):
            self._heed_signals()
            own = [
                f"--rdzv-endpoint=127.0.0.1:{port}",
                f"--rdzv-id={os.getpid()}",
                "--local-addr=127.0.0.1",
                f"--node-rank={node}" if options.static else f"--rdzv-conf=is_host={int(not node)}",
                f"--log-dir={attempt.path(f'node-{node}')}",
                "--tee=3",
            ]
            environ["CUDA_VISIBLE_DEVICES"] = visible_devices(devices)
            self.children.start(
                [*prefix, words[0], *own, *words[1:]], attempt.path(f"node-{node}.log"), environ
            )
        if self.stopping:  # a signal came meanwhile
            self.children.stop()

    def _heed_signals(self) -> None:
        for number in self.signals.take():
            if number == signal.SIGTERM and not parent_lives(self.parent):
                self.stopping = self.stopping or "left"
            self._stop("cancelled")

    def _stop(self, why: str) -> None:
        self.stopping = self.stopping or why
        self.children.stop()

    # ---- The end

    def _conclude(self, status: int) -> int:
        self.status = status
        outcome = read_outcome(self.options.run_dir)
        if outcome.attempt == str(self.attempt.number):
            self.outcome = outcome
        verdict = judge(self)
        self.write_reason(verdict, "deciding")
        step = self.outcome.step if self.outcome else ""
        if self.outcome is not None:
            self.attempt.write("step", step)
        made = self.attempt.made(verdict.word, int(step) if step.isdigit() else None)
        counts = count(made, self.attempt.best_before())
        decision = decide(verdict.word, counts, self.policy.limits, again=AGAIN)
        if decision.again:
            self.attempt.write("start_again", "")
        if decision.word == "done":
            status = 0
        elif decision.word == "no_progress":
            status = NO_PROGRESS_STATUS
        else:
            status = status or 1
        verdict = verdict._replace(word=decision.word)
        text = self.write_reason(verdict, decision.text)
        if decision.word != "done" and sys.stderr.isatty():
            about = f"{self.policy.job}: attempt {self.attempt.number} ended: {text}"
            print(about, file=sys.stderr)
        self.tell_stalls()
        if decision.word == "done":
            text += after_restarts(self.options.run_dir, self.attempt.number, self._logs())
        tries = 1 if decision.again or self.stopping else 3  # little time is left after a stop
        self.tell("requeue" if decision.again else "end", verdict.word, f"ended: {text}", tries)
        return status

    # ---- Evidence

    def _logs(self) -> List[str]:
        return sorted(glob.glob(glob.escape(self.attempt.logs) + "/node-*.log"))

    def ranks_began(self) -> bool:
        """Whether torchrun has started any ranks."""
        return bool(glob.glob(glob.escape(self.attempt.logs) + "/node-*/*/attempt_*"))

    def reports(self) -> Sequence[str]:
        """Return the lines of the torchrun reports."""
        return report_lines(self._logs())

    def hosts(self) -> List[str]:
        """Return the name of this machine."""
        return [socket.gethostname()]

    def logs(self) -> Logs:
        """Return the attempt's evidence outside the rank folders."""
        files = self._logs()
        return Logs(
            nodes=len(files),
            reported=[
                one._replace(host=os.path.basename(path)[: -len(".log")])
                for path in files
                for one in read_reports(report_lines([path]))
            ],
            lines=[line for path in files for line in last_lines(path)],
            few_gpus=few_gpus(self.options.command, os.environ, self.options.devices[0]),
            one_machine=True,
        )

    def exited_with(self, status: int) -> bool:
        """Whether torchrun's report shows a worker with this exit status."""
        if self._at_end is None:
            self._at_end = self.reports()
        return has_exitcode(self._at_end, status)

    def stopped(self) -> Optional[Verdict]:
        """Return the verdict if the attempt was stopped; the keeper records a time limit."""
        if self.stopping == "left":
            return Verdict("fatal", "the supervisor of this run was killed")
        if self.stopping != "cancelled":
            return None
        if read(self.attempt.path("stopping"), 100).strip() == "walltime":
            return Verdict("walltime", "out of time")
        return Verdict("cancelled", "stopped by a signal")

    def torchrun_was_killed(self) -> Optional[str]:
        """Return where torchrun was killed, if that was the first failure."""
        return "this machine" if self.status in _KILLED else None


def free_port(first: int, count: int) -> int:
    """Return an unused port."""
    port = first
    for _ in range(50):
        port = first + random.randrange(count)
        with contextlib.closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                break
    return port


def visible_devices(devices: str) -> str:
    """Return a node's GPUs, as indices into the GPUs visible to the user."""
    usable = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    given = usable.split(",") if usable else []
    numbers = [int(device) for device in devices.split(",")] if devices else []
    return ",".join(given[number] if number < len(given) else str(number) for number in numbers)
