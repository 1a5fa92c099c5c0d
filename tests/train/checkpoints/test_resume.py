"""A run that was stopped, killed or damaged ends as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.ports import free_port
from tests.train.support.reading import same, whole

if TYPE_CHECKING:
    from tests.train.conftest import Running, Start

LAST = "checkpoints/attempt-{}/step-00000060"


def weights(run: Running) -> bytes:
    exported: bytes = (run.log.parent / "weights.st").read_bytes()
    return exported


def assert_same_end(run: Running, attempt: int, unbroken: Running) -> None:
    """Weights, optimizer state and the loss of every single step: the same bits."""
    assert weights(run) == weights(unbroken)
    mine, reference = (
        whole(r.run_dir / LAST.format(a)) for r, a in ((run, attempt), (unbroken, 0))
    )
    assert same(mine, reference)
    assert run.losses() == unbroken.losses()
    assert run.outcome()["status"] == "done"


def test_sigterm_then_resume_is_bit_exact(
    start: Start, unbroken: Running, flags: tuple[str, ...], tmp_path: Path
) -> None:
    first = start.held(3, *flags, after=15, rank=0, run_dir=tmp_path / "run")
    first.wait_until_held(15, saved=12)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() != 0
    stopped = first.outcome()
    assert stopped["status"] == "preempted"
    assert 15 <= stopped["step"] < 60
    assert stopped["samples_seen"] == 12 * stopped["step"]
    assert not (tmp_path / "weights.st").exists()
    second = start.whole(3, *flags, run_dir=tmp_path / "run", attempt=1)
    (resumed,) = [e for e in second.events() if e["event"] == "resume"]
    assert resumed["step"] == stopped["step"]
    assert [m["step"] for m in second.metrics() if "loss" in m] == list(range(1, 61))
    assert_same_end(second, 1, unbroken)


@pytest.mark.slow
def test_sigkill_of_a_rank_then_restart_is_bit_exact(
    start: Start, unbroken: Running, flags: tuple[str, ...], tmp_path: Path
) -> None:
    again = ("--standalone", "--max-restarts=1")
    run = start.held(3, *flags, after=27, rank=1, run_dir=tmp_path / "run", torchrun=again)
    run.wait_until_held(27, saved=24)
    os.kill(run.workers()[1], signal.SIGKILL)
    run.finish()
    assert run.outcome()["restart"] == 1
    (resumed,) = [e for e in run.events() if e["event"] == "resume"]
    assert resumed["step"] in range(24, 60, 12)
    assert_same_end(run, 0, unbroken)


def go_back(run_dir: Path, copy: Path, *, step: int) -> Path:
    """Copy a run directory as it was right after an earlier checkpoint."""
    shutil.copytree(run_dir, copy)
    (copy / "outcome.json").unlink()
    for path in copy.glob("checkpoints/attempt-*/step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return copy


@pytest.mark.slow
def test_wrong_form_without_warm_up_differs(
    start: Start, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """The proof above has teeth: DDP as it is on the first steps does not end in the same bits."""
    script = tmp_path / "cold.py"
    script.write_text(
        "from train.__main__ import enter\n"
        "from train.parallel.ddp import DataParallel\n"
        "DataParallel.warm_up = lambda self, batch: None\n"
        "enter()\n"
    )
    common = (*flags, "--steps=6", "--checkpoint-every=3")
    whole = start.ranks(3, *common, run_dir=tmp_path / "whole", module=("cold.py",)).finish()
    unbroken_weights = weights(whole)
    run_dir = go_back(whole.run_dir, tmp_path / "broken", step=3)
    resumed = start.ranks(3, *common, run_dir=run_dir, module=("cold.py",)).finish()
    assert [e["step"] for e in resumed.events() if e["event"] == "resume"] == [3]
    assert weights(resumed) != unbroken_weights


@pytest.mark.slow
def test_resume_on_fewer_ranks_takes_the_next_samples(
    start: Start, unbroken: Running, flags: tuple[str, ...], tmp_path: Path
) -> None:
    run_dir = go_back(unbroken.run_dir, tmp_path / "run", step=48)
    run = start.single(*flags, run_dir=run_dir, attempt=1).finish()
    again = [m for m in run.metrics() if m["attempt"] == 1 and "loss" in m]
    assert [m["step"] for m in again] == list(range(49, 61))
    assert [m["samples_seen"] for m in again] == [12 * step for step in range(49, 61)]
    # Sums are added in another order now, so the last bits differ, and nothing else.
    for m in again:
        assert m["loss"] == pytest.approx(unbroken.losses()[m["step"]], rel=1e-4)


@pytest.mark.slow
def test_it_is_said_when_no_checkpoint_is_whole(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    start.single("--steps=2", run_dir=run_dir).finish()
    (run_dir / "checkpoints/attempt-0/step-00000002/state.json").write_text("{")
    again = start.single("--steps=3", run_dir=run_dir).finish()
    assert "no whole checkpoint is left: starting from the first step\n" in again.output()


@pytest.mark.slow
def test_another_configuration_is_told_where_it_is_allowed(start: Start, tmp_path: Path) -> None:
    start.single("--steps=2", run_dir=tmp_path / "run").finish()
    again = start.single("--steps=3", "--precision=bf16", run_dir=tmp_path / "run").finish()
    assert "with another configuration: precision: 'fp32' there, 'bf16' here\n" in again.output()


@pytest.mark.slow
def test_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    start: Start, tmp_path: Path
) -> None:
    flags = ("--task=chars", "--global-batch=12", "--checkpoint-every=10")
    run_dir = tmp_path / "run"
    start.single(*flags, "--steps=20", run_dir=run_dir).finish()
    model = run_dir / "checkpoints/attempt-0/step-00000020/rank-00000.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    second = start.single(*flags, "--steps=30", run_dir=run_dir).finish()
    (skipped,) = [e for e in second.events() if e["event"] == "checkpoint_skipped"]
    assert skipped["step"] == 20
    assert skipped["reason"] == f"{model}: SHA-256 differs from the manifest"
    (resumed,) = [e for e in second.events() if e["event"] == "resume"]
    assert resumed["step"] == 10
    # It has been written again on the way, and the older ones are gone.
    kept = sorted(p.name for p in (run_dir / "checkpoints/attempt-0").iterdir())
    assert kept == ["step-00000020", "step-00000030"]


def two_nodes(
    start: Start, *flags: str, run_dirs: tuple[Path, Path], attempt: int = 0
) -> tuple[Running, Running]:
    """Start two nodes of one rank each, with a run directory of their own."""
    port = free_port()
    first, second = (
        start.ranks(
            1,
            *flags,
            run_dir=run_dir,
            attempt=attempt,
            torchrun=(
                "--nnodes=2",
                f"--node-rank={rank}",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
            ),
        )
        for rank, run_dir in enumerate(run_dirs)
    )
    return first, second


@pytest.mark.slow
def test_nodes_without_a_shared_directory_resume_from_the_one_that_has_it(
    start: Start, tmp_path: Path
) -> None:
    """The checkpoint is on the new node 1; node 0 has none."""
    common = ("--task=chars", "--global-batch=12", "--checkpoint-every=15", "--steps=30")
    reference = start.ranks(2, *common, run_dir=tmp_path / "reference").finish()
    go_back(reference.run_dir, tmp_path / "old", step=15)
    nodes = two_nodes(start, *common, run_dirs=(tmp_path / "new", tmp_path / "old"), attempt=1)
    for node in nodes:
        node.finish()
    (resumed,) = [e for e in nodes[0].events() if e["event"] == "resume"]
    assert (resumed["step"], resumed["read_by"]) == (15, 1)
    assert sorted(nodes[0].losses()) == list(range(16, 31))
    final = "checkpoints/attempt-{}/step-00000030"
    assert same(
        whole(tmp_path / "new" / final.format(1)), whole(reference.run_dir / final.format(0))
    )
    assert not (tmp_path / "old" / final.format(1)).exists()


@pytest.mark.slow
def test_another_runs_checkpoint_on_another_node_is_refused_and_left_alone(
    start: Start, tmp_path: Path
) -> None:
    """Node 1's own disk holds another run at the same path; node 0 has nothing."""
    common = ("--task=chars", "--global-batch=12", "--steps=9")
    new, old = tmp_path / "new", tmp_path / "old"
    other = start.single(*common, "--seed=7", run_dir=old).finish()
    before = other.contents()
    nodes = two_nodes(start, *common, "--seed=0", run_dirs=(new, old))
    for node in nodes:
        node.finish(1)
        assert node.output().count("exitcode  : 2") == 1
    assert (
        nodes[0]
        .output()
        .startswith(
            f"train: {new} holds checkpoints of another configuration: remove them, or use "
            "another --run-dir, or the values recorded there:\n"
            f"  rank 1 on {socket.gethostname()}: {old}/checkpoints/attempt-0/step-00000009\n"
            "    seed: 7 there, 0 here\n"
        )
    )
    assert not new.exists()
    assert other.contents() == before
