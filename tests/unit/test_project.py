"""`toolkit new`: what it writes, and that it overwrites nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT
from toolkit import project
from toolkit.cli import cli
from toolkit.errors import InputError


def new(*argv: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([TOOLKIT, "new", *argv], capture_output=True, text=True, check=False)


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_a_new_project_has_what_the_page_lists(tmp_path: Path) -> None:
    done = new(tmp_path / "mine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"next: cd {tmp_path}/mine && toolkit run job.yaml"
    base = {str(path.relative_to(ROOT)) for path in (ROOT / "k8s/base").rglob("*.yaml")}
    own = {"job.yaml", "train.py", "Makefile", "README.md", ".gitignore"}
    profiles = {"slurm/profiles/slurm.yaml", "k8s/profiles/k8s.yaml"}
    assert set(contents(tmp_path / "mine")) == own | profiles | base


def test_the_command_that_follows_works_for_a_folder_that_looks_like_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert new("--", "-dash").stdout.splitlines()[-1].startswith("next: cd ./-dash && ")


SITES = ("local", "slurm", "k8s")
MEANT = [
    (example, site)
    for example in (None, *project.examples())
    for site in (("slurm",) if example == "sweep" else SITES)  # elsewhere it needs a queue
]


@pytest.mark.parametrize(("example", "site"), MEANT)
def test_every_project_can_be_planned_for_every_site_it_is_meant_for(
    example: str | None, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write_project(tmp_path / "My Model_2", example=example)
    monkeypatch.chdir(tmp_path / "My Model_2")
    job, profile = toolkit.load("job.yaml"), toolkit.load_profile(site)
    if site != "local":
        folder = {"slurm": "slurm", "k8s": "k8s"}[site]
        assert profile == toolkit.load_profile(f"{folder}/profiles/{site}.yaml")
        assert toolkit.check("job.yaml", to=[site]) == []
    assert job.name == (example or "my-model-2")
    assert toolkit.render(toolkit.plan(job, profile))


@pytest.mark.parametrize("there", ["notes.txt", ".git/config", "job.yaml"])
def test_a_folder_that_holds_anything_is_refused_and_nothing_is_lost(
    there: str, tmp_path: Path
) -> None:
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("mine")
    done = new(tmp_path)
    message = f"{tmp_path}: is not empty; name a new folder\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    assert contents(tmp_path) == {there: "mine"}


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    done = subprocess.run([TOOLKIT, "new", "."], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0
    assert (tmp_path / "job.yaml").is_file()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")
    done = new(tmp_path / "mine")
    message = f"{tmp_path}/mine: exists already; name a new folder\n"
    assert (done.returncode, done.stderr) == (2, message)
    assert (tmp_path / "mine").read_text() == "text"


def test_a_place_that_cannot_be_written_is_named() -> None:
    done = new("/proc/mine")
    assert (done.returncode, done.stderr.partition(": ")[0]) == (2, "/proc/mine")


def test_an_unknown_example_gets_the_nearest_and_writes_nothing(tmp_path: Path) -> None:
    done = new(tmp_path / "mine", "--example", "digit")
    message = "no example 'digit'; did you mean 'digits'?\n"
    assert (done.returncode, done.stderr) == (2, message)
    assert not (tmp_path / "mine").exists()


def test_the_help_names_every_example() -> None:
    command = cli.get_command(click.Context(cli), "new")
    assert command is not None
    (option,) = (p for p in command.params if isinstance(p, click.Option))
    assert set(re.findall(r"[a-z-]+", option.help or "")) >= set(project.examples())


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("gpt", "gpt"),
        ("2026-gpt", "gpt"),
        ("Ünïcode", "unicode"),
        ("Straße 7", "stra-e-7"),
        ("a" * 31 + "-b", "a" * 31),
        ("42", "training"),
        ("null", "null"),
        ("no", "no"),
    ],
)
def test_the_name_of_the_job_is_that_of_the_folder_as_far_as_it_can_be(
    folder: str, name: str, tmp_path: Path
) -> None:
    project.write_project(tmp_path / folder)
    assert toolkit.load(tmp_path / folder / "job.yaml").name == name


def test_a_project_without_a_place_is_an_error_in_python_too(tmp_path: Path) -> None:
    project.write_project(tmp_path / "mine")
    with pytest.raises(InputError, match="is not empty"):
        project.write_project(tmp_path / "mine")


def test_the_script_to_start_from_is_short_and_needs_torch_only() -> None:
    script = (ROOT / "templates/project/train.py").read_text()
    assert len([line for line in script.splitlines() if line]) <= 60
    imported = set(re.findall(r"^(?:import|from) (\w+)", script, re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"torch"}


def test_the_makefile_of_a_project_calls_commands_that_exist(tmp_path: Path) -> None:
    project.write_project(tmp_path / "mine")
    makefile = (tmp_path / "mine/Makefile").read_text()
    targets = re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE)
    assert targets == ["run", "check", "submit-slurm", "submit-k8s"]
    for target in targets:
        argv = ["make", "--no-print-directory", "-n", target]  # `make test` may have called us
        line = subprocess.run(argv, cwd=tmp_path / "mine", capture_output=True, text=True).stdout
        name, *words = line.split()[1:]
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        with click.Context(command) as context:
            command.parse_args(context, words)
    environ = {**os.environ, "PATH": f"{TOOLKIT.parent}:{os.environ['PATH']}"}
    argv = ["make", "--no-print-directory", "-s", "check"]
    done = subprocess.run(argv, cwd=tmp_path / "mine", env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
