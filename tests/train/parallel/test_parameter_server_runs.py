"""A parameter server under torchrun: stopped, and with a rank killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import with_environment
from tests.train.conftest import UNHURRIED
from tests.train.support.reading import same, whole

if TYPE_CHECKING:
    from tests.train.conftest import Start

RANKS = 4
TRAINERS = RANKS - 1
FLAGS = ("--strategy=ps", "--task=digits", "--global-batch=12", "--seed=3")
ENDLESS = ("--steps=100000", "--checkpoint-every=20")


@pytest.mark.slow
def test_a_signal_to_a_trainer_stops_all_ranks_with_nothing_on_its_way(
    start: Start, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--ps-mode=async", *ENDLESS)
    run = start.ranks(RANKS, *flags, run_dir=tmp_path / "run")
    run.wait_for_step(30)
    os.kill(run.workers()[2], signal.SIGUSR1)
    run.finish(1)
    assert run.output().count("exitcode  : 75") == RANKS
    outcome = run.outcome()
    assert outcome["status"] == "preempted"
    assert outcome["step"] == max(run.losses()) == len(run.losses())
    assert outcome["samples_seen"] == outcome["step"] * 12
    checkpoint = tmp_path / f"run/checkpoints/attempt-0/step-{outcome['step']:08d}"
    assert whole(checkpoint)
    # And goes on, to the end.
    more = ("--ps-mode=bounded", f"--steps={outcome['step'] + 5}")
    again = start.ranks(RANKS, *FLAGS, *more, run_dir=tmp_path / "run", attempt=1).finish()
    assert again.outcome()["step"] == outcome["step"] + 5
    assert "updates old in the mean, at most " in again.output()
    assert with_environment(str(tmp_path)) == set()


@pytest.mark.slow
def test_a_killed_trainer_costs_a_restart_and_changes_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "from train.__main__ import enter\n"
        "from train.parallel.parameter_server import wire\n"
        "push = wire.push\n"
        "def die_or_push(gradient):\n"
        "    first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "    if first and os.environ['RANK'] == '1' and gradient.ticket.update == 44:\n"
        "        saved = Path('run/checkpoints/attempt-0/step-00000040')\n"
        "        while not saved.exists():\n"
        "            time.sleep(0.01)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    push(gradient)\n"
        "wire.push = die_or_push\n"
        "enter()\n"
    )
    flags = (*FLAGS, "--steps=120", "--checkpoint-every=20")
    run = start.ranks(
        RANKS,
        *flags,
        run_dir=tmp_path / "run",
        torchrun=("--standalone", "--max-restarts=1"),
        module=("dying.py",),
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT=UNHURRIED,
    ).finish()
    assert run.outcome()["restart"] == 1
    assert [e["step"] for e in run.events() if e["event"] == "resume"] == [40]
    (failed,) = [event for event in run.events() if event["event"] == "error"]
    assert failed["status"] == "retryable"
    # The server notices, or all ranks that wait for it at the barrier before a checkpoint.
    said = ("rank 1, a trainer, is gone: ", "another rank went away ")
    assert failed["reason"].startswith(said)
    unbroken = start.ranks(RANKS, *flags, run_dir=tmp_path / "unbroken").finish()
    assert run.losses() == unbroken.losses()
    last = "checkpoints/attempt-0/step-00000120"
    assert same(whole(run.run_dir / last), whole(unbroken.run_dir / last))


@pytest.mark.slow
def test_a_killed_server_ends_its_trainers(start: Start, tmp_path: Path) -> None:
    run = start.ranks(RANKS, *FLAGS, "--ps-mode=async", *ENDLESS, run_dir=tmp_path / "run")
    run.wait_for_step(5)
    os.kill(run.workers()[0], signal.SIGKILL)
    run.finish(1)
    # One rank reports it for all in a line, not in a traceback; torchrun's report has each.
    said = (": ends because of others: ", ": another rank went away ")
    assert sum(map(run.output().count, said)) == TRAINERS + 1, run.output()
    assert "train/session.py" not in run.output()
    assert with_environment(str(tmp_path)) == set()


SLOW = """
import time

from train.tasks.digits import Digits


class Slow(Digits):
    def score(self, outputs, targets):
        time.sleep(0.5)
        return super().score(outputs, targets)

    def test(self):
        return super().test().part(0, 30)
"""


def test_an_evaluation_may_take_longer_than_trainers_wait(start: Start, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SLOW)
    flags = ("--task=t.py:Slow", "--strategy=ps", "--steps=2", "--eval-batch=2", "--timeout-s=5")
    start.whole(2, *flags, run_dir=tmp_path / "run")
