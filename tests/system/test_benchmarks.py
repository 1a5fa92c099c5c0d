"""The benchmarks still run: each with its smallest sizes, whatever it measures."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SMALL = {
    "asking": "--runs 50 --live 20 --rounds 1",
    "checkpoint": "--rounds 1 --megabytes 8",
    "ddp_step": "--rounds 2",
    "executor": "--rounds 1",
    "goodput": "--no-faults --steps 100 --only toolkit",
    "kubernetes": "--rounds 1",
    "language_model": "--steps 2",
    "recovery": "--rounds 1 --only rank",
    "render": "--rounds 1",
    "replicas": "--rounds 1 --steps 5",
    "slurm": "--rounds 1",
    "supervisor": "--looks 2 --starts 1",
    "telemetry": "--rounds 1 --steps 20 --ranks 104",
}


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_to_its_end(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *SMALL[name].split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 or "missed" in done.stdout, done.stdout
    assert "Traceback" not in done.stdout
