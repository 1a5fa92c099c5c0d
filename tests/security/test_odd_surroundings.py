"""Odd surroundings end in one line, not in a traceback."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, TOOLKIT

JOB = str(ROOT / "jobs/digits.yaml")


def test_a_working_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["bash", "-c", f'cd {gone} && rmdir {gone} && "$0" render {JOB} --to slurm', TOOLKIT],
        capture_output=True,
        text=True,
        check=False,
    )
    said = "the current folder no longer exists; change to another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize("content", ["a\0b", "profiles/\x1b[2Jx.yaml"])
def test_a_default_profile_that_is_no_path_is_told(own_user: Path, content: str) -> None:
    folder = own_user / "config/torch-deploy-toolkit"
    folder.mkdir(parents=True)
    (folder / "default").write_text(content)
    done = subprocess.run(
        [TOOLKIT, "render", JOB], env=os.environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{folder / 'default'} holds {content!r}, which is not a path\n"


@pytest.mark.parametrize("name", ["x.sbatch", "x.yaml", "x.py"])
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / f"link-{name}").symlink_to(name)
    for file in (name, f"link-{name}"):
        done = subprocess.run(
            [TOOLKIT, "check", file],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"{file}: is not a regular file\n"


def test_what_a_command_writes_is_checked(tmp_path: Path) -> None:
    line = f"{TOOLKIT} check <(sleep 0.1; printf 'name: a\\nmodule: m\\n')"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(": fine: 1 x 1 processes\n")
