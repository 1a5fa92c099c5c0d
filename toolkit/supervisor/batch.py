"""The program on Slurm's batch host: starts srun, and decides what follows when the step ends.

One loop handles signals of Slurm and `toolkit cancel`, the nodes' marks every five seconds, and the
end of srun. Another attempt follows on the same nodes if all are alive and none is suspected;
otherwise Slurm queues the job again.
"""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from . import batch_opening
from .attempt import Attempt, Refused, folder_of, with_number
from .batch_evidence import BY_SIGNAL, NOT_REACHED, JobEvidence, Nodes
from .batch_opening import Failed, NothingToDo, Start
from .batch_watch import STOP_MARGIN_S, Watch
from .evidence import job_log
from .evidence.files import last_lines, read
from .evidence.job_log import JobLog
from .evidence.outcome import read_outcome
from .evidence.restarts import after_restarts
from .marks import Marks
from .notify import Event
from .policy import (
    NO_PROGRESS_STATUS,
    Decision,
    Limits,
    Verdict,
    count,
    decide,
    judge,
    limit_reached,
    reason_line,
    sentence,
)
from .process import Signals, status_of
from .schedulers.slurm import Slurm
from .supervised import Policy, lacks, preload_secrets

if TYPE_CHECKING:
    from .elastic import Members

AGAIN = "queued again"
STAYS = "started again on the same nodes"
STOPS = {signal.SIGUSR1: "walltime", signal.SIGUSR2: "cancelled"}
"""Slurm sends SIGUSR1 before the time limit; `toolkit cancel` sends SIGUSR2."""

TRIES, TRY_PAUSE_S = 3, 10
"""How often to start srun if a node's slurmd does not answer."""

MOST_EMPTY_STEPS = 20
"""How many steps may be started to get past the numbers of earlier ones."""

REQUEUE_S, REQUEUE_PAUSE_S = 600, 5
"""How long to retry the requeue if the controller does not answer."""

RELEASE_S, RELEASE_PAUSE_S = 15, 1
"""How long Slurm may list the step of an attempt that has ended, before the job is requeued."""

FAILED = "lost: the supervisor failed: "
"""Prefix of a reason that reports a bug in this program."""


class Options(NamedTuple):
    """Options from the command line."""

    run_dir: str
    mode: str
    command: Sequence[str]
    """srun, then `--`, torchrun and its arguments."""
    ports: Tuple[int, int]
    """The first port for the rendezvous, and the number of ports."""
    policy: Policy
    fewest: int = 0
    """The fewest nodes of an elastic job; 0: all."""
    most: int = 0
    """The most nodes of an elastic job; 0: as many as it has."""
    point: str = ""
    """The name of this sweep point."""
    takes_turns: bool = False
    """Whether several jobs may continue the run in turn: a chain."""
    programs: Sequence[str] = ()
    """Programs that must be in PATH; of names separated by commas, one is enough."""
    early: Sequence[str] = ()
    """Names of signals received before this program started."""
    image: str = ""
    """The container image, if it is a file."""
    refuse: str = ""
    """Why the job ends before torchrun starts; empty if it does not."""
    script: str = ""
    """The batch script; jobs that join an elastic job run the same script."""
    join: Sequence[str] = ()
    """For a job that joins another job: the attempt, its rendezvous endpoint, and its job id."""


