"""A pod's first process: runs torchrun and reports its end to Kubernetes by the exit status.

0: all steps are done. 42: failed permanently. 138: to be restarted.
"""

import contextlib
import errno
import glob
import hashlib
import os
import re
import signal
import time
import traceback
import uuid
from types import MappingProxyType
from typing import Callable, Dict, List, Mapping, NamedTuple, NoReturn, Optional, Sequence

from .attempt import with_number
from .evidence.files import last_lines, open_regular, read
from .evidence.outcome import read_outcome
from .evidence.restarts import after_restarts
from .first_pod import Deserted, FirstPod, at_address, own_address
from .notify import Event, Notifier
from .pod_folder import PodFolder, say
from .policy import (
    NO_PROGRESS_STATUS,
    Verdict,
    decide,
    judge,
    limit_reached,
    reason_line,
    sentence,
)
from .process import Children, Signals
from .supervised import Policy
from .watchdog_files import write_watchdog

DONE, FINAL, AGAIN = 0, 42, 138

LOOK_S = 5
"""Seconds between two checks of the other pods' files."""

SILENT_S = 15
"""Seconds after which a stopping pod that has written nothing counts as lost."""

STOP_MARGIN_S = 10
"""Seconds beyond `stop.grace` after which a torchrun that still runs gets SIGTERM again."""

STORAGE_TRIES = 12
"""How often to try the run directory, every five seconds: storage may be briefly unavailable."""


class Options(NamedTuple):
    """Options from the command line."""

    command: Sequence[str]
    """torchrun and its arguments."""
    policy: Policy
    nodes: int = 1
    elastic: bool = False
    replaces: bool = False
    """Whether Kubernetes replaces every failed pod, including a permanently failed one."""
    marks: bool = False
    """Whether a permanently failed pod informs the others by a mark in the run directory."""
    join_timeout_s: int = 0
    """How long pods wait for each other at the first pod; 0 if an operator sets the endpoint."""
    host_network: bool = False
    """Whether the pod has the name of its node, which its replacement does not have."""
    environ: Mapping[str, str] = MappingProxyType({})
    """Variables of the ranks with names that an operator reserves."""
    cgroups: str = "/sys/fs/cgroup"
    """Mount point of the container's cgroup."""


class _Ended(Exception):
    """The pod ends with a status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def main(options: Options) -> int:
    """Run torchrun; return the pod's exit status."""
    signals = Signals((signal.SIGTERM, signal.SIGINT, signal.SIGCHLD))
    pod = PodStart(options, signals)
    try:
        pod.run()
    except _Ended as ended:
        return ended.status
    except Exception:
        traceback.print_exc()
        return pod.failed_itself()


