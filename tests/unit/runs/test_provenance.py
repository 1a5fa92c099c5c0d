"""What a run was made from, as it is recorded and shown."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit import __version__
from toolkit.runs.records import provenance, registry
from toolkit.runs.records.registry import RunRecord


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("lr = 1\n")
    for words in (
        ("init", "--quiet", "--initial-branch=lab"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@b.invalid", "commit", "--quiet", "-m", "first"),
    ):
        subprocess.run(["git", "-C", folder, *words], check=True)
    return folder


def test_a_clean_working_tree_is_its_commit(project: Path) -> None:
    made = provenance.collect(project)
    head = subprocess.run(
        ["git", "-C", project, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    )
    assert made["git"] == {"commit": head.stdout.strip(), "branch": "lab", "dirty": False}
    assert made["toolkit"] == __version__
    assert made["python"] == ".".join(map(str, sys.version_info[:3]))


def test_changes_are_kept_as_a_diff_without_secrets(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    (project / "train.py").write_text("lr = 2\nkey = '0123456789abcdef0123'\n")
    git = provenance.collect(project)["git"]
    assert git["dirty"]
    assert "-lr = 1" in git["diff"] and "+lr = 2" in git["diff"]
    assert "0123456789abcdef0123" not in git["diff"]


def test_a_new_file_is_a_change_without_a_diff(project: Path) -> None:
    (project / "other.py").touch()
    git = provenance.collect(project)["git"]
    assert git["dirty"] and git["diff"] == ""


def test_a_large_diff_is_left_out(project: Path) -> None:
    (project / "train.py").write_text("x" * 70_000)
    git = provenance.collect(project)["git"]
    assert git["dirty"] and "diff" not in git


def test_no_program_of_the_repository_is_run(project: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for key, value in (("diff.external", f"touch {ran}"), ("diff.t.textconv", f"touch {ran};cat")):
        subprocess.run(["git", "-C", project, "config", key, value], check=True)
    (project / ".gitattributes").write_text("*.py diff=t\n")
    (project / "train.py").write_text("lr = 3\n")
    assert "+lr = 3" in provenance.collect(project)["git"]["diff"]
    assert not ran.exists()


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_without_git_or_a_repository_nothing_is_said_of_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path:
        monkeypatch.setenv("PATH", path)
    assert "git" not in provenance.collect(tmp_path)


def test_the_list_of_runs_has_no_diffs_and_the_run_directory_has(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    git = {"commit": "c0ffee", "dirty": True, "diff": "-a\n+b\n"}
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    record = RunRecord(
        uri="local://a",
        name="a",
        job="a",
        profile={},
        created=1.0,
        run_dir=run_dir,
        provenance={"toolkit": "1", "git": git},
    )
    registry.add(record, environ=environ)
    (listed,) = registry.records(environ=environ)
    assert listed.provenance == {"toolkit": "1", "git": {"commit": "c0ffee", "dirty": True}}
    launch: Any = json.loads((run_dir / "launch.json").read_text())
    assert launch["provenance"]["git"] == git


def test_the_newest_start_s_environment_counts(tmp_path: Path) -> None:
    rows = [{"event": "environment", "torch": "1"}, {"event": "environment", "torch": "2"}, {}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{to")
    assert provenance.environment_of(tmp_path)["torch"] == "2"
    assert provenance.environment_of(tmp_path / "none") == {}