def main(options: Options) -> int:
    """Make an attempt, and further ones on the same nodes; return the exit status."""
    signals = Signals((*STOPS, signal.SIGTERM, signal.SIGCHLD))
    signals.seen += [getattr(signal, "SIG" + name) for name in options.early]
    run_dir = os.path.abspath(options.run_dir)
    say = Speaker(options.policy.job, options.point)
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        if not os.environ.get(name):
            say.error(f"not inside a job of Slurm: {name} is not set")
            return 1
    preload_secrets(options.policy)
    begin = os.environ.pop("_log_begin", "")
    log = batch_opening.log_from_here()
    if begin.isdigit():
        log = JobLog(log.path, int(begin))
    slurm = Slurm(os.environ)
    restarts = batch_opening.restarts_of(slurm)
    start = Start(run_dir, options.mode, restarts, options.point, options.takes_turns)
    attempt: Optional[Attempt] = None
    status = 1
    try:
        _require_mountable(run_dir, options.command)
        if options.mode == "join":
            return _join(options, run_dir, slurm, signals, say)
        attempt = batch_opening.open_batch_attempt(start, log)
        batch = Batch(options, start, attempt, slurm, log, signals)
        status = batch.supervised()
        while batch.stays:
            attempt.note("exit_status", str(status))
            os.environ["TRAIN_ATTEMPT_BEGAN"] = str(int(time.time()))
            log = batch_opening.log_from_here()
            start = start._replace(after=attempt.number)
            attempt = batch_opening.open_batch_attempt(start, log)
            batch = Batch(options, start, attempt, slurm, log, signals)
            status = batch.supervised()
    except Refused as refused:
        say.error(str(refused))
    except NothingToDo as nothing:
        say(str(nothing))
        status = nothing.status
    except Failed as failed:
        attempt = failed.attempt
        say.error(str(failed))
        if attempt and os.path.isdir(attempt.logs):
            Batch(options, start, attempt, slurm, log, signals).refuse(str(failed), aloud=False)
    finally:
        if attempt and os.path.isdir(attempt.logs):
            attempt.note("exit_status", str(status))
    return status


def _join(options: Options, run_dir: str, slurm: Slurm, signals: Signals, say: "Speaker") -> int:
    """Run a job of one node that joins the run of another job; return the exit status."""
    number, endpoint, job = options.join
    attempt = Attempt(run_dir, int(number), 0)
    obstacle = options.refuse or obstacle_of(options)
    if obstacle:
        say.error(obstacle)
        return 1
    say(f"{slurm.node_list} joins attempt {number} at {endpoint}")
    from .elastic import join

    argv = step_argv(
        options.command, attempt.logs, Meeting(endpoint, job, attempt.number), "--joins"
    )
    return join(argv, step_environ(attempt), slurm, signals, attempt.logs)


class Speaker:
    """Writes lines into the job's log."""

    def __init__(self, job: str, point: str) -> None:
        self._name = f"{job}: {point}: " if point else f"{job}: "

    def __call__(self, text: str) -> None:
        """Write a line."""
        print(self._name + text, flush=True)

    def error(self, text: str) -> None:
        """Write a line about a failure."""
        print(self._name + text, file=sys.stderr, flush=True)


def _require_mountable(run_dir: str, command: Sequence[str]) -> None:
    """Refuse a path that a container's mounts cannot hold.

    Raises:
        Refused: a separator is in it.
    """
    in_pyxis = any(word.startswith("--container-image") for word in command)
    in_container = in_pyxis or any(
        word.startswith("--runtime=") and word != "--runtime=bare" for word in command
    )
    blank = in_pyxis and any(letter.isspace() for letter in run_dir)
    if in_container and (blank or ":" in run_dir or "," in run_dir):
        blanks = "blanks, " if in_pyxis else ""
        raise Refused(f"{run_dir}: a container's mounts cannot hold {blanks}':' or ','")


def obstacle_of(options: Options) -> str:
    """Return why a job cannot start here; empty if it can."""
    missing = lacks(options.policy)
    if missing:
        return missing
    if options.image and not os.path.exists(options.image):
        return f"the image is missing: {options.image}"
    for names in options.programs:
        if not any(map(shutil.which, names.split(","))):
            name = names.partition(",")[0]
            keys = "'venv' or 'modules'" if name == "torchrun" else "'modules'"
            return f"{name} is not in PATH; set {keys} in the profile"
    if any(word.startswith("--container-image") for word in options.command):
        argv = ["srun", "--help"]
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ),
            check=False,
        )
        if b"--container-image" not in done.stdout:
            return "srun knows no --container-image here: the site has no pyxis"
    return ""


