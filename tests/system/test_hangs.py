"""Ranks that hang, for real: who is named, what follows, and what `toolkit stacks` shows."""

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import TOOLKIT, Until
from tests.support.slurm_site import Site
from toolkit.rendering.payload import archive
from toolkit.runs.evidence.failure import first_failure
from toolkit.runs.evidence.rank_waits import newest_waits
from toolkit.runs.evidence.stacks import newest_straggler

# A script as people write it. Rank 1 hangs in its first start, after six steps or before the first.
HANGING = """
import ctypes, os, signal, sys, threading, time
import torch, torch.distributed as dist
kind, rank = sys.argv[1], int(os.environ["RANK"])
hangs = rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        if kind == "loader" and index == 6 and hangs:
            time.sleep(10000)
        return torch.ones(2)

def hang():
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    lock = ctypes.create_string_buffer(64) if kind == "gil" else threading.Lock()
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(lock) if kind == "gil" else lock.acquire()

if kind == "never" and hangs:
    time.sleep(10000)
dist.init_process_group("gloo")
for step, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=1, num_workers=1)):
    if kind == "mismatch" and step == 6 and hangs:
        dist.broadcast(batch, 0)
    if step == 6 and hangs:
        hang()
    joined = dist.all_reduce(batch, async_op=True)
    while kind == "polled" and not joined.is_completed():
        pass
    joined.wait()
    print("step", step, flush=True)
print("trained", flush=True)
dist.destroy_process_group()
"""

OUTSIDE = "is not in torch.distributed, as the others are; it stands at "
LACKS = "has not joined all_reduce 7 of process group 0; it stands at "


def place(text: str) -> str:
    """Return where the script has this text, as the watchdog writes it."""
    before, _, _ = HANGING.partition(text)
    function = "<module>" if "init_process_group" in before else "hang"
    return f"hanging.py:{before.count(chr(10)) + 1} in {function}"


WHY = {
    "loader": (LACKS, f"{place('for step, batch')}, waiting for a data loader"),
    "stopped": ("is stopped (by SIGSTOP or a debugger)",),
    "gil": (OUTSIDE, place("pthread_mutex_lock")),  # its collectives cannot be asked for
    "lock": (LACKS, place("lock.acquire()")),
    "polled": (LACKS, place("lock.acquire()")),  # rank 0 spins until the collective has ended
    "never": (OUTSIDE, "hanging.py:"),
}


def job(folder: Path, kind: str, **more: Any) -> dict[str, Any]:
    """Return a job file's content: two ranks, of which one hangs."""
    script = folder / "hanging.py"
    script.write_text(HANGING)
    wanted = {"name": "hanging", "script": str(script), "args": [kind]}
    return {**wanted, "retries": {"in_job": 1}, "stop": {"grace": "2s"}, **more}


