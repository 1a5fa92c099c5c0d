"""After every kind of stop or kill, the run can continue."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from train.checkpoints.store import verify

if TYPE_CHECKING:
    from tests.train.conftest import Running, Start

FLAGS = ("--task=chars", "--global-batch=12")
ENDLESS = (*FLAGS, "--steps=100000")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGQUIT"])
def test_every_stop_signal_means_checkpoint_and_status_75(
    start: Start, tmp_path: Path, name: str
) -> None:
    run = start.single(*ENDLESS, "--checkpoint-every=0", run_dir=tmp_path / "run")
    run.wait_for_step(3)
    for _ in range(3):
        run.process.send_signal(signal.Signals[name])
    run.finish(75)
    outcome = run.outcome()
    assert (outcome["status"], outcome["reason"]) == ("preempted", f"stopped by {name}")
    verify(tmp_path / f"run/checkpoints/attempt-0/step-{outcome['step']:08d}")
    # An epoch may end before the signal comes.
    assert [e["event"] for e in run.events() if e["event"] != "epoch"] == [
        "start",
        "environment",
        "ready",
        "stop_requested",
        "checkpoint",
        "stopped",
    ]


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_ranks_at_the_same_step(
    start: Start, tmp_path: Path
) -> None:
    run = start.ranks(3, *ENDLESS, run_dir=tmp_path / "run")
    run.wait_for_step(3)
    os.kill(run.workers()[2], signal.SIGUSR1)
    assert run.wait() == 1
    (asked,) = [e for e in run.events() if e["event"] == "stop_requested"]
    assert (asked["ranks_signalled"], asked["signal"]) == (1, None)
    assert run.outcome()["status"] == "preempted"
    assert run.outcome()["step"] == asked["step"] == max(run.losses())
    # torchrun's summary: every rank left with 75, none was killed or failed.
    assert run.output().count("exitcode  : 75") == 3


@pytest.mark.slow
def test_processes_that_read_ahead_leave_the_stop_to_their_rank(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from train.tasks.digits import Digits\n"
        "class Numbered:\n"
        "    def __init__(self, batch):\n"
        "        self.batch = batch\n"
        "    def __len__(self):\n"
        "        return len(self.batch)\n"
        "    def __getitem__(self, number):\n"
        "        return self.batch.inputs[number], self.batch.targets[number]\n"
        "class Mine(Digits):\n"
        "    def train(self):\n"
        "        return Numbered(super().train())\n"
    )
    flags = ("--task=mine.py:Mine", "--steps=100000", "--global-batch=12", "--workers=2")
    run = start.ranks(2, *flags, run_dir=tmp_path / "run")
    run.wait_for_step(3)
    # torchrun sends it to all processes of each rank, as Slurm does.
    run.process.send_signal(signal.SIGTERM)
    run.finish(1)
    assert (run.outcome()["status"], run.outcome()["reason"]) == (
        "preempted",
        "stopped by SIGTERM",
    ), run.output()
    assert "DataLoader" not in run.output()


@pytest.mark.slow
def test_no_rank_leaves_before_the_outcome_says_preempted(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\n"
        "from train import __main__\n"
        "from train.rundir.files import RunDirectory\n"
        "write = RunDirectory.write_outcome\n"
        "def write_slowly(self, outcome):\n"
        "    time.sleep(2.0 if outcome.status == 'preempted' else 0.0)\n"
        "    return write(self, outcome)\n"
        "RunDirectory.write_outcome = write_slowly\n"
        "status = __main__.main()\n"
        "outcome = pathlib.Path(os.environ['TRAIN_RUN_DIR'], 'outcome.json').read_text()\n"
        "pathlib.Path('left-' + os.environ['RANK']).write_text(outcome)\n"
        "os._exit(status)\n"
    )
    run = start.ranks(2, *ENDLESS, run_dir=tmp_path / "run", module=("slow.py",))
    run.wait_for_step(3)
    os.kill(run.workers()[1], signal.SIGTERM)
    run.finish(1)
    assert run.outcome()["status"] == "preempted"
    for rank in range(2):
        assert json.loads((tmp_path / f"left-{rank}").read_text()) == run.outcome()


def test_a_signal_while_starting_ends_the_run_at_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = start.ranks(2, *ENDLESS, run_dir=tmp_path / "run")

    def importing() -> bool:
        # The stop signals are taken over, and torch is not there yet: see the signal mask.
        return len(run.workers()) == 2 and all(map(_catches_sigterm, run.workers().values()))

    run.wait_until(importing)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 1
    # Not killed by torchrun after its time-out: then this would not have been written.
    assert run.outcome()["status"] == "preempted"


def _catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGQUIT - 1) & 1)


def test_a_peer_that_never_comes_does_not_delay_a_stop(start: Start, tmp_path: Path) -> None:
    """The process waits in C++ for rank 1, where no Python signal handler can run."""
    run = start.single(
        *ENDLESS,
        run_dir=tmp_path,
        RANK="0",
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    threads = Path(f"/proc/{run.process.pid}/task")
    # The store's own thread exists: the wait for the other rank has started.
    run.wait_until(lambda: any(_comm(t).startswith("pt_tcpstore") for t in threads.iterdir()))
    run.process.send_signal(signal.SIGTERM)
    run.finish(75)
    assert run.outcome()["status"] == "preempted"


def _comm(thread: Path) -> str:
    try:
        return (thread / "comm").read_text()
    except OSError:
        return ""


def test_a_killed_rank_makes_the_run_retryable(start: Start, tmp_path: Path) -> None:
    run, other = start.each(2, *ENDLESS, run_dir=tmp_path / "run")
    run.wait_for_step(3)
    other.process.kill()
    assert run.wait() == 1
    outcome = run.outcome()
    assert (outcome["status"], outcome["rank"]) == ("retryable", 0), outcome


@pytest.mark.slow
def test_a_finished_run_started_again_changes_nothing(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = start.single(*FLAGS, "--steps=3", run_dir=run_dir).finish()
    before = run.contents()
    again = start.single(*FLAGS, "--steps=3", run_dir=run_dir, attempt=1).finish()
    assert run.contents() == before
    assert again.output().startswith("already done: step 3/3, loss ")


@pytest.mark.slow
def test_a_finished_run_exports_its_last_weights_and_changes_nothing_else(
    start: Start, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--steps=3", "--checkpoint-every=2")
    run = start.single(*flags, "--export=first.st", run_dir=tmp_path / "run").finish()
    before = run.contents()
    # A later attempt: its outcome could replace the first one's.
    again = start.ranks(2, *flags, "--export=later/w.st", run_dir=run.run_dir, attempt=1).finish()
    assert (tmp_path / "later/w.st").read_bytes() == (tmp_path / "first.st").read_bytes()
    assert again.output().startswith("already done: step 3/3, loss ")
    assert again.output().endswith("wrote its weights to later/w.st\n")
    assert run.contents() == before
    # It cannot be written.
    blocked = start.ranks(2, *flags, "--export=first.st/w", run_dir=run.run_dir, attempt=1)
    blocked.finish(1)
    assert "train: cannot export to first.st/w: " in blocked.output()
    assert blocked.output().count("exitcode  : 2") >= 1
    assert run.contents() == before


@pytest.mark.slow
def test_a_finished_run_whose_last_checkpoint_is_damaged_exports_no_older_one(
    start: Start, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--steps=3", "--checkpoint-every=2")
    run = start.single(*flags, run_dir=tmp_path / "run").finish()
    model = run.run_dir / "checkpoints/attempt-0/step-00000003/rank-00000.safetensors"
    model.write_bytes(b"x")
    before = run.contents()
    again = start.single(*flags, "--export=w.st", run_dir=run.run_dir, attempt=1).finish(2)
    complaint = again.output().partition("train: ")[2]
    assert complaint.startswith(
        f"cannot export to w.st: {run.run_dir} has no whole checkpoint of step 3; to make the last "
        f"steps again, remove {run.run_dir / 'outcome.json'} first\n  {model}: 1 bytes, not "
    )
    assert not (tmp_path / "w.st").exists()
    assert run.contents() == before
    # The way out that it names.
    (run.run_dir / "outcome.json").unlink()
    start.single(*flags, "--export=w.st", run_dir=run.run_dir, attempt=1).finish()
    assert (tmp_path / "w.st").exists()


@pytest.mark.slow
def test_a_finished_run_can_be_extended(start: Start, tmp_path: Path) -> None:
    start.single(*FLAGS, "--steps=3", run_dir=tmp_path / "run").finish()
    longer = start.single(*FLAGS, "--steps=5", run_dir=tmp_path / "run").finish()
    assert sorted(longer.losses()) == [1, 2, 3, 4, 5]
    assert longer.outcome()["step"] == 5


SLOWLY = """
import os, time
from train import session
from train.tasks.digits import Digits

