"""The same bytes on any number of ranks, and the metrics that the training itself has reported."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.train.inference.conftest import STEPS, Predict
from train.rundir.console import Console
from train.rundir.files import RunDirectory, read_lines
from train.rundir.lock import Contender
from train.runtime.rank import RankInfo

# 360 samples are 51 batches of 7 and one of 3: no number of ranks divides them.
UNEVEN = "--eval-batch=7"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def reported(run_dir: Path, step: int) -> dict[str, float]:
    """The metrics that the training itself has found after a step."""
    (event,) = (
        e
        for e in read_lines(run_dir / "events.jsonl")
        if e["event"] == "epoch" and e["step"] == step
    )
    return {name: value for name, value in event.items() if name.startswith("test_")}  # type: ignore[misc]


def test_predictions_are_the_same_bytes_on_any_ranks_and_in_layouts_with_the_same_arithmetic(
    using: Predict, tmp_path: Path
) -> None:
    layouts: dict[str, tuple[int, list[str]]] = {
        "alone": (1, []),
        "ddp": (2, ["--strategy=ddp"]),
        "four": (4, []),
        "fsdp": (2, ["--strategy=fsdp"]),
        # Of a batch of training that such stages could not share.
        "pp": (2, ["--pp=2", "--global-batch=9"]),
    }
    for name, (ranks, flags) in layouts.items():
        ended = using(ranks, f"--predict={tmp_path / name}", UNEVEN, *flags)
        assert ended.status == 0, ended.output
        assert (tmp_path / name).read_bytes() == (tmp_path / "alone").read_bytes(), name
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*layouts, *(f"{name}.command.json" for name in layouts)]
    )
    made = rows(tmp_path / "alone")
    assert [row["index"] for row in made] == list(range(360))
    assert list(made[0]) == ["index", "prediction", "probability", "target"]


def test_tensor_parallel_predicts_the_same_but_for_rounding(using: Predict, tmp_path: Path) -> None:
    for ranks, flags in ((1, []), (2, ["--tp=2"])):
        ended = using(ranks, f"--predict={tmp_path / str(ranks)}", *flags)
        assert ended.status == 0, ended.output
    for alone, cut in zip(rows(tmp_path / "1"), rows(tmp_path / "2"), strict=True):
        assert cut == {**alone, "probability": pytest.approx(alone["probability"], rel=1e-5)}


@pytest.mark.parametrize(
    ("ranks", "flags"), [(2, ["--strategy=fsdp", "--global-batch=12"]), (3, ["--strategy=ps"])]
)
def test_an_evaluation_gives_what_the_training_has_reported(
    using: Predict, trained: Path, ranks: int, flags: list[str]
) -> None:
    ended = using(ranks, "--evaluate-only", "--json", *flags)
    assert ended.status == 0, ended.output
    found, there = json.loads(ended.output), reported(trained, STEPS[-1])
    assert (found["step"], found["samples"]) == (STEPS[-1], 360)
    # In the layout of the training, to the last bit.
    same = there if ranks == 2 else pytest.approx(there, rel=1e-6)
    assert found["metrics"] == same


def moments(folder: Path) -> dict[Path, tuple[int, int]]:
    """When each file and folder was changed; a folder also by a file that came and went."""
    paths = [folder, *folder.rglob("*")]
    return {p: (p.stat().st_mtime_ns, p.stat().st_ctime_ns) for p in paths}


def test_a_run_that_goes_on_is_neither_superseded_nor_changed(
    using: Predict, trained: Path, tmp_path: Path
) -> None:
    directory = RunDirectory(trained, RankInfo())
    contender = Contender(trained / "holder.json", directory.rank_info, Console(rank=1))
    while (verdict := contender.look(ended=None)) == "wait":
        pass
    assert verdict == "mine" and contender.hold is not None
    contender.hold._ended.set()
    before = moments(trained)
    for flags in (["--evaluate-only"], [f"--predict={tmp_path / 'file'}"]):
        ended = using(2, *flags)
        assert ended.status == 0, ended.output
    assert moments(trained) == before
    assert not contender.hold.lost()
    contender.hold.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: mounts a folder read-only")
def test_a_run_directory_may_be_read_only(using: Predict, trained: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    subprocess.run(["mount", "--bind", trained, place], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
        ended = using(2, "--evaluate-only", run_dir=place)
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
    assert ended.status == 0, ended.output


@pytest.mark.slow
def test_a_language_model_predicts_the_same_bytes_in_every_layout_that_computes_the_same(
    using: Predict, tmp_path: Path
) -> None:
    run_dir, chars = tmp_path / "run", "--task=chars"
    steps = ("--steps=4", "--global-batch=12")
    assert using(1, *steps, run_dir=run_dir, task=chars).status == 0
    layouts: dict[str, tuple[int, list[str]]] = {
        "alone": (1, []),
        "ddp": (4, []),
        "hsdp": (4, ["--strategy=hsdp"]),
        "meta": (2, ["--strategy=fsdp", "--meta-init"]),
        "pp": (2, ["--pp=2", "--pp-schedule=Interleaved1F1B"]),
        "pp x fsdp": (4, ["--pp=2", "--dp-shard=2"]),
        "manual": (1, ["--strategy=manual", "--devices=cpu,cpu"]),
        "local-sgd": (2, ["--strategy=local-sgd"]),
        "exact": (2, ["--reduce=exact"]),
        "tp": (2, ["--tp=2"]),
        "cp": (2, ["--cp=2"]),
        "ulysses": (2, ["--cp=2", "--cp-method=ulysses"]),
        "tp x pp": (4, ["--tp=2", "--pp=2"]),
        "cp x pp": (4, ["--cp=2", "--pp=2"]),
    }
    for name, (ranks, flags) in layouts.items():
        file = tmp_path / f"{name}.jsonl"
        ended = using(ranks, f"--predict={file}", UNEVEN, *flags, run_dir=run_dir, task=chars)
        assert ended.status == 0, ended.output
        if "tp" not in name and "cp" not in name and name != "ulysses":
            assert file.read_bytes() == (tmp_path / "alone.jsonl").read_bytes(), name
            continue
        for alone, cut in zip(rows(tmp_path / "alone.jsonl"), rows(file), strict=True):
            assert cut["target"] == alone["target"]
            assert cut["loss"] == pytest.approx(alone["loss"], rel=1e-5)