class Meeting(NamedTuple):
    """The rendezvous of an attempt."""

    endpoint: str
    job: str
    """The job that owns the attempt."""
    attempt: int


def step_argv(command: Sequence[str], logs: str, meeting: Meeting, *more: str) -> List[str]:
    """Return the command of a step, with the options that only the supervisor knows.

    Options for the node and the attempt's folder are inserted before the first `--`, and the
    rendezvous options after torchrun.
    """
    words = list(command)
    end = words.index("--") if "--" in words else len(words)
    torchrun = [with_number(word, meeting.attempt) for word in words[end + 1 :]]
    own = [
        f"--rdzv-endpoint={meeting.endpoint}",
        f"--rdzv-id={meeting.job}-{meeting.attempt}",
        "--tee=3",
    ]
    return [*words[:end], *more, logs, "--", *torchrun[:1], *own, *torchrun[1:]]


def step_environ(attempt: Attempt) -> Dict[str, str]:
    """Return the environment of an attempt's step."""
    environ = {
        **os.environ,
        "TRAIN_RUN_DIR": attempt.run_dir,
        "TRAIN_ATTEMPT": str(attempt.number),
        "TRAIN_ATTEMPT_BEGAN": os.environ.get("TRAIN_ATTEMPT_BEGAN", str(int(time.time()))),
    }
    if "SLURM_CPUS_PER_TASK" in environ:  # srun of 22.05 and 23.02 does not inherit it
        environ["SRUN_CPUS_PER_TASK"] = environ["SLURM_CPUS_PER_TASK"]
    return environ


