"""Submits the jobs of a run, each exactly once, and records them.

sbatch may get no answer although the controller has accepted the job: its message timed out, or
the connection to the login node was cut. A retry first searches the queue for the job: no other job
has the same command, since its script is in the run directory.

A run has one job, several in a chain, or more after `resubmit`. `jobs.jsonl` in the run directory
lists them, oldest first, so that every handle of the run knows all of them.
"""

import json
import re
import secrets as random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.runs.records.submission_journal import UnknownOutcome
from toolkit.slurm.commands import ask_mine, refused
from toolkit.slurm.login.host import DOUBTFUL, LoginNode, RunFolder
from toolkit.slurm.login.ssh import Hung, Lost
from toolkit.text import control, untrusted
from toolkit.text.answers import error_line, plain

_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0)
"""Delay before each retry in seconds: about a minute in all."""

_LOOKS = 4
"""Number of queries without the job before a retry, in 15 s: Slurm may be accepting it."""

_NO_ANSWER = re.compile(
    "Socket timed out|Zero Bytes were transmitted|Connection reset|Connection timed out"
    "|Broken pipe|Unexpected message|receive failure|not connected"
)
"""Messages of sbatch after which the request may have arrived (Slurm, slurm_errno.c)."""

_JOBS, _VERSION, _BYTES = "jobs.jsonl", 1, 64 << 20
_MODES = ("", "continue", "chain")
_SUBMITTED = re.compile(r"Submitted batch job (\d{1,18})(?: on cluster \S+)?$", re.MULTILINE)
"""sbatch's answer. `--parsable` would print only a number, as banners may do."""

_JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,9})?", re.ASCII)
_AFTER = re.compile(r"[a-z0-9:,_?+]{0,100000}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A submitted job of a run."""

    job_id: str
    """Slurm's job id; for a sweep, the id of the array."""

    mode: str = ""
    """The script's last argument: `continue`, `chain`, or none for a new run."""

    points: tuple[int, ...] | None = None
    """The points among its tasks; None for all points, or without a sweep."""

    after: str = ""
    """The dependency that was passed to sbatch."""

    folder: str = ""
    """The working directory of the submission: relative paths in a job are below it."""


def is_job_id(text: object) -> bool:
    """Whether a text is a job id of Slurm: `1234`, or `1234_7` for a task.

    >>> is_job_id("1234_7"), is_job_id("-1"), is_job_id("1; rm")
    (True, False, False)
    """
    return isinstance(text, str) and _JOB_ID.fullmatch(text) is not None


def submitted_id(printed: str) -> str:
    r"""Return the job id from the output of sbatch; "" if it contains none.

    >>> submitted_id("Budget: 120\n\x1b[32mSubmitted batch job 7 on cluster c\x1b[0m\r\n42\n")
    '7'
    """
    ids = _SUBMITTED.findall(plain(printed))
    return str(ids[-1]) if ids else ""


def read_jobs(run_dir: Path | None) -> list[SlurmJob]:
    """Return the jobs of a run, oldest first; empty if they were not recorded."""
    if run_dir is None:
        return []
    lines = untrusted.lines_of_json(f"{run_dir}/{_JOBS}", limit=_BYTES)
    return [job for line in lines if (job := _job(line)) is not None]


def jobs_stamp(run_dir: Path | None) -> tuple[int, int, int] | None:
    """Return a value that changes when jobs are added to a run; None without a file."""
    try:
        info = Path(f"{run_dir}/{_JOBS}").stat()
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns


def _job(line: Any) -> SlurmJob | None:
    """Parse a line of the file; None if it does not describe a job."""
    data = untrusted.mapping(line)
    texts = {name: data.get(name, "") for name in ("job_id", "mode", "after", "folder")}
    points = data.get("points")
    good = (
        data.get("version") == _VERSION
        and is_job_id(texts["job_id"])
        and all(isinstance(t, str) and control.printable(t) == t for t in texts.values())
        and texts["mode"] in _MODES
        and _AFTER.fullmatch(texts["after"])
        and (points is None or isinstance(points, list))
        and all(untrusted.whole(point) is not None for point in points or ())
    )
    return SlurmJob(**texts, points=None if points is None else tuple(points)) if good else None


def as_lines(jobs: Iterable[SlurmJob]) -> list[str]:
    """Return jobs as lines of the file."""
    return [json.dumps({"version": _VERSION, **asdict(job)}) for job in jobs]


def write_jobs(run_dir: Path, jobs: Iterable[SlurmJob]) -> None:
    """Add jobs to those of a run, except known ones.

    Raises:
        LauncherError: the file cannot be written.
    """
    job_ids = {job.job_id for job in read_jobs(run_dir)}
    lines = [f"{line}\n" for line in as_lines(job for job in jobs if job.job_id not in job_ids)]
    try:
        untrusted.write_bytes(run_dir / _JOBS, "".join(lines).encode(), append=True)
    except OSError as error:
        raise LauncherError(
            f"the jobs are submitted, but {run_dir / _JOBS} cannot be written: {error.strerror}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A submission of a job, or of a chain, in which each job waits for the previous one."""

    folder: RunFolder
    """The run directory."""

    script: str
    """The path of the batch script on the nodes."""

    log: str
    """The path of its log, as an option of sbatch."""

    jobs: tuple[SlurmJob, ...]
    """The jobs; their ids are not known yet."""

    token: str = field(default_factory=lambda: random.token_hex(4))
    """A unique id of this submission within the run."""

    known: tuple[str, ...] = ()
    """The ids of the run's earlier jobs."""

    array: str | None = None
    """The tasks of a sweep, if they are not all tasks of the script."""

    def as_json(self) -> dict[str, Any]:
        """Return the submission as JSON, for `of_json`."""
        data = asdict(self)
        data["folder"]["here"] = str(self.folder.here)
        return data

    @classmethod
    def of_json(cls, data: Any, *, name: str) -> "Submission":
        """Return the submission of the run `name` from its JSON.

        Raises:
            LauncherError: another version of the toolkit has written it.
        """
        try:
            folder = RunFolder(**data["folder"] | {"here": Path(data["folder"]["here"])})
            jobs = tuple(
                SlurmJob(**job | {"points": job["points"] and tuple(job["points"])})
                for job in data["jobs"]
            )
            return cls(**data | {"folder": folder, "jobs": jobs, "known": tuple(data["known"])})
        except (KeyError, TypeError, ValueError):
            raise LauncherError(
                f"{name}: its submission was cut short, and what was written "
                "down of it cannot be read by this version"
            ) from None

    def job_after(self, sent: Sequence[SlurmJob]) -> SlurmJob:
        """Return the next job after the sent ones, with its complete dependency."""
        job = self.jobs[len(sent)]
        waits = [job.after, f"afterany:{sent[-1].job_id}" if sent else ""]
        return replace(job, after=",".join(filter(None, waits)))

    def argv(self, job: SlurmJob) -> list[str]:
        """Return the script of a job and its arguments."""
        return [self.script, self.folder.there, *([job.mode] if job.mode else [])]

    def sbatch(self, job: SlurmJob, *, cwd: str) -> list[str]:
        """Return the command that submits a job from the folder `cwd`."""
        options = [f"--output={self.log}"]
        if job.folder != cwd:
            options.append(f"--chdir={job.folder}")
        if job.after:
            options += [f"--dependency={job.after}", "--kill-on-invalid-dep=yes"]
        if self.array is not None:
            options.append(f"--array={self.array}")
        return ["sbatch", *options, *self.argv(job)]

    def key(self, index: int) -> str:
        """Return the name of one job's submission."""
        return f"{self.token}-{index}"


def send(
    login: LoginNode,
    submission: Submission,
    *,
    secrets: Mapping[str, str],
    interrupted: bool = False,
    before: Sequence[SlurmJob] = (),
) -> list[SlurmJob]:
    """Submit the jobs, with secrets as variables, and return them with their ids.

    With `interrupted`, an earlier call may have submitted some of the jobs; `before` are those that
    it has submitted.

    Raises:
        UnknownOutcome: it is unknown whether Slurm has received one of them.
        LauncherError: sbatch refused one of them; the earlier ones are cancelled.
    """
    sent = list(before)
    for _ in submission.jobs[len(before) :]:
        try:
            sent.append(
                _send_once(login, submission, sent, secrets=secrets, interrupted=interrupted)
            )
        except UnknownOutcome:
            raise
        except LauncherError:
            if ours := sent[len(before) :]:
                login.command(["scancel", *(job.job_id for job in ours)])
            raise
    return sent


def _send_once(
    login: LoginNode,
    submission: Submission,
    sent: Sequence[SlurmJob],
    *,
    secrets: Mapping[str, str],
    interrupted: bool,
) -> SlurmJob:
    """Submit the next job after the sent ones, exactly once."""
    job = submission.job_after(sent)
    argv = submission.sbatch(job, cwd=login.cwd)
    folder, key = submission.folder, submission.key(len(sent))
    doubt, looks, why = interrupted, 0, "its submission was cut short"
    for pause_s in (0.0, *_PAUSES_S):
        time.sleep(pause_s)
        try:
            if doubt:
                if job_id := _queued(login, submission, job, [before.job_id for before in sent]):
                    return replace(job, job_id=job_id)
                looks += 1
                if looks < _LOOKS:
                    continue
            done = login.sbatch(argv, folder=folder, key=key, again=doubt, secrets=secrets)
        except Hung as error:
            why = str(error)
            break
        except Lost as error:
            # sbatch may have run; then the login node has recorded its answer.
            doubt, looks, why = False, 0, str(error)
            continue
        except SchedulerMissing:
            raise
        except LauncherError as error:  # from the queue query
            why = str(error)
            continue
        if done.returncode == 0 and (job_id := submitted_id(done.stdout)):
            return replace(job, job_id=job_id)
        killed = done.returncode < 0 or done.returncode >= 128
        in_doubt = killed or done.returncode in (0, DOUBTFUL) or _NO_ANSWER.search(done.stderr)
        if not in_doubt:
            raise refused("sbatch", done)
        doubt, looks = True, 0
        why = error_line(done.stderr) if done.returncode else "sbatch has named no job"
    name = folder.here.name
    raise UnknownOutcome(
        f"it is unknown whether Slurm has the job of {name}: {why}. `toolkit status {name}` finds "
        f"out, and `toolkit resubmit {name}` submits it if not"
    )


def _queued(login: LoginNode, submission: Submission, job: SlurmJob, others: Sequence[str]) -> str:
    """Return the id of Slurm's oldest unrecorded job with this command, or "" if none exists."""
    # squeue shows the whole command; from Slurm 24.11 on, only the script.
    commands = (" ".join(submission.argv(job)), submission.script)
    queued = {row.whole for row in ask_mine(login.command) if row.command in commands}
    return min(queued - {*submission.known, *others}, key=int, default="")


def find(login: LoginNode, submission: Submission) -> list[SlurmJob]:
    """Return the jobs of a submission that Slurm has received, with their ids.

    Raises:
        LauncherError: the login node or the controller does not answer.
    """
    keys = [submission.key(index) for index in range(len(submission.jobs))]
    answers = login.answers(submission.folder, keys)
    answered = {key: job_id for key in answers if (job_id := submitted_id(answers[key]))}
    sent: list[SlurmJob] = []
    for key in keys:
        job = submission.job_after(sent)
        others = [*answered.values(), *(before.job_id for before in sent)]
        job_id = answered.get(key) or _queued(login, submission, job, others)
        if not job_id:
            break
        sent.append(replace(job, job_id=job_id))
    return sent
