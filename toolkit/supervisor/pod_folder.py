"""The folders that a pod writes to, and the evidence of a start in them."""

import contextlib
import glob
import os
import sys
from typing import List, Optional, Sequence

from .evidence.cause import Cause, Logs, cause_of, few_gpus
from .evidence.files import read
from .evidence.first_error import Attempt as Starts
from .evidence.first_error import Failure, from_line, last_failure
from .evidence.memory import oom_kills_of_container
from .evidence.repeated import Repetitions, earlier_alike
from .evidence.torchrun_report import logged_failure
from .policy import Counts, Evidence, Verdict
from .supervised import lost_since

LOOKS_AFTER_FAILURE = 13
"""For how many looks after a possible failure of a start to search for its errors: on a file server
they may arrive a minute late."""


class PodFolder(Evidence):
    """The evidence of one start of a pod's container.

    Kubernetes restarts pods one by one, so each pod counts its starts in a folder of its name.
    """

    def __init__(
        self,
        *,
        compares: bool,
        cgroups: str,
        nodes: int = 1,
        command: Sequence[str] = (),
        host_network: bool = False,
    ) -> None:
        self.run_dir = os.environ["TRAIN_RUN_DIR"]
        self.name = os.environ["HOSTNAME"]
        if host_network:  # of a PyTorchJob with a Master, only the operator's RANK is an index
            index = os.environ.get("JOB_COMPLETION_INDEX") or os.environ.get("RANK", "0")
            self.name = f"pod-{index}"
        self.number = 0
        self.logs = self.own = ""
        """The attempt's folder, and this pod's subfolder."""
        self.began_ns = 0
        """When this start began, by the run directory's clock."""
        self.earlier_starts = 0
        self.compares = compares
        """Whether to compare the failures of two starts."""
        self._cgroups = cgroups
        self.nodes, self.command = nodes, command
        self.repetitions = Repetitions(self._starts, self._torchruns)
        self._torchrun, self._start = "", 0
        """The folder of this pod's torchrun, and its newest start of the ranks."""
        self._log_size, self._looks_left = 0, 0

    def counts(self) -> Counts:
        """Return the totals of this pod's starts since the submission."""
        failures = len(read(self.file("failed")).splitlines())
        idle, best = 0, -1
        for line in read(self.file("steps")).splitlines():
            step = int(line) if line.isdigit() else 0
            idle, best = (0, step) if step > best else (idle + 1, best)
        return Counts(failures, 0, idle, max(best, 0))

    def outcome_is_current(self) -> bool:
        """Whether outcome.json was written since this start began."""
        try:
            changed_ns = os.stat(os.path.join(self.run_dir, "outcome.json")).st_mtime_ns
        except OSError:
            return False
        return changed_ns > self.began_ns

    def may_be_repeated(self) -> bool:
        """Whether a start may have failed recently: torchrun has logged a line or restarted ranks.

        Opens and lists nothing once torchrun has its folder: many pods share the folders.
        """
        if not self._torchrun:
            first = next(iter(self.newer(self.own, "*/attempt_0")), "")
            self._torchrun = first[: -len("attempt_0")]
        before, size = (self._start, self._log_size), 0
        with contextlib.suppress(OSError):
            size = os.stat(self.torchrun_log()).st_size
        while os.path.isdir(f"{self._torchrun}attempt_{self._start + 1}"):
            self._start += 1
        self._log_size = size
        if self._torchrun and (self._start, size) != before:
            self._looks_left = LOOKS_AFTER_FAILURE
        self._looks_left -= 1
        return self._looks_left >= 0 or self.repetitions.awaits_cause

    def repeated(self) -> Optional[Failure]:
        """Return the repeated failure for which torchrun was stopped, if any."""
        return from_line(read(self.file("repeated"), 4096))

    def exited_with(self, status: int) -> bool:
        """Whether the last worker in torchrun's log ended with this status."""
        last = logged_failure(self.torchrun_log())
        return last is not None and last.exitcode == status

    def no_progress(self) -> bool:
        """Whether another pod has recorded a worker that ended for lack of progress."""
        return os.path.exists(self.shared("no_progress"))

    def stopped(self) -> Optional[Verdict]:
        """Return the verdict if Kubernetes has stopped the pod.

        An out-of-memory failure of a rank takes precedence over a stop because of another pod.
        """
        if not self.stopping:
            return None
        if self.out_of_memory() is not None and logged_failure(self.torchrun_log()):
            return None
        return Verdict("preempted", "stopped from outside")

    def out_of_memory(self) -> Optional[str]:
        """Return "" if the container's cgroup counts an out-of-memory kill, else None."""
        return "" if oom_kills_of_container(self._cgroups) else None

    def cause(self) -> Optional[Cause]:
        """Return the first failure in any pod of the attempt."""
        reported = [one for one in map(logged_failure, self.torchrun_logs()) if one]
        out_of_memory = [self.name] if self.out_of_memory() is not None else []
        lacking = few_gpus(self.command, os.environ)
        logs = Logs((), self.nodes, reported, out_of_memory, (), lacking)
        return cause_of(self._starts(), self.logs, logs)

    def cost(self) -> str:
        """Return the number of steps since the newest checkpoint; empty if unknown."""
        return lost_since(self.outcome, self.run_dir)

    def raised(self) -> Optional[Failure]:
        """Return the first error of the last start."""
        return last_failure(self._starts(), self.logs)

    def failed_before(self) -> Optional[Failure]:
        """Return the failure of this start if an earlier start of this pod failed alike."""
        if not self.compares:
            return None
        now = self.raised()
        if now is not None:
            self.write("first_error", now.line())
        numbers = reversed(range(self.earlier_starts))
        earlier = (self.file(f"first_error-{number}") for number in numbers)
        twice = self.repetitions.in_job(all_ended=True)
        return twice or (now if now and earlier_alike(now, earlier) else None)

    def _starts(self) -> Starts:
        last = logged_failure(self.torchrun_log())
        reported = [last] if last else []
        return Starts(self.run_dir, self.number, [self.name], reported, self.began_ns)

    def _torchruns(self) -> List[str]:
        """Return the folders of the torchruns of all pods that are newer than this start."""
        return self.newer(self.logs, "*/*/")

    def newer(self, folder: str, pattern: str) -> List[str]:
        """Return the paths below a folder that have changed since this start."""
        found = []
        for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
            with contextlib.suppress(OSError):
                if os.stat(path).st_mtime_ns > self.began_ns:
                    found.append(path)
        return found

    # ---- Files

    def file(self, name: str) -> str:
        """Return the path of this pod's file."""
        return os.path.join(self.own, name)

    def shared(self, name: str) -> str:
        """Return the path of a file that all pods share."""
        return os.path.join(self.logs, name)

    def torchrun_log(self) -> str:
        """Return the path of torchrun's own log."""
        return os.environ.get("TORCH_LOGS_OUT") or self.file("torchrun.log")

    def torchrun_logs(self) -> List[str]:
        """Return the paths of all pods' torchrun logs."""
        return glob.glob(glob.escape(self.logs) + "/*/torchrun.log")

    def write(self, name: str, text: str) -> None:
        """Write a line to a file of this pod; nothing for an empty text."""
        _write(self.file(name), "w", text)

    def append(self, name: str, text: str) -> None:
        """Add a line to a file of this pod."""
        _write(self.file(name), "a", text)

    def write_shared(self, name: str, text: str) -> None:
        """Write a line to a file that all pods share."""
        _write(self.shared(name), "w", text)

    def touch_shared(self, name: str) -> None:
        """Create a file that all pods share."""
        _write(self.shared(name), "a", "")


def _write(path: str, mode: str, text: str) -> None:
    """Write a line, or nothing; a full disk or unreachable storage changes no exit status."""
    try:
        with open(path, mode, encoding="utf-8", errors="surrogateescape") as file:
            file.write(text + "\n" if text else "")
    except OSError as error:
        say(f"{path}: {error.strerror}")


def say(text: str) -> None:
    """Print a line to the pod's log."""
    print(text, file=sys.stderr, flush=True)
