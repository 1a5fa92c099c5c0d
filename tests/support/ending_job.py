"""A batch job whose attempt ends: the script's functions, run by bash, and the cluster around."""

import functools
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import toolkit
from tests.support.planned import job as job_of

_PRELUDE = """
set -euo pipefail
_run_dir=$1 _attempt=$2 _restarts=$2 _stopping=$3 _since=0 _mode= _run_job=7
_logs=$_run_dir/logs/attempt-$_attempt _own_logs=$_run_dir/logs/attempt-$_attempt
_before=$_run_dir/logs/attempt-$((_attempt - 1))
eval "$4"
find_log
open_log
"""

_SCONTROL = """#!/bin/sh
echo "scontrol $*" >>"$CALLS"
case "$*" in
"-o show job"*)
    [ -z "${NOISE:-}" ] || echo "$NOISE"
    echo "JobId=7 JobState=$STATE Restarts=$RESTARTS StartTime=100" \\
        "${PREEMPTED:-PreemptTime=None} ExcNodeList=$EXCLUDED NodeList=x"
    [ -z "${NOISE:-}" ] || echo "$NOISE"
    ;;
"show hostnames"*)
    [ -z "${NOISE:-}" ] || echo "$NOISE"
    echo "$3" | tr , '\\n'
    [ -z "${NOISE:-}" ] || echo "$NOISE"
    ;;
requeue* | ping)
    [ "$(grep -c "$1" "$CALLS")" -gt "${AWAY:-0}" ] || exit 1
    [ "$1$REFUSES" != requeueyes ]
    ;;
esac
"""

_SINFO = """#!/bin/sh
[ -z "${NOISE:-}" ] || echo "$NOISE"
case "$*" in
*" -p "*) printf '==%s==\\n' $UP | tr : ' ' ;;
*) [ -z "$DOWN" ] || printf '==%s==\\n' $DOWN ;;
esac
[ -z "${NOISE:-}" ] || echo "$NOISE"
"""


@functools.cache
def functions(requeue: int, preemptions: int | None, chain: bool, more: str) -> str:
    """Return the functions of a batch script for two nodes; `more` keys of the job are JSON."""
    retries = {"requeue": requeue, "in_job": 2, "preemptions": preemptions}
    job = job_of(resources={"nnodes": 2}, retries=retries, **json.loads(more))
    plan = toolkit.plan(job, toolkit.SlurmProfile(name="s"))
    script = toolkit.render(plan.in_turns() if chain else plan)
    return script.partition("\n#==== functions\n")[2].partition("\n#==== ")[0]


@dataclass
class Job:
    """A run directory, and the cluster around it."""

    run_dir: Path
    attempt: int = 0
    limit: int = 2
    preemptions: int | None = None
    chain: bool = False
    notify: Mapping[str, Any] | None = None
    secrets: Mapping[str, Any] = field(default_factory=lambda: {"HOOK": None})

    def __post_init__(self) -> None:
        self.calls = self.run_dir / "calls"
        self.calls.touch()
        commands = self.run_dir / "bin"
        commands.mkdir()
        for name, text in (("scontrol", _SCONTROL), ("sinfo", _SINFO)):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.environ = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1,n2",
            "SLURM_JOB_PARTITION": "p",
            "RESTARTS": "0",
            "STATE": "",
            "EXCLUDED": "(null)",
            "AWAY": "0",
            "REFUSES": "",
            "UP": "n1:idle n2:mix n3:idle n4:alloc",
            "DOWN": "",
        }
        self.log = self.run_dir / "job.log"

    def folder(self, attempt: int) -> Path:
        made = self.run_dir / f"logs/attempt-{attempt}"
        made.mkdir(parents=True, exist_ok=True)
        return made

    def told(self, **outcome: Any) -> None:
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

    def run(self, body: str, *, stopping: str = "") -> int:
        """Run functions of the script; return the exit status."""
        self.folder(self.attempt)
        state = "COMPLETING" if stopping == "terminated" else "RUNNING"
        more = {"notify": self.notify, "secrets": self.secrets} if self.notify else {}
        arguments = [
            str(self.run_dir),
            str(self.attempt),
            stopping,
            functions(self.limit, self.preemptions, self.chain, json.dumps(more)),
        ]
        with self.log.open("a") as log:
            done = subprocess.run(
                ["bash", "-c", _PRELUDE + body, "bash", *arguments],
                env=self.environ | {"STATE": self.environ["STATE"] or state},
                stdout=log,
                stderr=log,
                check=False,
            )
        return done.returncode

    def conclude(self, status: int, *, stopping: str = "", printed: str = "") -> int:
        return self.run(f"cat >&2 <<'END'\n{printed}\nEND\nconclude {status}", stopping=stopping)

    @property
    def reason(self) -> str:
        return (self.folder(self.attempt) / "reason").read_text().rstrip("\n")

    @property
    def asked(self) -> list[str]:
        """The commands that the scheduler got."""
        lines = self.calls.read_text().splitlines()
        return [line.removeprefix("scontrol ") for line in lines if " show " not in line]
