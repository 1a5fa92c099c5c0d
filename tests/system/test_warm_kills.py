"""Warm ranks that are killed again and again continue with the same bits, and leave nothing."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

import toolkit
from tests.conftest import PATIENCE_S, Until

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path

folder, steps = Path(os.environ["TRAIN_RUN_DIR"]), int(sys.argv[1])
rank = int(os.environ["RANK"])
(folder / f"pid-{rank}").write_text(f"{os.getpid()} ")
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
path, step = folder / "state", 0
if path.exists():
    state = torch.load(path)
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < steps:
    torch.manual_seed(1000 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    step += 1
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / "draft")
        os.replace(folder / "draft", path)
    dist.barrier()
    time.sleep(0.01)
if rank == 0:
    (folder / "end").write_text(model.module.weight.detach().numpy().tobytes().hex())
    server = os.getppid()
    (folder / "open").write_text(f"{len(os.listdir(f'/proc/{server}/fd'))} {server}")
dist.destroy_process_group()
"""


def submit(folder: Path, steps: int, kills: int) -> toolkit.Run:
    (script := folder / "train.py").write_text(SCRIPT)
    job = toolkit.JobSpec.model_validate(
        {
            "name": "killed",
            "script": str(script),
            "args": [str(steps)],
            "start": "warm",
            "resources": {"nproc_per_node": 2},
            "retries": {"in_job": 3 * kills},
        }
    )
    return toolkit.submit(job, to=toolkit.LocalProfile(name="here", runs_dir=str(folder / "runs")))


def pid_of(path: Path) -> int:
    """Return the pid in a file; 0 if there is none yet."""
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith(" ") else 0


def alive(run_dir: Path) -> list[int]:
    """Return the processes of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ = (path / "environ").read_bytes()
        except OSError:
            continue
        if f"TRAIN_RUN_DIR={run_dir}\0".encode() in environ:
            found.append(int(path.name))
    return found


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_ranks_that_are_killed_go_on_with_the_same_bits(
    kills: int, tmp_path: Path, until: Until
) -> None:
    steps = 10 * kills
    whole = submit(tmp_path, steps, 0)
    assert whole.wait(PATIENCE_S).state is toolkit.RunState.SUCCEEDED, "\n".join(whole.logs())
    run, moments = submit(tmp_path, steps, kills), random.Random(4711)
    folder = Path(str(run.run_dir))
    seen: set[int] = set()
    paths = [folder / f"pid-{rank}" for rank in (0, 1)]
    for _ in range(kills):
        until(
            lambda old={0, *seen}: all(pid_of(path) not in old for path in paths),
            "both ranks have started again",
        )
        pids = [pid_of(path) for path in paths]
        time.sleep(moments.uniform(0, 0.3))
        os.kill(moments.choice(pids), signal.SIGKILL)
        seen |= {*pids}
    status = run.wait(PATIENCE_S)
    assert status.state is toolkit.RunState.SUCCEEDED, "\n".join(run.logs())
    assert "starts cold" not in "\n".join(run.logs())
    ends = [Path(str(each.run_dir), "end").read_text() for each in (whole, run)]
    assert ends[0] == ends[1]
    # Of the fork server: as many descriptors as after one start, but those of its two ranks.
    opened = [Path(str(each.run_dir), "open").read_text().split()[0] for each in (whole, run)]
    assert int(opened[1]) <= int(opened[0]) + 2
    until(lambda: not alive(folder), "no process of the run is left")
