"""The supervisor's role `batch` as a process of its own, with stand-ins for Slurm's programs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_SCONTROL = """#!/bin/sh
echo "scontrol $*" >>"$CALLS"
if [ -e "$STATE/scontrol" ]; then . "$STATE/scontrol"; fi
case "$*" in
"-o show job"*)
    echo "JobId=7 JobState=$(cat "$STATE/job_state") Restarts=$(cat "$STATE/restarts") " ;;
"show hostnames"*) echo "$3" | tr , '\\n' ;;
esac
"""

_SINFO = """#!/bin/sh
case "$*" in
*" -p "*) printf '==%s idle==\\n' n1 n2 n3 ;;
*" -t "*) cat "$STATE/down" ;;
*) cat "$STATE/held" ;;
esac
"""

_SQUEUE = """#!/bin/sh
printf '==7.%s==\\n' batch $(cat "$STATE/steps")
"""

_SCANCEL = """#!/bin/sh
echo "scancel $*" >>"$CALLS"
if [ -e "$STATE/scancel" ]; then . "$STATE/scancel"; fi
"""

_SRUN = """#!/bin/sh
echo "srun $*" >>"$CALLS"
case "$*" in *" env") echo SLURM_STEP_ID=3; exit ;; esac
while [ "$1" != node ]; do shift; done
logs=$2
echo $$ >"$STATE/srun"
. "$STATE/step"
"""


@dataclass
class Role:
    """A batch job of two nodes whose step is a few lines of shell, where $logs is the attempt."""

    folder: Path
    step: str = "exit 0"
    requeues: int = 2
    mode: str = ""
    options: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ("-Ium", "toolkit.supervisor")

    def __post_init__(self) -> None:
        self.run_dir, self.log = self.folder / "run", self.folder / "job.log"
        self.state = self.folder / "state"
        commands = self.folder / "bin"
        for made in (self.state, commands):
            made.mkdir(exist_ok=True)
        # `held` is what sinfo says of the job's nodes: nothing, unless a test lets it.
        for name, text in {
            "job_state": "RUNNING\n",
            "restarts": "0\n",
            "down": "",
            "held": "",
            "steps": "",
        }.items():
            (self.state / name).write_text(text)
        programs = {
            "scontrol": _SCONTROL,
            "sinfo": _SINFO,
            "squeue": _SQUEUE,
            "scancel": _SCANCEL,
            "srun": _SRUN,
            "getent": "#!/bin/sh\nexit 0\n",
        }
        for name, text in programs.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.calls = self.folder / "calls"
        self.calls.touch()

    def start(self, **more: str) -> "subprocess.Popen[bytes]":
        (self.state / "step").write_text(self.step)
        environ = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "CALLS": str(self.calls),
            "STATE": str(self.state),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1,n2",
            "SLURM_JOB_PARTITION": "p",
            **self.environ,
            **more,
        }
        argv = [
            *(sys.executable, *self.program, "batch", str(self.run_dir)),
            *([self.mode] if self.mode else []),
            *("--job=probe", f"--requeues={self.requeues}", "--grace=2", *self.options),
            *("--", "srun", "--nodes=2", "node", "--", "torchrun", "-m", "train"),
        ]
        with self.log.open("a") as log:
            return subprocess.Popen(argv, env=environ, stdout=log, stderr=log)

    def run(self, **more: str) -> int:
        """Run the role to its end; return its exit status."""
        return self.start(**more).wait(timeout=120)

    def signalled(self, number: signal.Signals, when: Callable[[], bool]) -> int:
        """Run the role, send it a signal when something is so, and return its exit status."""
        process = self.start()
        self.wait(process, when)
        process.send_signal(number)
        return process.wait(timeout=120)

    def wait(self, process: "subprocess.Popen[bytes]", when: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not when():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < until
            time.sleep(0.01)

    def path(self, name: str, attempt: int = 0) -> Path:
        return self.run_dir / f"logs/attempt-{attempt}/{name}"

    def text(self, name: str, attempt: int = 0) -> str:
        return self.path(name, attempt).read_text().rstrip("\n")

    def asked(self, *words: str) -> list[str]:
        """The commands that Slurm got, of those that begin with words."""
        return [line for line in self.calls.read_text().splitlines() if line.startswith(words)]
