"""Versions: of what people write, and of what runs write, each with a refusal of one line."""

from pathlib import Path

import pytest

import toolkit
from toolkit.errors import ProfileError, SpecError

JOB = "name: a\nmodule: m\n"


def refusal(path: Path, text: str) -> str:
    """Write a job file or a profile, and return why it is refused."""
    path.write_text(text)
    with pytest.raises((SpecError, ProfileError)) as caught:
        toolkit.load(path) if "name:" in text else toolkit.load_profile(str(path))
    return str(caught.value)


NEWER = "is newer than 1, which this toolkit reads; upgrade the toolkit"


def test_version_1_is_the_default_and_is_not_stored(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"version: 1\n{JOB}")
    (tmp_path / "b.yaml").write_text(JOB)
    jobs = [toolkit.load(tmp_path / name) for name in ("a.yaml", "b.yaml")]
    assert jobs[0] == jobs[1]
    # As toolkits have written it that did not know the key.
    assert jobs[0].as_written() == {"name": "a", "module": "m"}
    (tmp_path / "site.yaml").write_text("kind: local\nversion: 1\n")
    profile = toolkit.load_profile(str(tmp_path / "site.yaml"))
    assert toolkit.plan(jobs[0], profile).recorded(profile) == {
        "name": "site",
        "node": {"gpus": None, "cpus": None, "memory": None},
        "env": {},
        "kind": "local",
        "runs_dir": "runs",
    }


@pytest.mark.parametrize("kind", ["local", "slurm", "kubernetes", "pbs"])
def test_a_newer_file_is_refused_for_its_version_alone(tmp_path: Path, kind: str) -> None:
    """Its other keys may mean anything: nothing is said of them."""
    path = tmp_path / "x.yaml"
    assert refusal(path, f"{JOB}version: 2\nnew: 1\n") == f"{path}:3: version: 2 {NEWER}"
    assert refusal(path, f"kind: {kind}\nversion: 31\nnew: 1\n") == f"{path}:2: version: 31 {NEWER}"


def test_a_newer_version_on_the_command_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(JOB)
    with pytest.raises(SpecError) as caught:
        toolkit.load(tmp_path / "a.yaml", ["version=2"])
    assert str(caught.value) == f"--set version=2: version: 2 {NEWER}"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("0", "there is no version 0; write 1, or leave the key out"),
        ("-1", "there is no version -1; write 1, or leave the key out"),
        ("true", "must be a whole number, not true"),
        ('"1"', "must be a whole number, not '1'"),
        ("1.5", "must be a whole number, not 1.5"),
    ],
)
def test_what_is_no_version_is_refused(tmp_path: Path, value: str, reason: str) -> None:
    path = tmp_path / "x.yaml"
    assert refusal(path, f"{JOB}version: {value}\n") == f"{path}:3: version: {reason}"
    assert refusal(path, f"kind: local\nversion: {value}\n") == f"{path}:2: version: {reason}"
