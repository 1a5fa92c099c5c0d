"""A failure is reported once, with its cause, and damages nothing."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.ports import free_port
from train.checkpoints.store import verify

if TYPE_CHECKING:
    from tests.train.conftest import Start

FLAGS = ("--task=chars", "--global-batch=12")


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_the_step(
    start: Start, tmp_path: Path
) -> None:
    run = start.ranks(2, *FLAGS, "--steps=50", "--lr=1e30", run_dir=tmp_path / "run")
    assert run.wait() == 1
    outcome = run.outcome()
    assert (outcome["status"], outcome["rank"]) == ("fatal", None)
    failed_step = outcome["step"] + 1
    assert outcome["reason"].startswith(f"the loss of step {failed_step} is not finite on ")
    assert run.events()[-1]["event"] == "error"
    assert f"train: the loss of step {failed_step} is not finite" in run.output()


def test_an_exception_on_one_rank_is_recorded_with_its_rank_not_its_echo(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "faulty.py").write_text(
        "import os\n"
        "from train.__main__ import enter\n"
        "from train.tasks import chars\n"
        "class Faulty(chars.Chars):\n"
        "    calls = 0\n"
        "    def count(self, targets):\n"
        "        self.calls += 1\n"
        "        if os.environ['RANK'] == '1' and self.calls == 4:\n"
        "            raise ValueError('sample 17 is odd')\n"
        "        return super().count(targets)\n"
        "chars.Chars = Faulty\n"
        "enter()\n"
    )
    run = start.ranks(3, *FLAGS, "--steps=50", run_dir=tmp_path / "run", module=("faulty.py",))
    assert run.wait() == 1
    outcome = run.outcome()
    assert (outcome["status"], outcome["rank"]) == ("fatal", 1)
    line = "count() of task 'chars' failed "
    assert outcome["reason"].startswith(f"ValueError: sample 17 is odd; {line}")
    printed, _, report = run.output().partition(" FAILED\n")
    assert printed.count(f"train: rank 1: {line}") == 1
    # The other two have noticed at the same time, and one speaks for both.
    assert printed.count(": another rank went away ") == 1
    # torchrun's own report knows it too, and the echoes from the cause.
    echoes, _, root = report.partition("Root Cause")
    assert f"traceback : ValueError: sample 17 is odd\n  {line}" in root
    assert echoes.count("traceback : another rank went away ") == 2
    assert "error_file: <N/A>" not in report


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_recorded_whatever_each_torchrun_counts(
    start: Start, tmp_path: Path, failing: int
) -> None:
    (tmp_path / "faulty.py").write_text(
        "import os\n"
        "from train.tasks import chars\n"
        "class Faulty(chars.Chars):\n"
        "    calls = 0\n"
        "    def count(self, targets):\n"
        "        self.calls += 1\n"
        f"        if os.environ['RANK'] == '{failing}' and self.calls == 4:\n"
        "            raise ValueError('sample 17 is odd')\n"
        "        return super().count(targets)\n"
    )
    port = free_port()
    ranks = [
        start.single(
            *("--task=faulty.py:Faulty", "--global-batch=12", "--steps=50"),
            run_dir=tmp_path / "run",
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RESTART_COUNT=str(1 - rank),
            TORCHELASTIC_USE_AGENT_STORE="False",
        )
        for rank in (0, 1)
    ]
    assert [rank.wait() for rank in ranks] == [1, 1], ranks[0].output() + ranks[1].output()
    outcome = ranks[0].outcome()
    assert (outcome["status"], outcome["rank"]) == ("fatal", failing)
    assert outcome["reason"].startswith("ValueError: sample 17 is odd; ")


@pytest.mark.slow
def test_a_killed_rank_is_torchruns_root_cause_and_others_say_where_they_were(
    start: Start, tmp_path: Path
) -> None:
    run = start.ranks(3, *FLAGS, "--steps=100000", run_dir=tmp_path / "run")
    run.wait_for_step(3)
    os.kill(run.workers()[1], signal.SIGKILL)
    printed, _, report = run.finish(1).output().partition(" FAILED\n")
    said = re.findall(
        r"^train: rank [02]: another rank went away while this one was at step \d+ of 100000 "
        r"\(.*\); start again to continue from the newest checkpoint \[.*\]$",
        printed,
        re.MULTILINE,
    )
    assert len(said) == 1, run.output()
    outcome = run.outcome()
    assert outcome["status"] == "retryable"
    assert outcome["reason"].startswith("another rank went away while this one was at step ")
    assert "Signal 9 (SIGKILL)" in report.partition("Root Cause")[2]


def test_a_place_where_nobody_is_met_is_named(start: Start, tmp_path: Path) -> None:
    with socket.socket() as nobody:
        # Bound, so that no other process listens there.
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        run = start.single(
            *FLAGS,
            "--timeout-s=1",
            run_dir=tmp_path / "run",
            RANK="1",
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        ).finish(1)
    last = run.output().splitlines()[-1]
    assert last.startswith(
        "train: rank 1: ends because of others: not all ranks have met at "
        f"127.0.0.1:{port} within 1 s (--timeout-s) ["
    )


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before_it(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    start.single(*FLAGS, "--steps=2", run_dir=run_dir).finish()
    argv = [sys.executable, "-m", "train", *FLAGS, "--steps=4", "--checkpoint-every=0"]
    # A limit on the size of files ends writes as a full disk does: halfway, with an error.
    run = start.command(
        ["bash", "-c", 'ulimit -f 300; exec "$@"', "bash", *argv], run_dir, 0, {}
    ).finish(1)
    checkpoints = run_dir / "checkpoints/attempt-0"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]
    verify(checkpoints / "step-00000002")
    outcome = run.outcome()
    assert outcome["status"] == "fatal"
    message = f"cannot write checkpoint {checkpoints / 'step-00000004'}: "
    assert outcome["reason"].startswith(message)
    assert f"train: {message}" in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.slow
def test_a_metrics_file_that_cannot_grow_is_named(start: Start, tmp_path: Path) -> None:
    flags = (*FLAGS, "--steps=100000", "--checkpoint-every=0")
    run = start.command(
        ["bash", "-c", 'ulimit -f 20; exec "$@"', "bash", sys.executable, "-m", "train", *flags],
        tmp_path / "run",
        0,
        {},
    ).finish(1)
    last = run.output().splitlines()[-1]
    assert last.startswith(f"train: cannot use {run.run_dir / 'metrics.jsonl'}: File too large; ")
    assert "Traceback" not in run.output()
    assert run.outcome()["status"] == "fatal"


@pytest.mark.slow
def test_a_run_directory_that_cannot_be_is_named_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for run_dir in (tmp_path / "file", tmp_path / "file/run"):
        run = start.single(*FLAGS, "--steps=2", run_dir=run_dir).finish(2)
        assert run.output() == f"train: cannot use run directory {run_dir}: Not a directory\n"


@pytest.mark.slow
def test_a_profile_prints_nothing_of_its_own_on_standard_error(
    start: Start, tmp_path: Path
) -> None:
    run = start.single(*FLAGS, "--steps=2", "--profile=1:2", run_dir=tmp_path / "run").finish()
    assert "profile of 2 steps on rank 0" in run.output()
    assert "USDT" not in run.output()
    assert ".cpp" not in run.output()


@pytest.mark.slow
def test_what_would_fail_after_the_last_step_is_refused_before_the_first(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    export = f"--export={tmp_path / 'file' / 'weights.st'}"
    run = start.single(*FLAGS, "--steps=2", export, run_dir=tmp_path / "a").finish(2)
    assert f"train: {export.replace('=', ' ')}: cannot write in " in run.output()
    run = start.single(*FLAGS, "--steps=2", "--profile=7:9", run_dir=tmp_path / "b").finish(2)
    assert run.output() == "train: --profile 7:9: the run has 2 steps only\n"
    assert run.metrics() == []


@pytest.mark.slow
def test_a_loss_per_item_is_refused_with_what_to_do(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch.nn import functional\n"
        "from train.tasks.digits import Digits\n"
        "class Wrong(Digits):\n"
        "    def loss(self, outputs, targets):\n"
        "        return functional.cross_entropy(outputs, targets, reduction='none')\n"
    )
    run = start.single("--task=mine.py:Wrong", "--steps=2", run_dir=tmp_path / "run").finish(2)
    assert run.output().splitlines()[-1] == (
        "train: task 'digits': loss() gave a tensor of shape [64]; it must be a tensor of one "
        'number, the sum over the items of the batch (reduction="sum")'
    )


@pytest.mark.slow
def test_a_directory_of_another_configuration_is_refused_and_left_alone(
    start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    first = start.single(*FLAGS, "--steps=2", run_dir=run_dir).finish()
    before = first.contents()
    other = start.single(*FLAGS, "--steps=9", "--lr=0.1", "--seed=7", run_dir=run_dir).finish(2)
    assert other.output() == (
        f"train: {run_dir} holds a run of another configuration: use another --run-dir, "
        "or the values recorded there:\n"
        "  lr: 0.005 there, 0.1 here\n"
        "  seed: 0 there, 7 here\n"
    )
    assert first.contents() == before


@pytest.mark.slow
def test_a_usage_error_does_not_touch_the_outcome_of_a_run_that_somebody_has_going(
    start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    live = start.single(*FLAGS, "--steps=100000", "--checkpoint-every=0", run_dir=run_dir)
    live.wait_for_step(1)
    before = live.outcome()
    assert before["status"] == "running"
    start.single("--lr", "nope", run_dir=run_dir).finish(2)
    # torchrun's second try has a higher number than the live run's first.
    torchrun = ("--standalone", "--max-restarts=1")
    mistyped = start.ranks(1, "--lr=nope", run_dir=run_dir, torchrun=torchrun).finish(1)
    assert mistyped.output().count("train: --lr 'nope' is not a number") == 2
    # Of the last try, also in torchrun's report.
    assert mistyped.output().count("traceback : --lr 'nope' is not a number") == 1
    assert live.outcome() == before
    # A launcher that starts the run again gets the error: that is a new attempt.
    start.single("--lr", "nope", run_dir=run_dir, attempt=1).finish(2)
    assert live.outcome()["status"] == "fatal"
    assert live.outcome()["attempt"] == 1


@pytest.mark.slow
def test_an_older_attempt_is_fenced(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    newer = start.single(*FLAGS, "--steps=2", run_dir=run_dir, attempt=5).finish()
    before = newer.contents()
    zombie = start.single(*FLAGS, "--steps=9", run_dir=run_dir, attempt=4).finish(1)
    assert zombie.output() == f"train: {run_dir} belongs to attempt 5; this is attempt 4\n"
    assert newer.contents() == before


@pytest.mark.slow
def test_a_newer_attempt_fences_the_running_one(start: Start, tmp_path: Path) -> None:
    """As after a cable cut: the old attempt still runs when the new one has started elsewhere."""
    run_dir = tmp_path / "run"
    old = start.single(*FLAGS, "--steps=100000", "--checkpoint-every=50", run_dir=run_dir)
    old.wait_for_step(1)
    new = start.single(*FLAGS, "--steps=2", run_dir=run_dir, attempt=1).finish()
    outcome = new.outcome()
    old.finish(1)
    assert "attempt 0 writes no more: a newer attempt has taken over" in old.output()
    assert new.outcome() == outcome


def test_a_usage_error_comes_before_torch_and_once_for_all_ranks(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    run = start.ranks(2, "--epoch=3", run_dir=tmp_path / "run")
    assert run.wait() == 1
    message = "unknown flag '--epoch'; did you mean '--epochs'?"
    assert run.output().count(f"train: {message}\n") == 1
    assert run.output().count(f"traceback : {message}\n") == 1
    assert f"traceback : {message}\n" in run.output().partition("Root Cause")[2]
    assert run.output().count(message) == 2
    assert "To enable traceback" not in run.output()
    assert run.output().count("exitcode  : 2") >= 1
    assert run.outcome()["status"] == "fatal"
    assert run.outcome()["reason"] == message
    code = "import sys; from train.__main__ import main; main(); sys.exit('torch' in sys.modules)"
    env = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""}
    shown = subprocess.run(
        [sys.executable, "-c", code, "--help"], env=env, capture_output=True, text=True, check=True
    )
    assert "--global-batch INT" in shown.stdout


def test_any_rank_records_what_it_refuses(tmp_path: Path) -> None:
    """Torchrun ends rank 0 when another is the first to find the flag wrong."""
    env = {
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "TRAIN_RUN_DIR": str(tmp_path),
        **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    }
    done = subprocess.run([sys.executable, "-m", "train", "--epoch=3"], env=env, check=False)
    assert done.returncode == 2
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["status"], outcome["rank"]) == ("fatal", None)
    assert outcome["reason"].startswith("unknown flag '--epoch'")


def test_ranks_without_a_gpu_among_ranks_that_have_one_are_named(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "mixed.py").write_text(
        "import os, torch\n"
        "from train import __main__\n"
        "from train.runtime import devices, process_group\n"
        "chosen = (torch.device('cpu'), 'gloo')\n"
        "if os.environ['RANK'] == '1':\n"
        "    chosen = (torch.device('cuda', 0), 'nccl')\n"
        "process_group.use, devices.gpu_of = lambda device: None, lambda device: 'GPU-1'\n"
        "process_group.device_and_backend = lambda rank_info, wanted, device: chosen\n"
        "__main__.enter()\n"
    )
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    shared = start.ranks(
        2,
        *FLAGS,
        run_dir=tmp_path / "shared",
        module=("mixed.py",),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0",
    )
    own = start.each(2, *FLAGS, run_dir=tmp_path / "own", script="mixed.py")
    # torchrun's exit status, and those of the ranks.
    for store, status in (([shared], 1), (own, 2)):
        printed = "".join(run.finish(status).output() for run in store)
        outcome = store[0].outcome()
        assert (outcome["status"], outcome["rank"]) == ("fatal", None)
        assert outcome["reason"] == (
            "some ranks have a GPU each, others have not (no driver, or fewer GPUs than ranks on "
            "that node); fix or leave out these nodes, or start all with CUDA_VISIBLE_DEVICES= to "
            f"train on the CPU:\n  rank 0 on {socket.gethostname()}"
        )
        # By rank 0, or, if torchrun ends it first, in torchrun's report of the other.
        assert outcome["reason"].splitlines()[0] in printed


def test_the_limit_stands_for_a_full_disk() -> None:
    """The disk test above relies on this: beyond the limit a write fails, and does not kill."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


