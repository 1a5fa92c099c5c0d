"""Whole runs: when a proof is made, what it says and records, and that it changes no bit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.costs import others_slow
from tests.train.support import proved
from tests.train.support.whole_runs import Ended, run
from train.cli.flags import parse
from train.errors import UsageError
from train.proof.session import memory_problem
from train.runtime.rank import RankInfo

if TYPE_CHECKING:
    from tests.train.conftest import Start

FILE = proved.__file__
STEPS = ("--steps", "2", "--global-batch", "8")
CUT = ("--micro-batch", "2")


def train(
    folder: Path, task: str, *flags: str, ranks: int = 1, verify: tuple[str, ...] = ()
) -> Ended:
    named = ("--task", f"{FILE}:{task}", "--run-dir", str(folder), *STEPS)
    return run(ranks, *named, *flags, environ={}, verify=verify)


def events(folder: Path, name: str) -> list[dict[str, object]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == name]


def test_a_first_start_is_proved_or_refused_and_a_later_one_goes_on(tmp_path: Path) -> None:
    refused = train(tmp_path / "a", "Normed", *CUT)
    assert refused.status == 2
    assert re.search(
        r"--strategy single \(1 rank\) would not train task '.*:Normed' as one process does: the "
        r"batch is split into 4 passes .* layer '1' \(BatchNorm1d\) .*; "
        "--no-verify trains without this proof",
        refused.output,
    )
    assert json.loads((tmp_path / "a/outcome.json").read_text())["status"] == "fatal"
    assert not (tmp_path / "a/metrics.jsonl").exists()
    accepted = train(tmp_path / "a", "Normed", *CUT, "--accept", "batch-norm")
    assert accepted.status == 0, accepted.output
    line = (
        r"proof: 3 steps of 4 samples .*, except for accepted differences "
        r"\(batch-norm\) \(\d+\.\d s\)"
    )
    assert re.search(line, accepted.output)
    record = json.loads((tmp_path / "a/proof.json").read_text())
    assert record["equal"] is True and record["accepted"] == ["batch-norm"]
    assert [event["accepted"] for event in events(tmp_path / "a", "proof")] == [["batch-norm"]]
    # A run that goes on has been proved, unless it goes on in another way.
    longer = train(tmp_path / "a", "Normed", *CUT, "--accept", "batch-norm", "--steps", "3")
    assert longer.status == 0 and "proof: " not in longer.output, longer.output
    other = train(tmp_path / "a", "Normed", "--micro-batch", "4", "--steps", "4")
    assert other.status == 2 and "the batch is split into 2 passes" in other.output, other.output


def test_a_missing_proof_is_said_and_refused_if_it_is_asked_for(tmp_path: Path) -> None:
    missing = train(tmp_path / "a", "Shuffled", *CUT)
    assert missing.status == 0
    assert "no proof before training: the model or" in missing.output
    # Also of a run that has begun without one.
    for folder in ("b", "a"):
        forced = train(tmp_path / folder, "Shuffled", *CUT, "--steps", "3", verify=("--verify",))
        assert forced.status == 2
        assert "--verify: no proof is possible: the model or the loss draws random" in forced.output
    unwanted = train(tmp_path / "c", "Normed", *CUT, "--no-verify")
    assert unwanted.status == 0 and "proof: " not in unwanted.output


def test_a_strategy_that_fails_where_one_process_trains_is_refused(tmp_path: Path) -> None:
    ended = train(tmp_path, "Forgetting", "--activation-checkpointing")
    assert ended.status == 2 and "Traceback" not in ended.output
    assert re.search(
        r"--strategy single \(1 rank\) fails with task '.*:Forgetting', which one process trains: "
        r"the forward pass at layer '1' \(Once\): ValueError: the input is gone; use another --str",
        ended.output,
    ), ended.output
    assert json.loads((tmp_path / "outcome.json").read_text())["status"] == "fatal"


def test_verify_only_trains_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    proof = train(folder, "Plain", *CUT, "--verify-only")
    assert proof.status == 0 and "equal those of one process with 2 passes" in proof.output
    assert train(folder, "Contrastive", *CUT, "--verify-only").status == 2
    whole = train(folder, "Contrastive", "--verify-only")
    assert whole.status == 0 and "one process with the whole batch" in whole.output
    assert not folder.exists()


@pytest.mark.parametrize("strategy", others_slow(["ddp", "fsdp"], "ddp"))
def test_a_run_ends_with_the_same_bits_with_a_proof_and_without(
    tmp_path: Path, strategy: str
) -> None:
    weights = []
    for word in ("--verify", "--no-verify"):
        folder, file = tmp_path / word, tmp_path / f"{word}.safetensors"
        flags = ("--strategy", strategy, "--export", str(file), word)
        ended = train(folder, "Dropped", *flags, ranks=2)
        assert ended.status == 0, ended.output
        assert ("proof: " in ended.output) is (word == "--verify")
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line).get("loss") for line in lines]
        weights.append((file.read_bytes(), losses))
    assert weights[0] == weights[1]


def test_a_proof_takes_no_more_than_half_of_the_memory() -> None:
    assert memory_problem(10**6, 10**9, ranks=4) == ""
    problem = memory_problem(7 * 10**9, 80 * 2**30, ranks=1)
    assert problem == (
        "7,000,000,000 parameters take 625.8 GiB per rank in the proof, of 80.0 GiB that a rank has"
    )


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ("--accept", "batch-norms"),
            "--accept 'batch-norms' is unknown; did you mean 'batch-norm'?; use some of "
            "batch-norm, layer-mixes-samples, loss-mixes-samples, with commas between them",
        ),
        (
            ("--verify-only", "--no-verify"),
            "--verify-only and --no-verify exclude each other: leave out one of them",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    tmp_path: Path, flags: tuple[str, ...], text: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        parse([*flags, "--run-dir", str(tmp_path)], {}, RankInfo())
    assert str(refusal.value) == text


def test_a_pipe_in_the_place_of_the_record_holds_no_start(start: Start, tmp_path: Path) -> None:
    """As others may make one in a run directory that a group can write."""
    flags, run_dir = ("--task=digits", "--micro-batch=16", "--verify"), tmp_path / "run"
    start.single(*flags, "--steps=2", run_dir=run_dir).finish()
    (run_dir / "proof.json").unlink()
    os.mkfifo(run_dir / "proof.json")
    start.single(*flags, "--steps=4", run_dir=run_dir).finish()
