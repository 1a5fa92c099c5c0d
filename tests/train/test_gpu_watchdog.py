"""Ranks that hang or are slow on GPUs, whose collectives NCCL queues: who is named."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import shared_gpu

pytestmark = pytest.mark.gpu(2)

ROOT = Path(__file__).parents[2]

# DDP as people write it; from step 40 on, rank 1 hangs or is slow.
SCRIPT = """
import os, sys, time
from tests.train.support.shared_gpu import become_a_host
rank = int(os.environ["RANK"])
become_a_host(rank)
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
kind, steps = sys.argv[1], int(sys.argv[2])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("nccl")
layers = [torch.nn.Linear(512, 512) for _ in range(4)]
model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), 0.001)
for step in range(steps):
    if step >= 40 and rank == 1:
        if kind == "loads":
            time.sleep(10000)
        if kind == "computes" and step == 40:
            torch.cuda._sleep(6 * 10**10)  # some 35 s
        if kind == "is slow":
            torch.cuda._sleep(4 * 10**7)  # some 20 ms
    loss = model(torch.ones(64, 512, device=device)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, loss.item(), flush=True)
print("trained", flush=True)
os._exit(0)
"""


def watched(folder: Path, kind: str, steps: int, **more: Any) -> tuple[str, list[dict[str, Any]]]:
    """Run the script; return what is printed, and the watchdog's records of that name."""
    script, file = folder / "script.py", folder / "job.yaml"
    script.write_text(SCRIPT)
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    # The launcher has no more ranks than GPUs, and hides these from a job that asks for none.
    gpus = {"gpus_per_node": 2} if shared_gpu.RANKS_PER_GPU == 1 else {}
    content: dict[str, Any] = {
        "name": "gpus",
        "script": str(script),
        "args": [kind, str(steps)],
        "resources": {"nproc_per_node": 2, **gpus},
        "retries": {"in_job": 0, "requeue": 0},
        "stop": {"grace": "2s"},
        "env": {"PYTHONPATH": path, "TEST_RANKS_PER_GPU": str(shared_gpu.RANKS_PER_GPU)},
    }
    file.write_text(json.dumps({**content, **more}))
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", "run", str(file)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    (run_dir,) = (folder / "runs").iterdir()
    files = (run_dir / "logs/attempt-0/watchdog").glob("*.jsonl")
    return done.stdout, [
        json.loads(line) for path in sorted(files) for line in path.read_text().splitlines()
    ]


def test_the_rank_that_keeps_other_gpus_waiting_is_named(tmp_path: Path) -> None:
    output, records = watched(tmp_path, "loads", 1000, stall_timeout="8s")
    (stall,) = (each for each in records if each.get("kills"))
    assert stall["ranks"] == [1], output
    for words in ("has not joined all_reduce ", "process group 0 (nccl); it stands at "):
        assert words in stall["why"]


def test_the_rank_whose_gpu_computes_is_named_and_not_ended(tmp_path: Path) -> None:
    output, records = watched(tmp_path, "computes", 100, stall_timeout="8s")
    assert "trained" in output
    assert not any(each.get("kills") for each in records)
    last = [each for each in records if each.get("stalled")][-1]
    assert last["ranks"] == [1], output
    assert " computes; no rank is killed before " in last["why"]


def test_the_slow_gpu_is_named(tmp_path: Path) -> None:
    assert shared_gpu.ranks_at_most() >= 2
    output, records = watched(tmp_path, "is slow", 2500, stall_timeout="100s")
    assert "trained" in output
    named = [each for each in records if "faster" in each]
    assert [each["rank"] for each in named] == [1], output
    assert named[0]["faster"] > 0.2
