"""A real sandbox for the tests of this folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import asks

SANDBOX = Path(__file__).resolve().parents[3] / "slurm" / "sandbox" / "sandbox"
LIMIT_S = 300


class Sandbox:
    """One sandbox in a directory of its own, driven by its command line as people drive it."""

    def __init__(self) -> None:
        """Choose a directory; nothing is started."""
        self.work = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
        self.dir = self.work / "state"
        self.env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        self.env |= {"SANDBOX_DIR": str(self.dir)}

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one `sandbox` command."""
        return self.command(str(SANDBOX), *arguments, check=check)

    def command(
        self, *argv: str, check: bool = True, stdin: str = "", cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run any command in the tests' own directory."""
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            cwd=cwd or self.work,
            env=self.env,
            timeout=LIMIT_S,
        )
        if check and done.returncode:
            raise AssertionError(f"{argv} exited {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def slurm(
        self, name: str, *arguments: str, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command through its shim; a question again until it is answered."""
        argv = (str(self.dir / "bin" / name), *arguments)
        end = time.monotonic() + LIMIT_S
        while check and asks(name, *arguments) and time.monotonic() < end:
            done = self.command(*argv, check=False, **options)
            if done.returncode == 0:
                return done
            time.sleep(0.2)
        return self.command(*argv, check=check, **options)

    def submit(self, script: str, *options: str) -> str:
        """Submit a script on stdin; return the job id."""
        done = self.slurm("sbatch", "--parsable", "-o", "%j.out", *options, stdin=script)
        return done.stdout.strip()

    def output(self, job: str) -> str:
        """Read what a job has written so far."""
        path = self.work / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """Read the fields of `scontrol show job`."""
        text = self.slurm("scontrol", "-o", "show", "job", job).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_job(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of the states."""
        wait_until(lambda: self.job(job)["JobState"] in states, f"job {job} to be {states}")
        return self.job(job)

    def status(self) -> dict[str, Any]:
        """Read `sandbox status --json`."""
        report: dict[str, Any] = json.loads(self.run("status", "--json", check=False).stdout)
        return report

    def node(self, name: str) -> dict[str, Any]:
        """Read one node's part of the status, after Slurm's own part."""
        found: dict[str, Any] = {}

        def known() -> bool:
            found.update(next(n for n in self.status()["nodes"] if n["name"] == name))
            return bool(found["state"] != "unknown")

        wait_until(known, f"Slurm to know {name}")
        return found

    def jobs_processes(self) -> list[dict[str, Any]]:
        """List what jobs have running, on all nodes."""
        entries: list[dict[str, Any]] = json.loads(self.run("ps", "--json").stdout)
        return entries

    def close(self) -> None:
        """Take it down; keep nothing."""
        self.run("down")
        shutil.rmtree(self.work)


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Poll until the condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit_s:g} s in vain for {what}")
        time.sleep(0.2)


@pytest.fixture(scope="session", autouse=True)
def packages() -> None:
    """Skip where no sandbox can be; in CI that is a failure."""
    done = subprocess.run([SANDBOX, "install"], capture_output=True, text=True)
    reason = done.stderr.strip() if done.returncode else ""
    if os.geteuid() != 0:
        reason = reason or "the sandbox needs root"
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def fresh() -> Iterator[Sandbox]:
    """A sandbox that is not up yet."""
    sandbox = Sandbox()
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """A sandbox of three nodes that is up."""
    sandbox = Sandbox()
    try:
        sandbox.run("up", "--nodes=3", "--cpus=4", "--gpus=4", "--memory=8192", "--kill-wait=5")
        yield sandbox
    finally:
        sandbox.close()
