"""A failure that comes again at the same step is not retried for ever, by any launcher."""

from pathlib import Path
from typing import Any

import pytest

import toolkit

# Fails in each start, with an address and a port in its words that differ; a third start would wait
# for ever, so that only a process that has noticed can end it.
ALIKE = """
import os, time
from pathlib import Path
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with Path(os.environ["TRAIN_RUN_DIR"], "starts").open("a") as file:
        file.write(f"{start}\\n")
    if start == 2:
        time.sleep(10_000)
    address, port = hex(id(object()) + 4096 * start), 4000 + start
    raise RuntimeError(f"no kernel at {address}, port {port}: 3 vs 4")

main()
"""

# Each start fails one step later, with the same words, as metrics.jsonl shows.
FARTHER = """
import json, os
from pathlib import Path
run_dir, start = Path(os.environ["TRAIN_RUN_DIR"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with (run_dir / "starts").open("a") as file:
    file.write(f"{start}\\n")
with (run_dir / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"attempt": 0, "restart": start, "step": 7 + start}) + "\\n")
raise RuntimeError("the same words")
"""

# Rank 1 is gone at a sample of its third step, in C++, where it can record nothing.
ABORTS = """
import os, torch
from torch import nn
from train.data import Batch
from train.tasks import Task

class Aborts(Task):
    def model(self):
        return nn.Linear(2, 1)
    def train(self):
        return Batch(inputs=torch.ones(64, 2), targets=torch.arange(64.0)[:, None])
    def test(self):
        return self.train()
    def loss(self, outputs, targets):
        if 1 in targets:
            os.abort()
        return ((outputs - targets) ** 2).sum()
"""


def run_here(
    folder: Path, script: str, *, in_job: int, **job: Any
) -> tuple[toolkit.RunStatus, Path]:
    """Run a script on this machine to its end; return how it ended, and its run directory."""
    (folder / "script.py").write_text(script)
    wanted = {"name": "again", "retries": {"in_job": in_job}, "stop": {"grace": "9s"}}
    spec = toolkit.JobSpec.model_validate(wanted | (job or {"script": str(folder / "script.py")}))
    profile = toolkit.LocalProfile(name="here", runs_dir=str(folder / "runs"))
    run = toolkit.submit(spec, to=profile)
    assert run.run_dir is not None
    return run.wait(300), run.run_dir


@pytest.mark.parametrize("recorded", [True, False], ids=["error file", "traceback"])
def test_a_script_that_fails_twice_alike_is_not_started_for_ever(
    tmp_path: Path, recorded: bool
) -> None:
    script = ALIKE if recorded else ALIKE.replace("@record\n", "").replace("from torch", "# ")
    status, run_dir = run_here(tmp_path, script, in_job=5)
    assert status.state is toolkit.RunState.FAILED
    assert (run_dir / "logs/attempt-0/reason").read_text() == (
        "fatal: the same failure twice: RuntimeError: no kernel at 0x*, port *: 3 vs 4; "
        "another start would end like these two; not started again\n"
    )
    assert "the same failure twice: RuntimeError: no kernel" in status.reason
    assert (run_dir / "starts").read_text().split()[:2] == ["0", "1"]


@pytest.mark.slow
def test_a_script_that_fails_at_another_step_each_time_gets_all_its_starts(tmp_path: Path) -> None:
    status, run_dir = run_here(tmp_path, FARTHER, in_job=3)
    assert status.state is toolkit.RunState.FAILED
    assert (run_dir / "logs/attempt-0/reason").read_text() == (
        "retryable: exit status 1; not started again (retries.requeue is 0)\n"
    )
    assert (run_dir / "starts").read_text().split() == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_a_rank_that_aborts_twice_at_one_step_ends_the_training(tmp_path: Path) -> None:
    status, _ = run_here(
        tmp_path,
        ABORTS,
        in_job=5,
        module="train",
        args=["--task", f"{tmp_path}/script.py:Aborts", "--steps", "9", "--global-batch", "8"],
        resources={"nproc_per_node": 2},
    )
    assert status.state is toolkit.RunState.FAILED
    assert status.reason == (
        "fatal: the same failure twice at step 2: Fatal Python error: Aborted; "
        "another start would end like these two; not started again"
    )
