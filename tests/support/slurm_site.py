"""What a user of the sandbox's cluster has on the login node, and what its runs leave there."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import toolkit
from toolkit.slurm import SlurmLauncher, SlurmRun

if TYPE_CHECKING:
    from tests.conftest import Cluster

ROOT = Path(__file__).parents[2]


class Site:
    """What a user has on the login node: a profile, and the toolkit."""

    def __init__(self, cluster: "Cluster", folder: Path) -> None:
        self.cluster = cluster
        self.runs = folder / "runs"
        self.profile = toolkit.SlurmProfile(
            name="sandbox", runs_dir=str(self.runs), venv=str(ROOT / ".venv")
        )
        self.launcher = SlurmLauncher(self.profile, command=self._command)

    def _command(self, argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            argv, env=self.cluster.environ, cwd=ROOT, capture_output=True, text=True, check=False
        )

    def submit(self, *overrides: str) -> SlurmRun:
        job = toolkit.load(ROOT / "jobs/digits.yaml", overrides)
        return self.launcher.submit(toolkit.plan(job, self.profile))

    def submit_long(self, *overrides: str) -> SlurmRun:
        """Submit a job that would train for hours, with a checkpoint every 50 steps."""
        args = '["--task", "digits", "--steps", "1000000", "--checkpoint-every", "50"]'
        return self.submit(f"args={args}", *overrides)

    def story(self) -> str:
        """Tell what the runs have said so far and what lives of them, for a test that fails."""
        logs = sorted(self.runs.glob("**/*.log"))
        ends = [f"{path}:\n{path.read_text(errors='replace')[-4000:]}" for path in logs]
        return "\n".join([*ends, self.cluster("ps"), self.cluster.slurm("squeue")])


def events(run: SlurmRun, kind: str) -> list[dict[str, object]]:
    assert run.run_dir is not None
    path = run.run_dir / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def output(run: SlurmRun) -> str:
    return "\n".join(run.logs())


def failure(run: SlurmRun) -> str:
    return f"{run.status()}\n{output(run)}"


def nodes_of(cluster: "Cluster", run: SlurmRun) -> list[str]:
    listed = cluster.slurm("squeue", "-h", "-j", run.job_id, "-o", "%N").strip()
    return cluster.slurm("scontrol", "show", "hostnames", listed).split()
