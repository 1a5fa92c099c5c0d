"""How jobs are submitted, so that none is submitted twice, however the asking ends.

sbatch may get no answer although the controller has accepted the job: its message timed out, or
the connection to the login node was cut. Then the job is looked for before it is submitted again:
no other job has the same command, whose script lies in the run directory.
"""

import re
import secrets as random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.planning import LaunchPlan
from toolkit.slurm.jobs import SlurmJob, is_job_id
from toolkit.slurm.login.host import Folder, Login
from toolkit.slurm.login.ssh import Hung, Lost
from toolkit.slurm.squeue import ask_mine, first_line, refused

__all__ = ["Order", "Unclear", "exported", "find", "new_token", "send"]

_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0)
"""How long to wait before each new try: about a minute in all."""

_LOOKS = 2
"""How often Slurm must say that it has no such job: it may be at taking it just now."""

_NO_ANSWER = re.compile(
    "Socket timed out|Zero Bytes were transmitted|Connection reset|Connection timed out"
    "|Broken pipe|Unexpected message|receive failure|not connected"
)
"""Messages of sbatch after which its request may have arrived (Slurm, slurm_errno.c)."""

DOUBTFUL = 75
"""Exit status of `Login.sbatch`: an earlier call has started it, and its outcome is unknown."""


class Unclear(LauncherError):
    """It is unknown whether Slurm has the job."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of a submission: a job, or a chain, in which each waits for another."""

    folder: Folder
    """The run directory."""

    script: str
    """The batch script, as the nodes see it."""

    log: str
    """Where it prints, as sbatch wants it."""

    jobs: tuple[SlurmJob, ...]
    """The jobs; their ids are not known yet."""

    token: str
    """An id that distinguishes this submission from all others of the run."""

    known: tuple[str, ...] = ()
    """The ids of the jobs that the run had before."""

    array: str | None = None
    """The tasks of a sweep, where they are not all of the script's."""

    def as_json(self) -> dict[str, Any]:
        """Return the order as JSON, for `of_json`."""
        folder = asdict(self.folder) | {"here": str(self.folder.here)}
        return asdict(self) | {"folder": folder}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> "Order":
        """Return the order from its JSON."""
        folder = Folder(**data["folder"] | {"here": Path(data["folder"]["here"])})
        jobs = tuple(
            SlurmJob(**job | {"points": job["points"] and tuple(job["points"])})
            for job in data["jobs"]
        )
        fields = dict(data) | {"folder": folder, "jobs": jobs, "known": tuple(data["known"])}
        return cls(**fields)

    def commands(self, job: SlurmJob) -> tuple[str, str]:
        """Return the command of a job as squeue shows it: whole, or from 24.11 on its script."""
        mode = [job.mode] if job.mode else []
        return " ".join([self.script, self.folder.there, *mode]), self.script

    def key(self, index: int) -> str:
        """Return the name of one job's submission."""
        return f"{self.token}-{index}"


def new_token() -> str:
    """Return a token for a new order."""
    return random.token_hex(4)


