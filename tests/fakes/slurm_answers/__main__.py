"""Record the answers of this shell's Slurm about jobs in every state; it takes two minutes."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fakes.slurm_answers import FOLDER
from toolkit.slurm.commands import ask_accounting, ask_jobs, run_command

SCRIPT = """\
#!/bin/bash
sleep "$1"
exit "$2"
"""
KEYS = (
    *("job_id", "array_job_id", "array_task_id", "array", "job_state", "state", "state_reason"),
    *("start_time", "time", "exit_code", "command"),
)
"""The keys that matter here, of some 150."""


class Site:
    """A cluster and the jobs that are made there."""

    def __init__(self, folder: Path) -> None:
        self._script = folder / "job.sbatch"
        self._script.write_text(SCRIPT)
        self.jobs: dict[str, str] = {}
        self.answers: list[tuple[str, str]] = []

    def submit(self, name: str, *options: str, sleep_s: int = 600, status: int = 0) -> str:
        """Submit a job and remember what happens to it."""
        words = [*options, "--output=/dev/null", str(self._script), str(sleep_s), str(status)]
        found = _printed("sbatch", "--parsable", *words).strip().partition(";")[0]
        self.jobs[name] = found
        return found

    def state(self, job_id: str) -> str:
        """Return a job's state."""
        return _printed("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T").split("\n")[0]

    def ask(self, argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Query Slurm, and record the answer."""
        done = run_command(argv)
        self.answers.append((" ".join(argv), done.stdout))
        return done


def main() -> None:
    """Create jobs in every state, query Slurm, and write the answers into this folder."""
    version = _printed("squeue", "--version").split()[-1]
    with tempfile.TemporaryDirectory() as name:
        site = Site(Path(name))
        try:
            recording = record(site)
        finally:
            subprocess.run(["scancel", "--me"], check=False)
    path = FOLDER / f"{'.'.join(version.split('.')[:2])}.json"
    path.write_text(_written(recording))
    print(f"{path}: {len(site.jobs)} jobs of Slurm {version}")


def record(site: Site) -> Mapping[str, Any]:
    """Return Slurm's answers about jobs in every state, in text and in JSON."""
    done = site.submit("done", sleep_s=0)
    failed = site.submit("failed", sleep_s=0, status=3)
    array = site.submit("array", "--array=0,4", sleep_s=0, status=1)
    timed_out = site.submit("timed out", "--time=1")
    running = site.submit("running")
    stopped = site.submit("cancelled")
    _until(lambda: site.state(stopped) == "RUNNING")
    subprocess.run(["scancel", stopped], check=True)
    never = site.submit("cancelled before it began", "--begin=now+1hour")
    subprocess.run(["scancel", never], check=True)
    site.submit("begins later", "--begin=now+1hour")
    site.submit("depends", f"--dependency=afterok:{running}")
    site.submit("held", "--hold")
    resources = site.submit("waits for nodes", "--nodes=2", "--exclusive")
    site.submit("waits behind it", "--nodes=2", "--exclusive")
    for job in (done, failed, array, timed_out):
        _until(lambda job=job: site.state(job) in ("COMPLETED", "FAILED", "TIMEOUT"))  # type: ignore[misc]
    _until(lambda: _printed("squeue", "-h", "-j", resources, "-o", "%r").strip() == "Resources")
    _until(lambda: "TIMEOUT" in _printed("sacct", "-nX", "-j", timed_out, "-o", "State"))
    ids = list(site.jobs.values())
    ask_jobs(site.ask, ids)
    queue = json.loads(_printed("squeue", "--json", "-t", "all"))["jobs"]
    ask_accounting(site.ask, ids)
    told = json.loads(_printed("sacct", "--json", "-X", "-j", ",".join(ids)))["jobs"]
    return {
        "jobs": site.jobs,
        "answers": site.answers,
        "squeue": [_kept(job) for job in queue if _whole(job) in ids],
        "sacct": [_kept(job) for job in told],
    }


def _whole(job: Mapping[str, Any]) -> str:
    array = job["array_job_id"]
    number = array["number"] if isinstance(array, Mapping) else array
    return str(number or job["job_id"])


def _kept(job: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: job[key] for key in KEYS if key in job}


def _written(recording: Mapping[str, Any]) -> str:
    """Return it as JSON, a job a line."""
    parts = []
    for key, value in recording.items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(one)}" for one in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _printed(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.5)
    sys.exit("the cluster does not do what it should")


if __name__ == "__main__":
    main()
