"""A batch job whose attempt ends, in this process: the supervisor's role, and the cluster."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

from toolkit.supervisor.attempt import Attempt
from toolkit.supervisor.batch import Batch, Options
from toolkit.supervisor.batch_opening import Start
from toolkit.supervisor.evidence.job_log import JobLog
from toolkit.supervisor.notify import Receivers
from toolkit.supervisor.policy import Limits
from toolkit.supervisor.process import Signals
from toolkit.supervisor.schedulers.slurm import Answer, Slurm
from toolkit.supervisor.supervised import Policy


@dataclass
class Cluster:
    """What Slurm's programs answer."""

    state: str = ""
    restarts: int = 0
    excluded: str = "(null)"
    preempted: str = "None"
    away: int = 0
    """How often the controller does not answer."""
    refuses: bool = False
    up: str = "n1:idle n2:mix n3:idle n4:alloc"
    down: str = ""
    noise: str = ""
    slurmd_began: str = ""
    auth_info: str = "cred_expire=5"
    refused_commands: Sequence[str] = ()
    asked: list[str] = field(default_factory=list)
    """The commands that it got, but for questions."""
    hook: Callable[[str], None] = lambda command: None
    """Called with each command."""

    def answer(self, argv: tuple[str, ...]) -> Answer:
        command = " ".join(argv)
        self.hook(command)
        match argv:
            case ("scontrol", "-o", "show", "job", _):
                text = (
                    f"JobId=7 JobState={self.state} Restarts={self.restarts} StartTime=100 "
                    f"PreemptTime={self.preempted} ExcNodeList={self.excluded} NodeList=x"
                )
            case ("scontrol", "-o", "show", "node", name):
                text = f"NodeName={name} SlurmdStartTime={self.slurmd_began} "
            case ("scontrol", "show", "config"):
                text = f"AuthInfo = socket=/x,{self.auth_info}\nKillWait                = 30 sec"
            case ("scontrol", "show", "hostnames", names):
                text = names.replace(",", "\n")
            case ("squeue", "-h", "--steps", *_):
                text = "==7.batch=="
            case ("sinfo", *options):
                shown = self.up if "-p" in options else self.down
                text = "\n".join(f"=={node.replace(':', ' ')}==" for node in shown.split())
            case ("scontrol", "requeue" | "ping" as verb, *_):
                self.asked.append(command.removeprefix("scontrol "))
                self.away -= verb == "requeue"
                refused = verb == "requeue" and self.refuses
                return Answer(1 if refused or self.away + (verb == "requeue") > 0 else 0, "")
            case (program, *_):
                self.asked.append(command.removeprefix("scontrol "))
                return Answer(int(program in self.refused_commands), "")
            case _:
                raise AssertionError(argv)
        lines = [self.noise, text, self.noise] if self.noise else [text]
        return Answer(0, "\n".join(lines) + "\n")