def exported(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets that a job takes from where it is submitted, by name."""
    return {name: environ[name] for name in plan.exported_secrets}


def send(
    login: Login, order: Order, *, secrets: Mapping[str, str], begun: bool = False
) -> list[SlurmJob]:
    """Submit the order; returns the jobs with their ids.

    Args:
        login: Where.
        order: What.
        secrets: Variables that the jobs take from here.
        begun: Whether an earlier call may have submitted some of it.

    Raises:
        Unclear: it is unknown whether Slurm has one of them.
        LauncherError: sbatch refused one of them; those before it are cancelled.
    """
    sent: list[SlurmJob] = []
    for index, job in enumerate(order.jobs):
        waits = [job.after] if job.after else []
        waits += [f"afterany:{sent[-1].job_id}"] if sent else []
        job_ids = [*order.known, *(before.job_id for before in sent)]
        try:
            job_id = _once(
                login,
                [*_argv(order, job, waits, login.cwd)],
                order=order,
                index=index,
                job_ids=job_ids,
                secrets=secrets,
                begun=begun,
            )
        except Unclear:
            raise
        except LauncherError:
            if sent:
                login.command(["scancel", *(job.job_id for job in sent)])
            raise
        sent.append(replace(job, job_id=job_id, after=",".join(waits)))
    return sent


def _argv(order: Order, job: SlurmJob, waits: Sequence[str], cwd: str) -> Iterator[str]:
    yield from ("sbatch", "--parsable", f"--output={order.log}")
    if job.folder != cwd:
        yield f"--chdir={job.folder}"
    if waits:
        yield from (f"--dependency={','.join(waits)}", "--kill-on-invalid-dep=yes")
    if order.array is not None:
        yield f"--array={order.array}"
    yield from (order.script, order.folder.there, *([job.mode] if job.mode else []))


def _once(
    login: Login,
    argv: Sequence[str],
    *,
    order: Order,
    index: int,
    job_ids: Sequence[str],
    secrets: Mapping[str, str],
    begun: bool,
) -> str:
    """Submit one job, and be sure of it; returns its id."""
    commands, key = order.commands(order.jobs[index]), order.key(index)
    doubt, looks, why = begun, 0, "its submission was cut short"
    for pause_s in (0.0, *_PAUSES_S):
        time.sleep(pause_s)
        try:
            if doubt:
                if job_id := _queued(login, commands, job_ids):
                    return job_id[0]
                looks += 1
                if looks < _LOOKS:
                    continue
            done = login.sbatch(
                argv, folder=order.folder, key=key, again=doubt and looks >= _LOOKS, secrets=secrets
            )
        except Hung as error:
            why = str(error)
            break
        except Lost as error:
            # What was cut off may have been done, which the login node has written down.
            doubt, looks, why = False, 0, str(error)
            continue
        except SchedulerMissing:
            raise
        except LauncherError as error:  # from the look at the queue
            why = str(error)
            continue
        if done.returncode == 0 and (
            match := re.fullmatch(r"(\d{1,18})(;.*)?", done.stdout.strip())
        ):
            return match[1]
        if not _is_doubtful(done):
            raise refused("sbatch", done)
        doubt, looks = True, 0
        why = first_line(done.stderr) or why
    name = order.folder.here.name
    raise Unclear(
        f"whether Slurm has the job of {name} is not known: {why}. `toolkit status {name}` finds "
        f"out, and `toolkit resubmit {name}` submits it if Slurm has not got it"
    )


def _is_doubtful(done: "CompletedProcess[str]") -> bool:
    killed = done.returncode < 0 or done.returncode >= 128
    return killed or done.returncode == DOUBTFUL or bool(_NO_ANSWER.search(done.stderr))


def _queued(login: Login, commands: Sequence[str], job_ids: Sequence[str]) -> list[str]:
    """Return the jobs of Slurm that have this command, the oldest first, but for the known ones."""
    queued = {row.whole for row in ask_mine(login.command) if row.command in commands}
    return sorted(queued - set(job_ids), key=int)


def find(login: Login, order: Order) -> list[SlurmJob]:
    """Return the jobs of an order that Slurm has, with their ids.

    Raises:
        LauncherError: nobody answers.
    """
    keys = [order.key(index) for index in range(len(order.jobs))]
    answers_by_key = login.answers(order.folder, keys)
    known_by = {key: answer.strip().partition(";")[0] for key, answer in answers_by_key.items()}
    answers = {key: job_id for key, job_id in known_by.items() if is_job_id(job_id)}
    sent: list[SlurmJob] = []
    for job, key in zip(order.jobs, keys, strict=True):
        job_id = answers.get(key, "")
        if not job_id:
            job_ids = [*order.known, *answers.values(), *(before.job_id for before in sent)]
            job_id = next(iter(_queued(login, order.commands(job), job_ids)), "")
        if not job_id:
            break
        waits = [job.after, f"afterany:{sent[-1].job_id}" if sent else ""]
        sent.append(replace(job, job_id=job_id, after=",".join(filter(None, waits))))
    return sent
