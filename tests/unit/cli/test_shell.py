"""The words that a shell completes, and the manual page."""

import os
import shutil
import subprocess
from pathlib import Path

import click
import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT
from toolkit.cli import cli
from toolkit.cli.main import _profiles
from toolkit.runs.records import registry


def completed(line: str, cwd: Path = ROOT) -> list[str]:
    """Return what bash offers for the last word of a line."""
    script = (
        'eval "$(toolkit completion bash)"; COMP_WORDS=($1); [[ $1 != *" " ]] || COMP_WORDS+=(""); '
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); compopt() { :; }; "
        "_toolkit_completion toolkit; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    environ = {**os.environ, "PATH": f"{TOOLKIT.parent}:{os.environ['PATH']}"}
    argv = ["bash", "-c", script, "bash", line]
    done = subprocess.run(argv, cwd=cwd, env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_and_profiles() -> None:
    assert completed("toolkit re") == ["render", "resubmit", "report"]
    assert completed("toolkit render --c") == ["--chain"]
    assert completed("toolkit render jobs/digits.yaml --to te") == ["team-a"]


def test_in_a_folder_that_was_deleted_files_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    (offered,) = _profiles(click.Context(cli), click.Option(["--to"]), "k")
    assert (offered.value, offered.type) == ("k", "file")


def test_no_name_of_a_profile_that_a_shell_would_execute_is_offered(tmp_path: Path) -> None:
    (tmp_path / "slurm/profiles").mkdir(parents=True)
    for name in ("team-a", "$(touch made)", "a;touch made", "two\nlines"):
        (tmp_path / f"slurm/profiles/{name}.yaml").touch()
    assert completed("toolkit submit --to ", tmp_path) == ["k8s", "local", "slurm", "team-a"]


def test_bash_completes_the_runs_of_the_list(tmp_path: Path) -> None:
    profile = {"kind": "local", "name": "local"}
    for number in (1, 2):
        name = f"digits-1120-18150{number}-tcy3"
        record = registry.RunRecord(
            uri=f"local://{name}",
            name=name,
            job="digits",
            profile=profile,
            created=1.0,
            run_dir=tmp_path,
        )
        registry.add(record)
    assert completed("toolkit status digits-1120-181502") == ["digits-1120-181502-tcy3"]
    assert len(completed("toolkit wait ")) == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script_that_it_can_read(shell: str) -> None:
    argv = [str(TOOLKIT), "completion", shell]
    script = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "_TOOLKIT_COMPLETE" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_the_manual_page_describes_every_command_and_formats_without_a_warning() -> None:
    page = subprocess.run([TOOLKIT, "man"], capture_output=True, text=True, check=True).stdout
    assert page.startswith(f'.TH TOOLKIT 1 "" "torch-deploy-toolkit {toolkit.__version__}"\n')
    described = [line.split()[2] for line in page.splitlines() if line.startswith(".SS toolkit ")]
    assert described == cli.list_commands(click.Context(cli))
    if shutil.which("groff"):
        argv = ["groff", "-man", "-Tutf8", "-ww", "-z"]
        done = subprocess.run(argv, input=page, capture_output=True, text=True, check=True)
        assert done.stderr == ""