def stalls(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "logs/attempt-0/watchdog/stalls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ended(run_dir: Path) -> list[dict[str, Any]]:
    """Return the stall for which ranks were killed, and what follows: its end, if there is one."""
    lines = stalls(run_dir)
    return lines[[line.get("kills") for line in lines].index(True) :][:2]


@pytest.mark.parametrize("kind", WHY)
@pytest.mark.slow  # the loader also on Slurm, below
def test_the_rank_that_hangs_is_named_and_killed_and_the_run_goes_on(
    kind: str, tmp_path: Path
) -> None:
    two, told = {"nproc_per_node": 2}, tmp_path / "told"
    file = tmp_path / "hanging.yaml"
    notify = {"command": f"cat >>{told}", "events": ["stall"]}
    content = job(tmp_path, kind, resources=two, stall_timeout="8s", notify=notify)
    file.write_text(json.dumps(content))
    done = subprocess.run(
        [TOOLKIT, "run", file], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    stall, over = ended(run_dir)
    assert (stall["stalled"], stall["ranks"]) == (True, [1])
    assert re.match("no output for [0-9]+ s: rank 1 on ", stall["why"])
    for words in WHY[kind]:
        assert words in stall["why"]
    assert over["stalled"] is False, "the new start of the ranks is not stalled"
    output = (run_dir / "logs/attempt-0/node-0.log").read_text()
    assert f"watchdog: {stall['why']}" in output
    (notification,) = map(json.loads, told.read_text().splitlines())
    assert notification["text"] == f"{run_dir.name}: attempt 0 stalls: {stall['why']}"
    assert output.count("[rank 1] step 6\n") == 1, "it was made by the second start"
    assert not list((run_dir / "logs/attempt-0/watchdog").glob("*.json.*")), "no draft is left"


@pytest.mark.slow  # tests/unit/templates/test_watchdog.py has records
def test_ranks_in_different_collectives_are_named(tmp_path: Path) -> None:
    file = tmp_path / "hanging.yaml"
    content = job(tmp_path, "mismatch", resources={"nproc_per_node": 2}, stall_timeout="8s")
    file.write_text(json.dumps(content))
    done = subprocess.run(
        [TOOLKIT, "run", file], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    stall, _ = ended(run_dir)
    assert stall["ranks"] == []
    calls = [
        f"{name} of 2 Float on rank {rank} on {socket.gethostname()} ({tmp_path}/{place(line)})"
        for rank, (name, line) in enumerate(
            [("all_reduce", "joined.wait()"), ("broadcast", "dist.broadcast")]
        )
    ]
    mismatch = f"collective mismatch: number 7 of process group 0 is {' and '.join(calls)}"
    assert stall["why"].partition(" s: ")[2] == mismatch


# A script as people write it. Rank 1 computes three times as long as a step may take.
COMPUTING = """
import itertools, os, sys, time
import torch, torch.distributed as dist
kind, limit_s = sys.argv[1], float(sys.argv[2])
named = os.environ["TRAIN_RUN_DIR"] + "/logs/attempt-0/watchdog/stalls.jsonl"

def lines():
    return open(named).read().count("computes") if os.path.exists(named) else 0

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        if kind == "workers":
            compute()
        return torch.ones(2)

def compute():
    begin, before = time.monotonic(), lines()
    while (spent_s := time.monotonic() - begin) < 3 * limit_s or lines() == before:
        sum(itertools.repeat(0, 10**8 if kind == "gil" else 10**3))
        assert spent_s < 200, "nobody says that it computes"

dist.init_process_group("gloo")
print("begins", flush=True)
hangs = dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if hangs and kind == "workers":
    list(torch.utils.data.DataLoader(Data(), num_workers=2))
elif hangs:
    compute()
if hangs and kind == "sleeps at last":
    time.sleep(10000)
dist.all_reduce(torch.ones(1))
print("trained", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["python", "gil", "workers", "sleeps at last"])
@pytest.mark.slow
def test_a_rank_that_computes_is_named_and_not_ended(kind: str, tmp_path: Path) -> None:
    (tmp_path / "computing.py").write_text(COMPUTING)
    told, sleeps = tmp_path / "told", kind == "sleeps at last"
    content = {
        "name": "computing",
        "script": str(tmp_path / "computing.py"),
        "args": [kind, "6"],
        "resources": {"nproc_per_node": 2},
        "retries": {"in_job": int(sleeps), "requeue": 0},
        "stop": {"grace": "2s"},
        "stall_timeout": "6s",
        "notify": {"command": f"cat >>{told}", "events": ["stall"]},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(content))
    done = subprocess.run(
        [TOOLKIT, "run", "job.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    lines = stalls(run_dir)
    assert [line["ranks"] for line in lines if line.get("kills")] == [[1]] * sleeps
    assert told.exists() is sleeps, "who computes is no stall"
    computes = next(line for line in lines if line["stalled"] and line["ranks"] == [1])
    assert re.match(r"no output for \d+ s: rank 1 on \S+ \(.*/computing.py:.*\) ", computes["why"])
    assert computes["why"].endswith(" computes; no rank is killed before 3600 s")
    assert lines[-1]["stalled"] is False
    folder = run_dir / "logs/attempt-0/watchdog"
    assert len([*folder.glob("ask-*")]) <= len(lines) + 1, "other questions are withdrawn"


@pytest.mark.slow
def test_a_stall_is_the_reason_of_a_run_that_ends_for_it(tmp_path: Path) -> None:
    file, retries = tmp_path / "hanging.yaml", {"in_job": 0}
    more = {"resources": {"nproc_per_node": 2}, "stall_timeout": "8s", "retries": retries}
    file.write_text(json.dumps(job(tmp_path, "loader", **more)))
    done = subprocess.run(
        [TOOLKIT, "run", file], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    failure = first_failure(run_dir, None)
    assert failure is not None and failure.rank == 1
    assert failure.message == f"StallError: {ended(run_dir)[0]['why']}"
    assert failure.message in done.stderr


@pytest.mark.slow
def test_without_a_limit_a_run_is_looked_into_and_left_alone(tmp_path: Path, until: Until) -> None:
    file = tmp_path / "hanging.yaml"
    file.write_text(json.dumps(job(tmp_path, "loader", resources={"nnodes": 2})))

    def shown(*command: str) -> str:
        done = subprocess.run(
            [TOOLKIT, *command], cwd=tmp_path, capture_output=True, text=True, timeout=280
        )
        return done.stdout + done.stderr

    uri = shown("submit", str(file), "--to", "local").split()[0]
    (run_dir,) = (tmp_path / "runs").iterdir()
    logs = run_dir / "logs/attempt-0"
    until(
        lambda: all("step 5" in log.read_text() for log in logs.glob("node-*.log")),
        "all ranks have made six steps",
    )
    texts: list[str] = []

    def one_waits() -> bool:
        texts.append(shown("stacks", uri))
        return "all_reduce 7" in texts[-1] and "all_reduce 6" in texts[-1]

    until(one_waits, "rank 0 waits in the seventh all_reduce", seen=lambda: texts[-1])
    first, second = (text.splitlines() for text in texts[-1].split("rank ")[1:])
    assert texts[-1].count("hanging.py") == 2
    assert {first[0].split()[0], second[0].split()[0]} == {"0", "1"}
    assert any("/torch/utils/data/dataloader.py" in line for line in [*first, *second])
    assert [path.name for path in (logs / "watchdog").glob("a*-stacks-*")] == [], "nothing is left"
    assert "asked to stop" in shown("cancel", uri)
    shown("wait", uri)
    assert "CANCELLED" in shown("status", uri)
    assert shown("stacks", uri).endswith("only a running run has stacks\n")


def test_a_run_without_a_watchdog_says_so(tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text(json.dumps({"name": "plain", "command": ["true"], "stall_timeout": "never"}))
    subprocess.run([TOOLKIT, "run", file], cwd=tmp_path, check=True, timeout=280)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert not (run_dir / "logs/attempt-0/watchdog/watchdog.py").exists()
    assert "stragglers" not in (run_dir / "run.sh").read_text()


SLOW = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while not os.path.exists("stop"):
    time.sleep(0.09 if dist.get_rank() == 2 else 0.05)
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    stop = torch.tensor(float(os.path.exists("stop")))
    dist.all_reduce(stop)
    if stop:
        break
dist.destroy_process_group()
"""


@pytest.mark.slow  # tests/unit/templates/test_stragglers.py has simulated runs
def test_a_rank_that_is_slower_than_the_others_is_named(tmp_path: Path, until: Until) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    resources = {"nnodes": 2, "nproc_per_node": 2}
    content = {"name": "slow", "script": str(tmp_path / "slow.py"), "resources": resources}
    plan = toolkit.plan(toolkit.JobSpec.model_validate(content), toolkit.LocalProfile(name="here"))
    script = toolkit.render(plan)
    with zipfile.ZipFile(io.BytesIO(archive("local"))) as sources:
        sources.extractall(tmp_path / "quick")
    watchdog = tmp_path / "quick/supervisor/watchdog/watchdog.py"
    source = watchdog.read_text()
    assert "\nSTRAGGLERS_S = 60.0\n" in source
    watchdog.write_text(source.replace("STRAGGLERS_S = 60.0", "STRAGGLERS_S = 3.0"))
    assert "-Ium toolkit.supervisor" in script
    (tmp_path / "run.sh").write_text(
        script.replace("-Ium toolkit.supervisor", f"-Iu {tmp_path}/quick")
    )
    path = f"{TOOLKIT.parent}:{os.environ['PATH']}"
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        ["bash", "run.sh", str(run_dir)], cwd=tmp_path, env={**os.environ, "PATH": path}
    ) as process:
        try:
            until(lambda: newest_straggler(run_dir), "the slow rank is named")
        finally:
            (tmp_path / "stop").touch()
            assert process.wait(280) == 0
    why = newest_straggler(run_dir)
    assert why is not None and why.startswith(f"rank 2 on {socket.gethostname()} is slower than ")
    assert f"watchdog: {why}" in (run_dir / "logs/attempt-0/node-0.log").read_text()
    folder = run_dir / "logs/attempt-0/watchdog"
    line = json.loads((folder / "stragglers.jsonl").read_text().splitlines()[0])
    assert (line["rank"], line["faster"] > 0.1) == (2, True)
    waits = newest_waits(run_dir)
    assert waits is not None and sorted(waits.waits) == [0, 1, 2, 3]
    assert min(waits.waits, key=waits.waits.__getitem__) == 2


def loaders(folder: Path) -> list[Path]:
    """Return the processes that run the script, workers of its DataLoader among them."""
    script, found = os.fsencode(folder / "hanging.py"), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if script in (process / "cmdline").read_bytes().split(b"\0"):
                found.append(process)
    return found


@pytest.mark.slurm
def test_a_rank_that_hangs_on_another_node_is_named_and_killed(
    site: Site, tmp_path: Path, until: Until
) -> None:
    notify = {"command": f"cat >>{tmp_path}/told", "events": ["stall"]}
    resources = {"nnodes": 2, "cpus_per_node": 1}
    more = {"resources": resources, "stall_timeout": "8s", "notify": notify}
    spec = toolkit.JobSpec.model_validate(job(tmp_path, "loader", **more))
    run = site.launcher.submit(toolkit.plan(spec, site.profile))
    status = run.wait(280)
    assert status.state is toolkit.RunState.SUCCEEDED, [*run.logs()]
    assert run.run_dir is not None
    nodes = (run.run_dir / "logs/attempt-0/nodes").read_text().split()
    stall = ended(run.run_dir)[0]
    assert re.match(f"no output for [0-9]+ s: rank 1 on {nodes[1]} {LACKS}", stall["why"])
    told = json.loads((tmp_path / "told").read_text())
    assert (told["event"], told["text"].partition(" stalls: ")[2]) == ("stall", stall["why"])
    # Of the killed rank, too, whose worker hangs, and which Slurm does not track here by cgroups.
    until(lambda: not loaders(tmp_path), "no worker of a loader is left")
