"""A Slurm that counts its queries, and a user with runs on it: no cluster, recorded answers."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import toolkit
from toolkit.job.sweep import Point
from toolkit.runs.records.points import write_points
from toolkit.runs.records.registry import RunRecord
from toolkit.slurm import SlurmLauncher
from toolkit.slurm.run import SlurmRun
from toolkit.slurm.submission import SlurmJob, write_jobs

Answer = subprocess.CompletedProcess[str]

JOBS = "row|==|JOBID|==|STATE|==|START_TIME|==|REASON|==|COMMAND|==|\n"
PLACES = "row|==|JOBID|==|PRIORITY|==|PARTITION|==|REASON|==|\n"
ACCOUNTED = "Cluster|==|JobID|==|State|==|ExitCode|==|SubmitLine|==|\n"
"""The headers of the tables of squeue, and of sacct."""

CONFIG = "Configuration data as of 2026-11-21T01:16:06\nClusterName             = {}\n"
NO_ACCOUNTING = "Slurm accounting storage is disabled"


class Slurm:
    """Answers as a cluster does, and records the queries."""

    def __init__(self, rows: str = "", *, cluster: str = "c") -> None:
        self.rows = rows
        self.others = ""
        self.error = ""
        self.cluster = cluster
        self.accounting: str | None = None
        self.accounting_error = ""
        self.asked: list[Sequence[str]] = []

    def __call__(self, argv: Sequence[str]) -> Answer:
        self.asked.append(list(argv))
        match argv[0]:
            case "squeue":
                text = self.rows if "--me" in argv else self.others
                text = (PLACES if "PENDING" in argv else JOBS) + text
                return Answer(argv, 1 if self.error else 0, text, self.error)
            case "scontrol":
                return Answer(argv, 0, CONFIG.format(self.cluster), "")
            case "sacct":
                error = self.accounting_error or ("" if self.accounting else NO_ACCOUNTING)
                text = ACCOUNTED + (self.accounting or "")
                return Answer(argv, 1 if error else 0, text, error)
        return Answer(argv, 0, "", "")

    def calls(self, program: str) -> int:
        return sum(argv[0] == program for argv in self.asked)


class User:
    """A user with run directories, and a launcher that opens them."""

    def __init__(self, folder: Path, slurm: Slurm) -> None:
        self.folder = folder
        self.profile = toolkit.SlurmProfile(name="s")
        self.slurm = slurm
        self.launcher = SlurmLauncher(self.profile, command=slurm)

    def record(self, name: str, job_id: int, *, points: int = 0, created: float = 0.0) -> RunRecord:
        run_dir = self.folder / name
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        write_jobs(run_dir, [SlurmJob(job_id=str(job_id))])
        if points:
            made = [
                Point(index=i, name=f"p{i}", settings={}, args=(), env={}) for i in range(points)
            ]
            write_points(run_dir, made)
        return RunRecord(
            uri=f"slurm://c/{job_id}",
            name=name,
            job="job",
            profile=self.profile.model_dump(mode="json"),
            created=created,
            run_dir=run_dir,
        )

    def run(self, name: str, job_id: int, **more: Any) -> SlurmRun:
        return self.launcher.open(self.record(name, job_id, **more))

    def line(self, name: str, job_id: object, word: str, more: str = "", **fields: str) -> str:
        command = f"{self.folder}/{name}/job.sbatch {self.folder}/{name}{more}"
        start, reason = fields.get("start", "N/A"), fields.get("reason", "None")
        return job_row(job_id, word, start=start, reason=reason, command=command)


def job_row(
    job_id: object, word: str, *, start: str = "N/A", reason: str = "None", command: str = "x"
) -> str:
    """Return a row of squeue."""
    return f"row|==|{job_id}|==|{word}|==|{start}|==|{reason}|==|{command}|==|\n"


def squeue(rows: str) -> str:
    """Return rows of squeue as the table that it prints."""
    return JOBS + rows


def sinfo(rows: str) -> str:
    """Return rows of sinfo, with `|` between their columns, as the table that it prints."""
    lines = ["PARTITION|AVAIL|TIMELIMIT|NODES|CPUS|MEMORY|GRES", *rows.splitlines()]
    return "".join(f"row|{line}|\n".replace("|", "|==|") for line in lines)


def shown(found: Sequence[toolkit.RunStatus]) -> list[str]:
    return [status.state.upper() for status in found]


def fake_squeue(folder: Path, *, seconds: float = 0.0) -> Path:
    """Write commands of Slurm that count how often they are called."""
    commands = folder / "bin"
    commands.mkdir()
    (commands / "rows").write_text(job_row(1, "RUNNING") + job_row(2, "RUNNING"))
    (commands / "header").write_text(JOBS)
    text = f"#!/bin/sh\necho >>{folder}/calls\nsleep {seconds}\ncd {commands} && cat header rows\n"
    for name, script in (("squeue", text), ("scancel", "#!/bin/sh\n"), ("scontrol", "#!/bin/sh\n")):
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    return commands


def counted(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())