class FakeSlurm(Slurm):
    """Slurm, whose programs answer at once."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_PARTITION": "p"}
        )
        self.cluster = cluster

    def _ask(self, *argv: str, **more: str) -> Answer:
        return self.cluster.answer(argv)

    def _order(self, *argv: str) -> bool:
        return self.cluster.answer(argv).status == 0


class RunningStep:
    """An srun that runs on."""

    def poll(self) -> None:
        return None

    def send_signal(self, number: int) -> None:
        pass


class Ending(Batch):
    """An attempt that waits for nothing."""

    def wait_for_controller(self) -> None:
        pass


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Leave the signals of the tests as they were."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)


@dataclass
class Job:
    """A run directory, and the cluster around it."""

    run_dir: Path
    attempt: int = 0
    since: int = 0
    limit: int = 2
    in_job: int = 2
    preemptions: int | None = None
    mode: str = ""
    takes_turns: bool = True
    fewest: int = 0
    most: int = 0
    receivers: Receivers = field(default_factory=Receivers)
    cluster: Cluster = field(default_factory=Cluster)

    def __post_init__(self) -> None:
        self.log = self.run_dir / "job.log"
        self.log.touch()

    # ---- What was there before

    def folder(self, attempt: int) -> Path:
        made = self.run_dir / f"logs/attempt-{attempt}"
        made.mkdir(parents=True, exist_ok=True)
        return made

    def told(self, **outcome: object) -> None:
        text = json.dumps({"version": 1, **outcome}, indent=2)
        (self.run_dir / "outcome.json").write_text(text + "\n")

    def had(self, attempt: int, reason: str, step: int | None = None, failing: str = "") -> None:
        folder = self.folder(attempt)
        (folder / "reason").write_text(f"{reason}: so\n")
        (folder / "nodes").write_text("n1\nn2\n")
        if step is not None:
            (folder / "step").write_text(f"{step}\n")
        if failing:
            (folder / "failing_node").write_text(f"{failing}\n")

    # ---- The attempt

    @contextmanager
    def batch(self, *, stopping: str = "") -> Iterator[Batch]:
        """Yield the attempt, whose log begins here."""
        self.folder(self.attempt)
        if not self.cluster.state:
            self.cluster.state = "COMPLETING" if stopping == "terminated" else "RUNNING"
        limits = Limits(self.limit, preemptions=self.preemptions)
        policy = Policy("digits", self.in_job, limits, grace_s=60, receivers=self.receivers)
        options = Options(
            run_dir=str(self.run_dir),
            mode=self.mode,
            command=["srun", "node", "--", "torchrun", "-m", "train"],
            ports=(61000, 4000),
            policy=policy,
            fewest=self.fewest,
            most=self.most,
            takes_turns=self.takes_turns,
        )
        start = Start(str(self.run_dir), self.mode, self.attempt, "", self.takes_turns)
        attempt = Attempt(str(self.run_dir), self.attempt, self.since)
        log = JobLog(str(self.log), self.log.stat().st_size)
        with handlers_kept(), self.log.open("a") as out, redirect_stdout(out), redirect_stderr(out):
            signals = Signals((signal.SIGUSR1, signal.SIGUSR2))
            batch = Ending(options, start, attempt, FakeSlurm(self.cluster), log, signals)
            nodes = self.folder(self.attempt) / "nodes"
            batch.nodes.names = nodes.read_text().split() if nodes.exists() else ["n1", "n2"]
            batch.stopping = stopping
            yield batch

    def conclude(self, status: int, *, stopping: str = "", printed: str = "") -> int:
        """End the attempt; return the script's exit status."""
        with self.batch(stopping=stopping) as batch:
            with self.log.open("a") as log:
                log.write(printed + "\n")
            return batch.conclude(status)

    def terminated(self, *, stopping: str = "", killed: bool = True) -> int:
        """Let Slurm's SIGTERM come while the step runs; return the status if it is not killed."""
        if not self.cluster.state:
            self.cluster.state = "COMPLETING"
        with self.batch(stopping=stopping) as batch:
            batch.srun = cast(Any, RunningStep())
            os.kill(os.getpid(), signal.SIGTERM)
            batch.heed_signals()
            return 0 if killed else batch.conclude(1)

    def killed_while_it_decides(self, status: int, *, stopping: str) -> None:
        """Let the script be killed after it has judged how the attempt has ended."""

        class Killed(BaseException):
            pass

        def kill(*_: object) -> NoReturn:
            raise Killed

        with self.batch(stopping=stopping) as batch, suppress(Killed):
            cast(Any, batch).decide = kill
            batch.conclude(status)

    def complete_previous(self) -> int:
        """Begin the attempt; return the exit status, 0 if it goes on."""
        with self.batch() as batch:
            return batch.complete_previous() or 0

    @property
    def reason(self) -> str:
        return (self.folder(self.attempt) / "reason").read_text().rstrip("\n")

    @property
    def asked(self) -> list[str]:
        return self.cluster.asked