class Batch(JobEvidence):
    """An attempt, from its start to the decision at its end."""

    def __init__(
        self,
        options: Options,
        start: Start,
        attempt: Attempt,
        slurm: Slurm,
        log: JobLog,
        signals: Signals,
    ) -> None:
        nodes = Nodes(options.fewest, options.most)
        super().__init__(options.policy, attempt, slurm, log, nodes)
        self.options, self.start, self.signals = options, start, signals
        self.restarts, self.command = start.restarts, options.command
        self.say = Speaker(options.policy.job, options.point)
        self.srun: Optional[subprocess.Popen[bytes]] = None
        self.excluded: Optional[str] = None
        """The message about excluded nodes; None: not determined yet."""
        self.told = ""
        """The text of the file `stopping`, which the nodes read."""
        self.concluding = False
        self.stays = False
        """Whether another attempt follows on the same nodes."""
        self.idle = False
        """Whether the attempt made no step beyond earlier attempts, as far as is known."""
        self.asked: Optional[subprocess.Popen[bytes]] = None
        self.members: Optional[Members] = None
        """The nodes of an elastic job; only scripts of such jobs carry the module."""
        if self.nodes.elastic:
            from . import elastic

            self.members = elastic.Members(slurm, attempt, options.script, log.path)
        self.has_limits = options.policy.limits.requeue > 0 or options.takes_turns
        signal.signal(signal.SIGTERM, self._note_term)

    # ---- The attempt

    def supervised(self) -> int:
        """Make the attempt. A bug in this program does not end the run."""
        try:
            return self.run()
        except Exception as error:
            traceback.print_exc()
            return self._supervisor_failed(error)
        finally:
            if self.asked is not None and self.asked.poll() is None:
                self.asked.kill()
            if self.members is not None:
                self.members.cancel_joiners()

    def run(self) -> int:
        """Start srun, wait for it, and decide what follows."""
        if batch_opening.is_cancelled(self.start, self.attempt):
            self.stopping = "cancelled"
        elif self.options.mode == "continue" and not self.start.follows:
            batch_opening.withdraw_cancel(self.attempt.run_dir)
        if self.members is not None:
            self.members.cancel_joiners()  # those of an attempt that was killed
        self._link_log()
        if self.start.after is None:
            self._ask_for_times()
        ended = self.complete_previous()
        if ended is not None:
            return ended
        if self._is_stopped():
            return self.conclude(1)
        obstacle = self.options.refuse or obstacle_of(self.options)
        if obstacle:
            return self.refuse(obstacle)
        names = self.slurm.hostnames(self.slurm.node_list)
        if self._is_stopped():
            return self.conclude(1)
        if not names:
            missing = shutil.which("scontrol") is None
            why = "scontrol is not in PATH on the first node; set 'modules' in the profile"
            unnamed = f"scontrol names no node for '{self.slurm.node_list}'"
            return self.refuse(why if missing else unnamed)
        if not self.slurm.resolves(names[0]):
            return self.refuse(
                f"the name {names[0]} does not resolve on that node itself (getent ahosts "
                f"{names[0]}): ranks could not meet there; correct /etc/hosts or DNS"
            )
        self.nodes.names = names
        self.attempt.write("nodes", "\n".join(names))
        number = self.attempt.number
        self.say(
            f"attempt {number} on {self.slurm.node_list}, run directory {self.attempt.run_dir}"
        )
        return self._run_step()

    def refuse(self, why: str, *, aloud: bool = True) -> int:
        """End an attempt that cannot start its step."""
        if aloud:
            self.say.error(why)
        self.attempt.note("reason", f"fatal: {why}")
        self.tell("end", "fatal", f"ended: fatal: {why}", tries=3)
        return 1

    def _link_log(self) -> None:
        if self.options.point:
            link = os.path.join(self.attempt.run_dir, "logs", "job.log")
            if os.path.lexists(link):
                os.remove(link)
            os.symlink(self.log.path, link)

    def _ask_for_times(self) -> None:
        """Have the job's times recorded from the controller, for `toolkit goodput`."""
        environ = {**self.slurm.environ, "SLURM_TIME_FORMAT": "%s"}
        argv = ["timeout", "30", "scontrol", "-o", "show", "job", self.slurm.job]
        try:
            with open(self.attempt.path("scheduled"), "wb") as file:
                self.asked = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.DEVNULL,
                    env=environ,
                )
        except OSError:
            pass

    def complete_previous(self) -> Optional[int]:
        """Complete the previous attempt's records; return a status if limits end the run."""
        number, run_dir = self.attempt.number, self.attempt.run_dir
        follows = self.restarts > 0 or self.options.mode == "chain"
        if not self.has_limits or not follows or not number or self.start.after is not None:
            return None
        outcome = read_outcome(run_dir)
        reason = batch_opening.complete_previous(self.attempt, self.slurm, self.log, outcome)
        claim = folder_of(run_dir, number - 1) + "/notified"
        if not os.path.exists(claim + "-end.json"):
            word = reason.partition(":")[0]
            text = f"ended: {sentence(reason)}"
            self.notifier.tell(claim, Event("requeue", word, text, number - 1, 1))
        counts = count(self.attempt.made("", None), self.attempt.best_before())
        reached = limit_reached(counts, self._limits())
        if reached is None:
            return None
        status = NO_PROGRESS_STATUS if reached.word == "no_progress" else 1
        return self._end(status, Verdict(reached.word), reached)

    # ---- The step

    def _run_step(self) -> int:
        if self.policy.limits.requeue and self.restarts:
            self._skip_step_numbers()
        status = 1
        for left in reversed(range(TRIES)):
            if self._is_stopped():
                break
            self.marks.forget()
            status = self._launch()
            if self.is_removed():
                return self._removed()
            without = self.nodes_without_task() if status in NOT_REACHED else []
            if not left or self.stopping or not without:
                break
            self.say(
                f"srun has not reached {' '.join(without)} (exit status {status}); once more in "
                f"{TRY_PAUSE_S} s"
            )
            self._pause(TRY_PAUSE_S)
        if self.stopping:
            self.say(f"stopped ({self.stopping})")
        return self.conclude(self._status_of_nodes(status))

    def _launch(self) -> int:
        """Run srun once; return its status, or the nodes' status if srun hangs."""
        watch = Watch(self)
        self.srun = subprocess.Popen(self.argv(), stdin=subprocess.DEVNULL, env=self.environ())
        try:
            while self.srun.poll() is None:
                self.signals.wait(watch.tick_in_s(time.monotonic()))
                self.heed_signals()
                watch.tick(time.monotonic())
        finally:
            if self.srun.poll() is None:
                self._end_srun(self.srun)
        status, self.srun = status_of(self.srun.returncode), None
        self.marks.look()
        return self.status_of_srun(status)

    def _end_srun(self, srun: "subprocess.Popen[bytes]") -> None:
        """End a step because of a bug in this program: another attempt follows."""
        self.signal_step()
        try:
            srun.wait(self.policy.grace_s + STOP_MARGIN_S)
        except subprocess.TimeoutExpired:
            srun.kill()
            srun.wait()

    def argv(self) -> List[str]:
        """Return the command of the step."""
        meeting = Meeting(self.endpoint(), self.slurm.job, self.attempt.number)
        return step_argv(self.options.command, self.attempt.logs, meeting)

    def endpoint(self) -> str:
        """Return the rendezvous endpoint: the first node, and a port for this attempt only."""
        first, many = self.options.ports
        number = int(self.slurm.job_id) + 1999 * self.attempt.number
        return f"{self.nodes.names[0]}:{first + number % many}"

    def environ(self) -> Dict[str, str]:
        """Return the environment of the step."""
        environ = step_environ(self.attempt)
        if not self.restarts:
            environ.pop("SLURM_RESTART_COUNT", None)
        return environ

    def status_of_srun(self, status: int) -> int:
        """Return srun's exit status, or the nodes' status if srun exits with 0 or hangs."""
        ended = self.marks.ended()
        if os.path.exists(self.attempt.path("hung")):
            return max((int(text) for text in ended if text.isdigit()), default=1)
        good, bad = ended.count("0"), sum(text != "0" for text in ended)
        # srun also exits with 0 if Slurm has lost a node, and after a stop.
        lost = job_log.failed_nodes(self.log.read_on())
        if status == 0 and lost and good < self.nodes.most:
            return 1
        return 1 if status == 0 and self.stopping and (bad or not good) else status

    def _status_of_nodes(self, status: int) -> int:
        """Return the status of the step: torchrun's own status counts if srun exits with 0."""
        stopped = self.marks.texts("stopped")
        if status == 0 and self.stopping == "terminated" and "0" not in stopped:
            status = 1
        if status == 0 and any(text != "0" for text in stopped):
            status = 1
        # A lost node does not count as a failure if enough other nodes succeeded.
        if self.nodes.elastic and len(self.marks.of("succeeded")) >= self.nodes.fewest:
            status = 0
        return status

    def _skip_step_numbers(self) -> None:
        """Start empty steps, until the next number is past those of the last attempts.

        slurmctld repeats a kill that a node has not confirmed, 60 s later or more. A requeued job
        has the same id: the repeated kill would hit a new step with the old step's number.
        """
        taken: Set[str] = set()
        for number in range(max(0, self.attempt.number - 8), self.attempt.number):
            marks = Marks(folder_of(self.attempt.run_dir, number))
            marks.look()
            taken.update(marks.texts("began"))
        for _ in range(MOST_EMPTY_STEPS):
            if self._is_stopped():
                return
            step = self.slurm.empty_step()
            if step is not None and str(step + 1) not in taken:
                return

    def _removed(self) -> int:
        """End a run because its directory was removed: a new start would begin at step 0."""
        os.makedirs(self.attempt.logs, exist_ok=True)
        why = f"{self.attempt.run_dir} was removed during the run"
        return self._end(1, Verdict("fatal", why), Decision("fatal", "not " + AGAIN, again=False))

    # ---- Signals

    def _note_term(self, number: int, frame: Any) -> None:
        """Record Slurm's SIGTERM and the reason: Slurm may kill this script at any moment."""
        self.signals.seen.append(signal.SIGTERM)
        if not self.concluding and not self.superseded():
            self.attempt.note("reason", f"terminated: by Slurm; {batch_opening.KILLED}")

    def heed_signals(self) -> None:
        """Act on the signals received."""
        for number in self.signals.take():
            if number == signal.SIGTERM:
                self._terminated()
            elif number in STOPS:
                self._stop(STOPS[signal.Signals(number)])

    def _is_stopped(self) -> bool:
        """Handle signals; return whether the attempt is to stop."""
        self.heed_signals()
        return bool(self.stopping)

    def _stop(self, why: str) -> None:
        self.stopping = self.stopping or why
        if self.srun is not None:
            self.stop_step(self.stopping)

    def stop_step(self, why: str) -> None:
        """Ask all nodes to stop; the first reason counts."""
        self.told = self.told or why
        self.attempt.note("stopping", self.told)  # for a node that has not begun its task
        self.signal_step()

    def signal_step(self) -> None:
        """Send SIGTERM to all tasks; SIGUSR1 to srun where that is not possible."""
        if self.srun is None or self.srun.poll() is not None:
            return
        if not self.marks.step():
            self.marks.look()
        step = self.marks.step()
        if not step or not self.slurm.signal_step(step):
            self.srun.send_signal(signal.SIGUSR1)

    def _terminated(self) -> None:
        """Write why Slurm ends the attempt: Slurm may kill this script before the step ends."""
        self.stopping = self.stopping or "terminated"
        if self.srun is None or self.concluding:
            return
        verdict = self.stopped() or Verdict("terminated", "by Slurm")
        if verdict.why == BY_SIGNAL:
            self.stop_step("terminated")  # scancel --batch signals only this script
        follows = ""
        if self.queued:
            self.slurm.start_soon(killed=True)
            follows = AGAIN + self._exclude() + "; "
        self.note(verdict, follows + batch_opening.KILLED)

    def stopped(self) -> Optional[Verdict]:
        """Return the verdict if the attempt was ended from outside; handle late signals first."""
        if self.concluding:
            for number in self.signals.take():
                word = STOPS.get(signal.Signals(number), "")
                word = "terminated" if number == signal.SIGTERM else word
                self.stopping = self.stopping or word
        return super().stopped()

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not self._is_stopped() and time.monotonic() < until_s:
            self.signals.wait(until_s - time.monotonic())

    # ---- The end

    def note(self, verdict: Verdict, decision: str) -> None:
        """Write the reason, unless another attempt has taken over and has written it."""
        if not self.superseded():
            self.write_reason(verdict, decision)

    def conclude(self, status: int) -> int:
        """End the attempt, and queue the job again if the policy allows; return the status."""
        self._is_stopped()
        self.concluding = True
        self.status = status
        self.disk = "" if self._has_room() else self.attempt.run_dir
        outcome = read_outcome(self.attempt.run_dir)
        current = outcome.attempt == str(self.attempt.number)
        self.outcome = outcome if current else None
        self.marks.look()
        verdict = judge(self)
        if self.compares:
            verdict = self.note_failing_node(verdict)
        if verdict.word != "done":
            self.status = self.status or 1
        if self.stopping != "terminated":  # _terminated() has already written the reason
            self.note(verdict, "deciding")
        step = outcome.step
        if current or verdict.word not in ("preempted", "requeued", "fenced"):
            batch_opening.save_step(self.attempt.logs, step)
        else:  # preempted before it began: does not count as an attempt without progress
            step = ""
        return self._follow(verdict, self.decide(verdict, step))

    def decide(self, verdict: Verdict, step: str) -> Decision:
        """Return what follows an attempt with this verdict and last step."""
        attempts = self.attempt.made(verdict.word, int(step) if step.isdigit() else None)
        limits = self._limits()
        if limits.by_others:
            limits = limits._replace(by_others=self._chain_continues())
        counts = count(attempts, self.attempt.best_before())
        self.idle = counts.idle > 0 or not step
        return decide(verdict.word, counts, limits, again=AGAIN, queued=self.queued)

    def _follow(self, verdict: Verdict, decision: Decision) -> int:
        self.stays = decision.again and not self.queued and self._may_stay(verdict)
        if self.stays:
            return self._end(self.status, verdict, decision._replace(text=STAYS))
        if decision.again and not self.queued:
            refused = self._queue_again(verdict)
            if refused is not None:
                verdict, text = refused
                return self._end(self.status, verdict, Decision(verdict.word, text, again=False))
        if decision.again:
            decision = decision._replace(text=AGAIN + self._exclude())
        status = self.status
        if decision.word == "done":
            status = 0
        elif decision.word == "no_progress":
            status = NO_PROGRESS_STATUS
        return self._end(status, verdict._replace(word=decision.word), decision)

    def _may_stay(self, verdict: Verdict) -> bool:
        """Whether another attempt may begin on the same nodes, without a wait in the queue.

        It may if all nodes have ended their tasks and are up, Slurm has released the step's
        resources, and no node failed first in two attempts. After two failures without a new step,
        other nodes or a later start may help.
        """
        if self.start.after is not None and self.idle:
            return False
        if verdict.word != "retryable" or self.nodes.elastic or self._is_stopped():
            return False
        all_ended = len(self.marks.ended()) >= len(self.nodes.names)
        if not all_ended or os.path.exists(self.attempt.path("hung")) or self._suspected():
            return False
        if not os.path.exists(sys.argv[0]):  # the next start of the script unpacks it again
            return False
        job = self.slurm.show_job()
        return (
            job.state == "RUNNING"
            and (job.restarts or 0) <= self.restarts
            and self.slurm.all_usable(self.nodes.names)
            and self._step_is_released()
        )

    def _step_is_released(self) -> bool:
        """Wait until Slurm lists the step no longer; return whether that was soon.

        A controller that was unreachable may have missed the end of a step. The next srun would
        wait for this step's resources, perhaps until the job's time limit.
        """
        step = self.marks.step()
        until_s = time.monotonic() + RELEASE_S
        while not self._is_stopped():
            if self.slurm.step_is_released(step):
                return True
            if time.monotonic() >= until_s:
                break
            self._pause(RELEASE_PAUSE_S)
        return False

    def _limits(self) -> Limits:
        limits = self.policy.limits
        return limits._replace(by_others=self.options.takes_turns and not limits.requeue)

    def _chain_continues(self) -> bool:
        """Whether this job is not the last of its chain, by the list of `toolkit submit`."""
        lines = last_lines(os.path.join(self.attempt.run_dir, "jobs.jsonl"))
        own = f'"job_id": "{self.slurm.job_id}"'
        return bool(lines) and '"mode": "chain"' in lines[-1] and own not in lines[-1]

    def _has_room(self) -> bool:
        """Whether the disk has room for a reason; frees the reserve in any case."""
        path = self.attempt.path("reserve.full")
        try:
            with open(path, "wb") as file:
                file.write(b" " * 5000)
            room = True
        except OSError as error:
            room = error.errno not in (errno.ENOSPC, errno.EDQUOT)
        for name in ("reserve", "reserve.full"):
            with contextlib.suppress(OSError):
                os.remove(self.attempt.path(name))
        return room

    def _end(self, status: int, verdict: Verdict, decision: Decision) -> int:
        self.concluding = True
        self.note(verdict, decision.text)
        text = sentence(reason_line(verdict, decision.text))
        self.say(f"attempt {self.attempt.number} ended: {text}")
        self.tell_stalls()
        goes_on = decision.again or decision.text.endswith(" goes on")
        if verdict.word == "done":
            text += after_restarts(
                self.attempt.run_dir, self.attempt.number, [self.log.path], self.log.begin
            )
        if self.superseded():  # that attempt reports its own end
            return status
        tries = 1 if goes_on or self.stopping else 3  # little time is left after a stop
        self.tell("requeue" if goes_on else "end", verdict.word, f"ended: {text}", tries)
        if decision.again and not self.stays:
            self.slurm.start_soon()
        return status

    def _queue_again(self, verdict: Verdict) -> Optional[Tuple[Verdict, str]]:
        """Queue the job again; return how the attempt ends if that is impossible.

        A controller that does not answer may be restarting. If this node was cut off, Slurm has
        meanwhile started the job elsewhere: that start must not be queued again.
        """
        if self._is_stopped() and self.stopping == "cancelled":  # after the verdict
            return Verdict("cancelled", "by toolkit cancel"), "not " + AGAIN
        self.note(verdict, AGAIN)
        if self._is_scancelled():  # Slurm would start even a cancelled job again
            return Verdict("cancelled", "by scancel"), "not " + AGAIN
        answers, until_s = False, time.monotonic() + REQUEUE_S
        while not self.slurm.queued_again(self.restarts) and not self.slurm.requeue():
            if answers or time.monotonic() >= until_s or self.superseded():
                return verdict, "scontrol could not queue it again"
            answers = self.slurm.is_there()
            if not answers:
                self.wait_for_controller()
        self.slurm.start_soon()  # at once: this script may be killed soon
        return None

    def wait_for_controller(self) -> None:
        """Wait a moment for an unreachable controller."""
        time.sleep(REQUEUE_PAUSE_S)

    def _is_scancelled(self) -> bool:
        """Whether Slurm is ending the job because of scancel."""
        job = self.slurm.show_job()
        ends = job.state in ("CANCELLED", "COMPLETING") and (job.restarts or 0) <= self.restarts
        return ends and not job_log.cause_of_end(self.log.read_on())

    def _exclude(self) -> str:
        """Exclude nodes on which two attempts failed first; return the message."""
        if self.excluded is None:
            self.excluded = self._exclude_now() if self.policy.limits.requeue else ""
        return self.excluded

    def _suspected(self) -> List[str]:
        """Return the nodes on which two attempts failed first."""
        named: List[str] = []
        for number in range(self.attempt.number + 1):
            named += read(folder_of(self.attempt.run_dir, number) + "/failing_node").split()
        return sorted({node for node in named if named.count(node) > 1})

    def _exclude_now(self) -> str:
        bad = self._suspected()
        if not bad:
            return ""
        excluded = self.slurm.show_job().excluded
        before = self.slurm.hostnames(excluded) if excluded else []
        bad = [node for node in bad if node not in before]
        if not bad:
            return ""
        names = ",".join(bad)
        where = f"without {names}, where two attempts have failed first"
        if self.slurm.count_other_nodes([*before, *bad]) < self.nodes.fewest:
            return f"; not {where}: too few nodes would be left"
        return f"; {where}" if self.slurm.exclude([*before, *bad]) else ""

    # ---- A bug in this program

    def _supervisor_failed(self, error: Exception) -> int:
        """Queue the job again once: the bug may depend on circumstances of this start."""
        self.concluding, self.stays = True, False
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        before = read(folder_of(self.attempt.run_dir, self.attempt.number - 1) + "/reason", 100)
        verdict = Verdict("lost", f"the supervisor failed: {said}")
        again = bool(self.policy.limits.requeue) and not before.startswith(FAILED)
        text = AGAIN if again else "not " + AGAIN
        text = reason_line(verdict, text)
        self.attempt.note("reason", text)
        self.say.error(f"attempt {self.attempt.number} ended: {sentence(text)}")
        if again and self.slurm.requeue():
            self.slurm.start_soon()
        elif again:
            self.attempt.note("reason", reason_line(verdict, "not " + AGAIN))
        return 1
