"""The file that any training script can copy: what it records is understood by the launcher."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import toolkit
from tests.conftest import ROOT
from tests.support.record_schemas import faults_of
from toolkit.runs.records.run_directory import read_metrics
from train.telemetry import Telemetry

SCRIPT = """
import os, sys, time
from telemetry import Telemetry
telemetry = Telemetry()
time.sleep(0.2)
telemetry.ready()
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
for step in range(6 if again else 1, 11):
    time.sleep(0.05)
    telemetry.step(step, loss=1 / step)
    if step == 5:
        with telemetry.during("checkpoint"):
            time.sleep(0.3)
    if step == 8 and not again and os.environ["RANK"] == "0":  # which records the steps
        sys.exit(1)
with telemetry.during("evaluation"):
    time.sleep(0.4)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script of somebody else's, and the copied file."""
    shutil.copy(ROOT / "train/telemetry.py", tmp_path)
    (tmp_path / "theirs.py").write_text(SCRIPT)
    return tmp_path


def test_a_script_that_copies_the_file_has_steps_and_all_buckets_of_goodput(folder: Path) -> None:
    content = {"name": "theirs", "script": str(folder / "theirs.py"), "retries": {"in_job": 1}}
    job = toolkit.JobSpec.model_validate({**content, "resources": {"nproc_per_node": 2}})
    run = toolkit.submit(job, to=toolkit.LocalProfile(name="here", runs_dir=str(folder / "runs")))
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED
    assert run.run_dir is not None
    rows = read_metrics(run.run_dir)
    assert [(row["step"], row["loss"]) for row in rows] == [(n, 1 / n) for n in range(1, 11)]
    assert faults_of(run.run_dir) == []
    goodput = run.goodput()
    assert (goodput.steps, goodput.steps_again, goodput.starts, goodput.ranks) == (10, 3, 2, 2)
    seconds = goodput.seconds
    # What a busy machine takes between two steps counts, too.
    assert seconds["productive"] >= 0.9 * sum(row["seconds"] for row in rows)
    assert seconds["evaluation"] >= 0.4 and seconds["checkpoint"] >= 0.3
    assert seconds["setup"] >= 0.2 and seconds["start"] > 0 and seconds["lost work"] > 0
    assert sum(seconds.values()) == pytest.approx(goodput.elapsed_s)


@pytest.mark.parametrize("environ", [{}, {"TRAIN_RUN_DIR": "{here}", "RANK": "1"}])
def test_without_a_run_directory_and_on_other_ranks_nothing_is_written(
    environ: dict[str, str], folder: Path
) -> None:
    (folder / "run").mkdir()
    given = {name: text.format(here=folder / "run") for name, text in environ.items()}
    kept = {key: text for key, text in os.environ.items() if not key.startswith("TRAIN_")}
    environ = {**kept, "TORCHELASTIC_RESTART_COUNT": "0", **given}
    subprocess.run([sys.executable, "theirs.py"], cwd=folder, env={**environ}, check=False)
    assert not list((folder / "run").iterdir())
    assert not list(folder.glob("*.jsonl"))


def test_a_record_stands_for_the_steps_of_a_second_where_the_file_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAIN_RUN_DIR", str(tmp_path))
    path = tmp_path / "metrics.jsonl"
    path.touch()
    os.truncate(path, (200 << 20) - 1)
    with path.open("a") as file:
        file.write("\n")
    telemetry = Telemetry()
    for step in range(1, 1001):
        telemetry.step(step, loss=1 / step)
    rows = [json.loads(line) for line in path.read_bytes().lstrip(b"\0\n").splitlines()]
    assert 2 <= len(rows) + 1 < 1000 and (rows[0]["step"], "count" in rows[0]) == (1, False)
    assert sum(row.get("count", 1) for row in rows) == rows[-1]["step"]
    assert rows[0].keys() >= {"loss", "seconds"}


def test_a_loss_that_json_cannot_hold_is_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAIN_RUN_DIR", str(tmp_path))
    telemetry = Telemetry()
    telemetry.ready()
    telemetry.step(1, loss=float("nan"), accuracy=0.5)
    telemetry.step(2, loss=float("-inf"))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [record["loss"] for record in records] == [None, None]
    assert records[0]["accuracy"] == 0.5


def test_figures_may_be_tensors_and_numbers_of_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAIN_RUN_DIR", str(tmp_path))
    telemetry = Telemetry()
    telemetry.step(1, loss=torch.tensor(0.5), accuracy=numpy.float32(0.25))  # type: ignore[arg-type]
    telemetry.step(2, loss=torch.tensor(float("nan")))  # type: ignore[arg-type]
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["loss"], first["accuracy"], second["loss"]) == (0.5, 0.25, None)


def test_an_evaluation_is_told_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody takes the run for stalled meanwhile."""
    monkeypatch.setenv("TRAIN_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TRAIN_ATTEMPT", "2")
    telemetry = Telemetry()
    telemetry.step(7, loss=0.5)
    with telemetry.during("evaluation"):
        events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [event["event"] for event in events] == ["start", "evaluation"]
        assert (events[1]["step"], events[1]["attempt"]) == (7, 2)


def test_a_line_that_a_kill_has_cut_off_costs_no_record_of_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAIN_RUN_DIR", str(tmp_path))
    for name in ("events", "metrics"):
        (tmp_path / f"{name}.jsonl").write_text('{"version": 1, "st')
    Telemetry().step(1, loss=0.5)
    for name in ("events", "metrics"):
        torn, whole = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert torn.endswith('"st') and json.loads(whole)["version"] == 1