class PodStart(PodFolder):
    """One start of a pod's container."""

    def __init__(self, options: Options, signals: Signals) -> None:
        compares = bool(options.policy.restarts or options.policy.limits.requeue)
        super().__init__(
            compares=compares,
            cgroups=options.cgroups,
            nodes=options.nodes,
            command=options.command,
            host_network=options.host_network,
        )
        self.options, self.signals = options, signals
        self.submission = os.environ.get("TRAIN_START", "")
        self.children = Children(options.policy.grace_s + STOP_MARGIN_S)
        self.notifier = Notifier(options.policy.receivers, options.policy.job, self.run_dir)
        self.first = FirstPod(options.command)
        self.is_host = os.environ.get("JOB_COMPLETION_INDEX", "0") == "0"
        self.meets_others = options.join_timeout_s > 0 and options.nodes > 1
        self.environ: Dict[str, str] = {}
        """The environment of the ranks."""
        self.start = ""
        """The text that this start wrote to `began`; another pod of this name writes another."""
        self._found_start = (0, 0), ""
        self.stalls_told = 0
        self.deserted: Optional[Deserted] = None
        self.was_deserted = False

    # ---- The start

    def run(self) -> NoReturn:
        """Start torchrun, wait for it, and decide what follows.

        Raises:
            _Ended: always, with the pod's exit status.
        """
        self._open_attempt()
        self._check_submitted_files()
        self._await_earlier_start()
        if self._is_done():
            say("all steps were made before this start")
            raise _Ended(DONE)
        self._check_earlier_starts()
        self._start_torchrun()
        look_s = time.monotonic() + LOOK_S
        while self.children.look():
            self._heed_signals()
            if time.monotonic() >= look_s:
                self._look()
                look_s = time.monotonic() + LOOK_S
            self.signals.wait(1)
        self._heed_signals()
        self._conclude()

    def _open_attempt(self) -> None:
        self._patiently(lambda: os.makedirs(os.path.join(self.run_dir, "logs"), exist_ok=True))
        given = os.environ.get("TRAIN_ATTEMPT", "")
        self.number = int(given) if given.isdigit() else 0
        # Also if the run was deleted and applied again: the others take the attempt number from
        # the first pod's link.
        if self.submission:
            self._patiently(self._take_number)
        self.logs = os.path.join(self.run_dir, "logs", f"attempt-{self.number}")
        self.own = os.path.join(self.logs, self.name)
        self._patiently(lambda: os.makedirs(self.own, exist_ok=True))

    def _take_number(self) -> None:
        while True:
            link = os.path.join(self.run_dir, "logs", f"start-{self.number}")
            try:
                return os.symlink(self.submission, link)
            except FileExistsError:
                if not os.path.islink(link) or os.readlink(link) == self.submission:
                    return
            except OSError as error:
                if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
                    raise
                return  # a file system without links
            self.number += 1

    def _patiently(self, write: Callable[[], None]) -> None:
        """Write to the storage, which may be away for a moment."""
        for left in reversed(range(STORAGE_TRIES)):
            try:
                return write()
            except OSError as error:
                if not left:
                    say(f"the run directory cannot be written: {error}")
                    raise _Ended(FINAL) from None
            self.signals.wait(5)

    def _check_submitted_files(self) -> None:
        """Refuse files that were not submitted: others may create a ConfigMap of the same name.

        The pod executes these files.
        """
        folder = os.environ.get("TRAIN_SUBMITTED_DIR", "")
        for line in os.environ.get("TRAIN_SUBMITTED_SHA256", "").splitlines():
            checksum, _, name = line.partition("  ")
            try:
                with open_regular(os.path.join(folder, name)) as file:
                    found = hashlib.sha256(file.read()).hexdigest()
            except OSError:
                found = ""
            if found != checksum:
                self._refuse(f"the ConfigMap does not hold what was submitted: {name}")

    def _await_earlier_start(self) -> None:
        """Wait while an earlier start of this pod stops, for its checkpoint.

        Kubernetes may replace a deleted or evicted pod 10 s after the deletion, long before
        `stop.grace` is over. A pod on a lost node shows no sign of life.
        """
        told, end_s = False, time.monotonic() + self.options.policy.grace_s + STOP_MARGIN_S
        while time.monotonic() < end_s and self._earlier_start_stops():
            if not told:
                say("waits for the pod that this one replaces: it is being stopped")
            told = True
            self.signals.wait(1)
            if any(number != signal.SIGCHLD for number in self.signals.take()):
                raise _Ended(AGAIN)  # this pod has started nothing
        with contextlib.suppress(OSError):
            os.remove(self.file("waiting"))

    def _earlier_start_stops(self) -> bool:
        """Whether an earlier start of this pod has got a signal and still runs."""
        began = read(self.file("began"), 100)
        if not began or began != read(self.file("stopping"), 100):
            return False
        if os.path.exists(self.file("ended")):
            return False
        self.write("waiting", "")  # the file system's clock, not that of a node
        try:
            now_s, then_s = (os.stat(self.file(name)).st_mtime for name in ("waiting", "stopping"))
        except OSError:
            return False
        return now_s - then_s < SILENT_S

    def _is_done(self) -> bool:
        """Whether the run finished while this pod was gone, or before it could join."""
        if not self.submission or not os.path.exists(self.shared("done")):
            return False
        if self.options.nodes == 1:
            return True
        late = self.options.elastic and not os.path.exists(self.file("began"))
        return late or read_outcome(self.run_dir).status == "done"

    def _check_earlier_starts(self) -> None:
        options = self.options
        if options.replaces and os.path.exists(self.shared("ended_for_good")):
            self._repeat_the_end()
        started_before = os.path.exists(self.file("began"))
        if started_before and not os.path.exists(self.file("ended")):
            # The earlier start was killed, for example out of memory.
            self.append("failed", "killed")
        if not os.path.exists(self.file("steps")):  # the step at which the submission began
            self.append("steps", read_outcome(self.run_dir).step or "0")
        reached = limit_reached(self.counts(), options.policy.limits)
        if reached is not None:
            self._refuse(reached.text, reached.word)
        if os.path.exists(self.shared("no_progress")):
            self._refuse("a worker has ended with 93, without progress")
        self.append("earlier_ends", read(self.file("ended")).rstrip("\n"))
        for name in ("ended", "deserted", "repeated", "stopping"):
            with contextlib.suppress(OSError):
                os.remove(self.file(name))
        self._put_the_log_aside()
        if options.policy.limits.requeue:
            self._keep_the_last_error(started_before)
        self.start = str(uuid.uuid4())
        self._patiently(self._begin)

    def _begin(self) -> None:
        with open(self.file("began"), "w", encoding="ascii") as file:
            file.write(self.start + "\n")
        self.began_ns = os.stat(self.file("began")).st_mtime_ns

    def _put_the_log_aside(self) -> None:
        """Begin torchrun's log anew: a failure of an earlier start is not one of this start."""
        number = 0
        while os.path.lexists(self.file(f"torchrun-{number}.log")):
            number += 1
        with contextlib.suppress(OSError):
            os.rename(self.file("torchrun.log"), self.file(f"torchrun-{number}.log"))

    def _keep_the_last_error(self, started_before: bool) -> None:
        """Save the error of the last start, for comparison."""
        while os.path.lexists(self.file(f"first_error-{self.earlier_starts}")):
            self.earlier_starts += 1
        if not started_before:
            return
        kept = f"first_error-{self.earlier_starts}"
        try:
            os.rename(self.file("first_error"), self.file(kept))
        except OSError:
            self.append(kept, "")
        self.earlier_starts += 1

    def _start_torchrun(self) -> None:
        options = self.options
        environ = self.environ = {
            **os.environ,
            "TRAIN_ATTEMPT": str(self.number),
            "TRAIN_ATTEMPT_BEGAN": str(int(time.time())),
            "PET_LOG_DIR": self.own,
            # torchrun logs there how workers end.
            "TORCH_LOGS_OUT": self.torchrun_log(),
            **options.environ,
        }
        command = [with_number(word, self.number) for word in options.command]
        if options.join_timeout_s:
            environ["PET_RDZV_CONF"] = (
                f"is_host={int(self.is_host)},join_timeout={options.join_timeout_s},read_timeout=30"
            )
            # torchrun waits for a pod that is lost between joining and starting its ranks: 30 s for
            # its address (read_timeout). This variable skips the wait for its size.
            environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        if self.meets_others:
            address = self._meeting_address()
            command = at_address(command, address)
            if self.is_host and address:
                # torchrun sorts addresses before names: this node has rank 0 with both.
                environ["PET_LOCAL_ADDR"] = address
        self._heed_signals()
        if self.stopping:  # the signal arrived before the start of torchrun
            self.write("ended", "")
            raise _Ended(AGAIN)
        try:
            self.children.start([*self._preparation(), *command], None, environ)
        except OSError as error:
            say(f"{command[0]}: {error.strerror}")
            self.children.status = 127 if isinstance(error, FileNotFoundError) else 126
            return
        if self.meets_others and not self.is_host:
            pid, limit_s = self.children.running[0].pid, options.policy.grace_s + 30
            self.deserted = Deserted(self.first, pid, self.torchrun_log(), limit_s)

    def _meeting_address(self) -> str:
        if self.is_host:
            return own_address()
        return self.first.wait(self.options.join_timeout_s, self.signals)

    def _preparation(self) -> List[str]:
        """Return the command that starts torchrun with the watchdog; empty if writing fails."""
        options = self.options
        policy = options.policy
        if policy.stall == "never" and not policy.protect_children and not policy.warm:
            return []
        try:
            program = write_watchdog(
                self.file("watchdog"),
                watches=policy.stall != "never",
                reads_steps="TRAIN_LOG_PATTERN" in os.environ,
                children=policy.protect_children,
                warm=policy.warm,
                tells_trainer="KUBEFLOW_TRAINER_SERVER_URL" in os.environ,
            )
        except OSError as error:
            say(f"goes on without the watchdog: {error}")
            return []
        return ["sh", program, policy.stall]

    # ---- While torchrun runs

    def _heed_signals(self) -> None:
        for number in self.signals.take():
            if number == signal.SIGCHLD:
                continue
            self.stopping = "stopped"
            # A lost node may still run this pod after its replacement has started. This pod must
            # then not write a checkpoint.
            if self._is_replaced():
                raise _Ended(AGAIN)
            self._show_life()
            self.children.send(signal.SIGTERM)

    def _look(self) -> None:
        """Check the other pods' files, and stop torchrun if it cannot succeed."""
        if self._is_replaced():
            raise _Ended(AGAIN)
        if self.stopping:  # torchrun has its signal; a second one would end a checkpoint
            self._show_life()
        elif self._ended_for_good() or self._is_hopeless():
            self.children.stop()
        if self.is_host or not self.meets_others:
            self._tell_stalls()
        if self.deserted is not None and self.deserted.look():
            self.was_deserted = True
            self.write("deserted", "")
            self.children.send(signal.SIGKILL)

    def _show_life(self) -> None:
        """Let a pod that replaces this one wait until this one has stopped."""
        path = self.file("stopping")
        if os.path.exists(path):
            with contextlib.suppress(OSError):
                os.utime(path)
        elif self.start:
            self.write("stopping", self.start)

    def _is_hopeless(self) -> bool:
        """Whether restarts by torchrun fail in the same way."""
        if not self.options.policy.restarts:
            return False
        if self.out_of_memory() is not None and any(
            re.search("attempt_[1-9]", path) for path in self.newer(self.own, "*/attempt_*")
        ):
            return True
        if self.options.policy.restarts < 2:
            return False
        if not os.path.exists(self.file("repeated")):
            if not self.may_be_repeated():
                return False
            failure = self.repetitions.in_job(all_ended=False)
            if failure is None:
                return False
            self.write("repeated", failure.line())
        return True

    def _is_replaced(self) -> bool:
        """Whether another pod has replaced this pod."""
        if not self.start:
            return False
        try:
            info = os.stat(self.file("began"))
        except OSError:
            return False
        changed = (info.st_mtime_ns, info.st_ino)
        if changed != self._found_start[0]:
            self._found_start = changed, read(self.file("began"), 100).strip()
        return self._found_start[1] not in ("", self.start)

    def _ended_for_good(self) -> str:
        """Return how another pod has failed permanently; empty if none has.

        Kubernetes replaces the pods of a lost node only if it replaces every failed pod, including
        one with exit status 42. So that pod leaves a mark, and its replacements and the others exit
        when they see it. The operator of a PyTorchJob deletes running pods with their logs, so they
        exit at the mark first. A mark older than this start belongs to an earlier submission.
        """
        if not self.options.marks:
            return ""
        path = self.shared("ended_for_good")
        try:
            changed_ns = os.stat(path).st_mtime_ns
        except OSError:
            return ""
        if not self.options.replaces and changed_ns <= self.began_ns:
            return ""
        return read(path, 4096).rstrip("\n")

    def _tell_stalls(self) -> None:
        """Send a notification for each stall file of the watchdog."""
        if "stall" not in self.options.policy.receivers.events:
            return
        while os.path.exists(self.shared(f"watchdog/stall-{self.stalls_told + 1}")):
            self.stalls_told += 1
            text = read(self.shared(f"watchdog/stall-{self.stalls_told}"), 4096).strip()
            event = Event("stall", "", f"stalls: {text}", self.number, tries=1)
            self.notifier.tell(self.shared(f"notified-{self.stalls_told}"), event)

    # ---- The end

    def _conclude(self) -> NoReturn:
        status = self.children.status
        self._tell_stalls()
        self.outcome = read_outcome(self.run_dir) if self.outcome_is_current() else None
        is_done = not self.outcome or self.outcome.status in ("", "running", "done")
        if status == 0 and is_done and not self.stopping:
            self.write("ended", "")
            self.touch_shared("done")
            logs = glob.glob(glob.escape(self.logs) + "/*/torchrun*.log")
            text = after_restarts(self.run_dir, self.number, logs)
            self._tell("done", f"ended: done: all steps made{text}")
            raise _Ended(DONE)
        if self._is_replaced():  # its failure is not one of the pod that has its place
            raise _Ended(AGAIN)
        if self._ended_for_good():
            self._repeat_the_end()
        if self.exited_with(NO_PROGRESS_STATUS):
            self.touch_shared("no_progress")  # for pods with ranks that only lost this worker
        # A stopped pod has not finished all steps, even if torchrun exits with 0.
        self.status = status or 1
        if self.outcome:
            self.append("steps", self.outcome.step)
        verdict = judge(self)
        if self.was_deserted:
            why = f"{verdict.why}; " if verdict.why else ""
            verdict = verdict._replace(why=why + "the first pod, where the nodes meet, was lost")
        if verdict.word == "preempted":
            self._end(AGAIN, verdict, "goes on from its checkpoint if it is started again")
        if verdict.word == "retryable":
            self.append("failed", str(status))
        again = "started again"
        decision = decide(verdict.word, self.counts(), self.options.policy.limits, again=again)
        verdict = verdict._replace(word=decision.word)
        if decision.again:
            self._end(AGAIN, verdict, decision.text)
        self._end(DONE if verdict.word == "done" else FINAL, verdict, decision.text)

    def _end(self, status: int, verdict: Verdict, decision: str) -> NoReturn:
        text = sentence(reason_line(verdict, decision))
        said = f"torchrun ended with {self.children.status}; {text}"
        if status == FINAL and self.options.marks:
            self.write_shared("ended_for_good", said)
        say(f"{said}: {status}")
        self.write("ended", f"{said}: {status}")
        if status == DONE:
            self.touch_shared("done")
        # No notification from a stopped pod (for example stopped because of another pod) or from a
        # pod that will restart.
        if not self.stopping and status != AGAIN:
            self._tell(verdict.word, f"ended: {text}")
        if status == FINAL and self.options.marks and not self.options.replaces:
            self._await_others()
        raise _Ended(status)

    def _repeat_the_end(self) -> NoReturn:
        said = f"{read(self.shared('ended_for_good'), 4096).rstrip()}: {FINAL}"
        say(said)
        self.write("ended", said)
        raise _Ended(FINAL)

    def _await_others(self) -> None:
        """Wait until the other pods have ended: the operator deletes pods that still run."""
        end = time.monotonic() + self.options.policy.grace_s + 20
        while time.monotonic() < end and not self.stopping:
            if len(glob.glob(glob.escape(self.logs) + "/*/ended")) >= self.options.nodes:
                return
            self.signals.wait(1)
            self._heed_signals()

    def _refuse(self, why: str, word: str = "fatal") -> NoReturn:
        say(f"not started again: {why}")
        if self.options.replaces:
            self.write_shared("ended_for_good", f"not started again: {why}")
        self._tell(word, f"is not started again: {why}")
        raise _Ended(FINAL)

    def _tell(self, word: str, text: str) -> None:
        event = Event("end", word, text, self.number, tries=3)
        self.notifier.tell(self.shared("notified"), event)

    def failed_itself(self) -> int:
        """Record a bug in this program: the pod restarts once, never twice in a row."""
        why = "the supervisor failed: " + traceback.format_exc(limit=0).strip().rpartition("\n")[2]
        before = last_lines(self.file("earlier_ends"))[-1:] if self.own else []
        twice = before[:1] and before[0].startswith("the supervisor failed: ")
        if self.own:
            self.append("failed", why)
            self.write("ended", f"{why}: {FINAL if twice else AGAIN}")
            if twice and self.options.marks:
                self.write_shared("ended_for_good", why)
        self.children.send(signal.SIGKILL)
        return FINAL if twice else AGAIN