session.BEFORE_FIRST_STEP_S = 0.5

class Slowly:
    def __init__(self, batch, kind):
        self.batch, self.kind = batch, kind
    def __len__(self):
        return len(self.batch)
    def __getitem__(self, number):
        if os.environ.get("SLOW") == self.kind and number > 8:
            time.sleep(1000 if self.kind == "train" else 1)
        return self.batch.inputs[number], self.batch.targets[number]

class Mine(Digits):
    def train(self):
        return Slowly(super().train(), "train")
    def test(self):
        return Slowly(super().test(), "test")
"""


@pytest.mark.parametrize("steps", [1, 2], ids=["after the last step", "between steps"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stop_ends_an_evaluation_and_the_next_start_makes_it(
    start: Start, tmp_path: Path, ranks: int, steps: int
) -> None:
    (tmp_path / "mine.py").write_text(SLOWLY)
    # An epoch is a step, and its evaluation takes minutes.
    flags = ("--task=mine.py:Mine", f"--steps={steps}", "--global-batch=1437", "--eval-batch=1")

    def run(attempt: int, slow: str) -> Running:
        if ranks == 1:
            return start.single(*flags, run_dir=tmp_path / "run", attempt=attempt, SLOW=slow)
        return start.ranks(ranks, *flags, run_dir=tmp_path / "run", attempt=attempt, SLOW=slow)

    stopped = run(0, "test")
    stopped.wait_until(lambda: any(e["event"] == "evaluation" for e in stopped.events()))
    stopped.process.send_signal(signal.SIGTERM)
    stopped.finish(75 if ranks == 1 else 1)
    outcome = stopped.outcome()
    assert (outcome["status"], outcome["step"]) == ("preempted", 1), stopped.output()
    assert not any(e["event"] == "epoch" for e in stopped.events())
    done = run(1, "").finish()
    assert [e["step"] for e in done.events() if e["event"] == "epoch"] == [1, 2][:steps]
    assert done.outcome()["status"] == "done"


def test_a_stop_does_not_wait_long_for_the_first_step(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOWLY)
    flags = ("--task=mine.py:Mine", "--steps=2", "--global-batch=12", "--workers=0")
    run = start.single(*flags, run_dir=tmp_path / "run", SLOW="train")
    # The first batch is read before the checkpoint, if there is one.
    run.wait_until(lambda: any(e["event"] == "environment" for e in run.events()))
    run.process.send_signal(signal.SIGTERM)
    run.finish(75)
    outcome = run.outcome()
    assert (outcome["status"], outcome["reason"]) == ("preempted", "stopped by SIGTERM")


def test_a_hangup_that_nohup_ignores_does_not_stop_a_run(start: Start, tmp_path: Path) -> None:
    argv = ["nohup", sys.executable, "-m", "train", "--task=digits", "--steps=100000"]
    run = start.command([*argv, "--no-verify"], tmp_path / "run", 0, {})
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGHUP)
    run.wait_for_step(run.metrics()[-1]["step"] + 3)
    run.process.send_signal(signal.SIGTERM)
    run.finish(75)
    assert run.outcome()["reason"] == "stopped by SIGTERM"
