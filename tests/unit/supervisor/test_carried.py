"""A batch script unpacks the supervisor that it carries, and runs no other."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import toolkit
from tests.support.planned import job as job_of
from toolkit.rendering import payload

PROGRAM = payload.archive("slurm")


@pytest.fixture
def unpack(tmp_path: Path) -> Path:
    """The script up to where it has its supervisor."""
    text = toolkit.render(toolkit.plan(job_of(), toolkit.SlurmProfile(name="s")))
    begin, found, rest = text.partition("_supervisor=(")
    assert found
    path = tmp_path / "unpack.sh"
    path.write_text(f"{begin}exit\n{rest.splitlines()[-1]}\n")
    return path


def run(
    script: Path, run_dir: Path, path: str = os.environ["PATH"]
) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": path, "SLURM_JOB_ID": "7"}
    argv = ["bash", str(script), str(run_dir)]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)


def test_it_is_unpacked_once_into_the_run_directory(unpack: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done = run(unpack, tmp_path / "it's a run")
        assert (done.returncode, done.stderr) == (0, "")
        (program,) = (tmp_path / "it's a run").iterdir()
        assert program.read_bytes() == PROGRAM
        assert not program.stat().st_mode & 0o022, "nobody else can change it"


@pytest.mark.parametrize("content", [b"", PROGRAM[:1000], PROGRAM + b"x", b"import os"])
def test_another_file_of_its_name_is_replaced(content: bytes, unpack: Path, tmp_path: Path) -> None:
    """Such as one that was cut by a full disk, or put there by somebody."""
    run(unpack, tmp_path / "run")
    (program,) = (tmp_path / "run").iterdir()
    program.write_bytes(content)
    assert run(unpack, tmp_path / "run").returncode == 0
    assert program.read_bytes() == PROGRAM


@pytest.mark.parametrize("name", ["TERM", "USR1", "USR2"])
def test_a_signal_during_the_first_commands_is_kept_for_the_supervisor(
    name: str, unpack: Path, tmp_path: Path
) -> None:
    """Slurm may stop or preempt a job while the script is being started."""
    (tmp_path / "mkdir").write_text(f'#!/bin/sh\nkill -{name} "$PPID"\nexec /bin/mkdir "$@"\n')
    (tmp_path / "mkdir").chmod(0o755)
    unpack.write_text(unpack.read_text().replace("\nexit\n", '\necho "$_signals"\nexit\n'))
    done = run(unpack, tmp_path / "run", f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout, done.stderr) == (0, f" {name}\n", "")


def test_a_script_whose_last_line_was_cut_ends(unpack: Path, tmp_path: Path) -> None:
    unpack.write_text(unpack.read_text()[:-2001] + "\n")
    done = run(unpack, tmp_path / "run")
    assert done.returncode != 0
    assert "is not the supervisor of this script" in done.stderr


def test_a_host_without_python_ends_with_the_name_of_the_program(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("base64", "cut", "date", "mkdir", "mv", "sha256sum", "stat", "tail"):
        found = shutil.which(name)
        assert found
        (programs / name).symlink_to(found)
    script = tmp_path / "job.sh"
    script.write_text(toolkit.render(toolkit.plan(job_of(), toolkit.SlurmProfile(name="s"))))
    environ = {"PATH": str(programs), "SLURM_JOB_ID": "7"}
    bash = str(shutil.which("bash"))
    argv = [bash, str(script), str(tmp_path / "run")]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert "python3: not found" in done.stderr
