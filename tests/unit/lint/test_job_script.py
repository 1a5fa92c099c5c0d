"""What `check` tells of the script that a job starts."""

from pathlib import Path

import pytest

import toolkit
from toolkit.checks import check

HERE = toolkit.LocalProfile(name="here")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.yaml"
    file.write_text("name: probe\nscript: train.py\nimage: r.io/t:1\n")
    return file


def test_a_missing_script_is_told_where_the_job_runs_on_this_machine(job: Path) -> None:
    (found,) = check(job, to=[HERE])
    assert (found.line, found.rule) == (2, "script-missing")
    assert found.message.startswith("script: no file 'train.py' in ")
    assert check(job, to=[toolkit.KubernetesProfile(name="k8s")]) == check(job) == []


def test_a_script_beside_the_job_file_is_found(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.parent / "train.py").write_text("print()\n")
    (job.parent / "other").mkdir()
    monkeypatch.chdir(job.parent / "other")
    assert check(job, to=[HERE]) == []


def test_a_script_that_is_no_python_is_told(job: Path) -> None:
    (job.parent / "train.py").write_text("import os\nprint(\n")
    for profile in (HERE, toolkit.KubernetesProfile(name="k8s")):
        (found,) = check(job, to=[profile])
        assert found.file.endswith("train.py") and found.line == 2
        assert "was never closed" in found.message


def test_a_script_of_another_language_is_not_read(job: Path) -> None:
    job.write_text("name: probe\nscript: train.sh\n")
    (job.parent / "train.sh").write_text("print(\n")
    assert check(job, to=[HERE]) == []
