"""Older versions of torch, installed beside: a new project trains with them (gigabytes each)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

KILLED = """\
        if rank == 1 and epoch == 3 and first == 0:
            os.kill(os.getpid(), 9)
"""
LOOP = "    for epoch in range(first, epochs):\n"
FAILS = """\
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("sample 7 is broken")
time.sleep(100)
"""


@pytest.fixture(scope="module", params=["2.0.1", "2.4.1", "2.8.0"])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with this version of torch and the toolkit."""
    folder = tmp_path_factory.mktemp("torch") / str(request.param)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    numpy = "numpy<2" if request.param < "2.3" else "numpy"
    pip = [str(folder / "bin/pip"), "install", "-q", "--no-cache-dir"]
    subprocess.run([*pip, f"torch=={request.param}", numpy], check=True)
    subprocess.run([*pip, str(ROOT)], check=True)
    return folder / "bin"


@pytest.mark.nightly
def test_a_new_project_trains_resumes_and_names_a_failure(programs: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}

    def toolkit(*argv: str) -> "subprocess.CompletedProcess[str]":
        command = [str(programs / "toolkit"), *argv]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    assert toolkit("new", ".").returncode == 0
    job, script = (tmp_path / "job.yaml").read_text(), (tmp_path / "train.py").read_text()
    done = toolkit("run", "job.yaml")
    assert (done.returncode, "SUCCEEDED" in done.stdout) == (0, True), done

    (tmp_path / "killed.py").write_text(script.replace(LOOP, LOOP + KILLED))
    (tmp_path / "killed.yaml").write_text(job.replace("script: train.py", "script: killed.py"))
    done = toolkit("run", "killed.yaml")
    assert (done.returncode, done.stdout.count("epoch 3 step")) == (0, 1), done

    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "fails.yaml").write_text(
        job.replace("script: train.py", "script: fails.py").replace('args: [--epochs, "20"]\n', "")
    )
    done = toolkit("run", "fails.yaml")
    assert done.returncode == 1
    assert "ValueError: sample 7 is broken" in done.stdout, done
