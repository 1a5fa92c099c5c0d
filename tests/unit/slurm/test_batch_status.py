"""`toolkit list`, `cancel` and `wait` of several runs, beside a squeue that knows of them."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import toolkit
from tests.conftest import TOOLKIT
from tests.support.asked_slurm import Answer, fake_squeue, job_row
from tests.support.run_records import remember


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Run the toolkit beside a squeue that knows one running and one pending job."""
    commands = fake_squeue(tmp_path)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    profile = toolkit.SlurmProfile(name="s")
    for number, (name, job) in enumerate([("r-1", "r"), ("p-2", "p"), ("p-3", "p")], 1):
        uri = f"slurm://c/{number}"
        remember(uri, name=name, job=job, profile=profile)
    waits = job_row(2, "PENDING", start="2999-01-01T00:00:00", reason="Priority")
    (commands / "rows").write_text(job_row(1, "RUNNING") + waits + job_row(3, "COMPLETED"))
    (commands / "scancel").write_text('#!/bin/sh\n[ "$1" != 2 ] || { echo no >&2; exit 1; }\n')

    def run(*argv: str) -> Answer:
        return subprocess.run([TOOLKIT, *argv], capture_output=True, text=True, check=False)

    return run


def test_the_list_can_be_filtered(program: Callable[..., Answer]) -> None:
    def names(*argv: str) -> list[str]:
        return [row["name"] for row in json.loads(program("list", "--json", *argv).stdout)]

    assert names() == ["r-1", "p-2", "p-3"]
    assert names("--job", "p") == ["p-2", "p-3"]
    assert names("--state", "pending", "--state", "RUNNING") == ["r-1", "p-2"]
    assert names("--state", "RUNNING", "--last", "1") == ["r-1"]
    assert names("--job", "q") == []
    assert program("list", "--job", "q").stdout == (
        "no such runs; `toolkit list` shows the newest of all\n"
    )
    assert program("list", "--state", "LOST").returncode == 2
    (row,) = json.loads(program("list", "--state", "PENDING", "--json").stdout)
    assert row["expected_start"] == "2999-01-01T00:00:00"
    assert (
        row["reason"]
        == "Priority: other jobs have a higher priority; expected to start Jan 1 00:00"
    )


def test_the_list_tells_how_often_a_run_was_interrupted(
    program: Callable[..., Answer], tmp_path: Path
) -> None:
    for number in range(3):
        (tmp_path / f"run/logs/attempt-{number}").mkdir(parents=True)
    profile, run_dir = toolkit.SlurmProfile(name="s"), tmp_path / "run"
    remember("slurm://c/1", name="r-4", job="r", profile=profile, run_dir=run_dir)
    metrics = {"time": 1.0, "attempt": 0, "restart": 0, "step": 7, "loss": 0.5}
    (run_dir / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    line = program("list", "--last", "1").stdout
    head = r"slurm://c/1 +UNKNOWN +\d+ \w+ +r-4  2 restarts; step 7, loss 0.5; "
    assert re.match(head, line), line
    (row,) = json.loads(program("list", "--last", "1", "--json").stdout)
    assert row["restarts"] == {"count": 2}


def test_a_place_that_is_away_is_explained_once(
    program: Callable[..., Answer], tmp_path: Path
) -> None:
    squeue = tmp_path / "bin/squeue"
    squeue.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    lines = program("list").stdout.splitlines()
    words = [line.split() for line in lines]
    assert [(uri, state, name) for uri, state, _, _, name, *_ in words] == [
        ("slurm://c/1", "UNKNOWN", "r-1"),
        ("slurm://c/2", "UNKNOWN", "p-2"),
        ("slurm://c/3", "UNKNOWN", "p-3"),
    ]
    assert "Unable to contact slurm controller" in lines[0]
    assert [line.rpartition("  ")[2] for line in lines[1:]] == ["as above"] * 2


def test_cancel_and_wait_take_several_runs(program: Callable[..., Answer]) -> None:
    done = program("cancel", "r-1", "p-2", "p-3", "--json")
    assert done.returncode == 1  # one was refused; the others are cancelled all the same
    assert json.loads(done.stdout) == [
        {"uri": "slurm://c/1", "name": "r-1", "asked": True, "error": None},
        {
            "uri": "slurm://c/2",
            "name": "p-2",
            "asked": False,
            "error": "scancel refused slurm://c/2: no",
        },
        {"uri": "slurm://c/3", "name": "p-3", "asked": False, "error": None},
    ]
    assert program("cancel", "p-3", "nobody").returncode == 2
    waited = program("wait", "p-3", "r-1", "--timeout", "0", "--json")
    assert waited.returncode == 1
    assert "p-3: SUCCEEDED" in waited.stderr
    assert waited.stderr.endswith("not ended after 0 s: slurm://c/1\n")
    waited = program("wait", "p-3", "slurm://c/3", "--json")
    assert (waited.returncode, len(json.loads(waited.stdout))) == (0, 2)