MOUNTED = """
import os

from train.tasks.digits import Digits


class Mounted(Digits):
    def train(self):
        open(os.environ["DATA"]).close()
        return super().train()
"""


def test_a_failure_before_the_claim_leaves_the_outcome_of_a_live_run(
    start: Start, tmp_path: Path
) -> None:
    """As of an export of its weights on a node without the data."""
    (tmp_path / "t.py").write_text(MOUNTED)
    (tmp_path / "data").touch()
    flags, run_dir = ("--task=t.py:Mounted", "--steps=100000"), tmp_path / "run"
    live = start.single(*flags, "--checkpoint-every=0", run_dir=run_dir, DATA="data")
    live.wait_for_step(1)
    before = live.outcome()
    start.single(*flags, run_dir=run_dir, DATA="missing").finish(1)
    assert live.outcome() == before
    live.process.send_signal(signal.SIGTERM)
    live.finish(75)
    assert live.outcome()["status"] == "preempted"


WRONG = """
from train.tasks.digits import Digits


class Wrong(Digits):
    def metrics(self, score, count):
        return [1.0]
"""


def test_a_usage_error_of_a_claimed_run_is_fatal(start: Start, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(WRONG)
    run = start.single("--task=t.py:Wrong", "--steps=2", run_dir=tmp_path / "run").finish(2)
    outcome = run.outcome()
    assert (outcome["status"], outcome["step"]) == ("fatal", 2)
    assert "metrics() gave [1.0]" in outcome["reason"]
