"""The time of a call through `toolkit.SlurmExecutor`, beside plain submitit. Needs root.

Run as `python -m benchmarks.executor`; it starts a sandbox. Measured from `submit` to the last
result of a function that adds a number over all ranks of two nodes, in turn:

1. `toolkit.SlurmExecutor`: the ranks are workers of torchrun, and the process group exists.
2. submitit: each task is a rank, and the function creates the process group by
   `submitit.helpers.TorchDistributedEnvironment`, as users of submitit do.
3. submitit starting torchrun: each task is a node, whose function starts torchrun for its rank.
   Users of submitit do this to get torchrun's restarts and its report of the first failing rank.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import submitit
from submitit.core import logger

import toolkit

ROOT = Path(__file__).parent.parent
SANDBOX = ROOT / "slurm/sandbox/sandbox"
TARGET = 1.1
NODES = 2
SUM = 3.0


def add_up() -> float:
    """Add the ranks' numbers; the process group exists."""
    import torch
    from torch import distributed

    mine = torch.tensor([distributed.get_rank() + 1.0])
    distributed.all_reduce(mine)
    return float(mine)


def make_group_and_add_up() -> float:
    """Do the same as a task of submitit."""
    from torch import distributed

    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    distributed.init_process_group("gloo")
    try:
        return add_up()
    finally:
        distributed.destroy_process_group()


RANK = """
import sys
from torch import distributed
from benchmarks.executor import add_up
distributed.init_process_group("gloo")
open(sys.argv[1], "w").write(str(add_up()))
distributed.destroy_process_group()
"""


def start_torchrun(script: str) -> float:
    """Do the same as a task of submitit that is a node."""
    environment = submitit.JobEnvironment()
    result = f"{script}.{environment.job_id}.{environment.global_rank}"
    head, job = environment.hostnames[0], int(environment.raw_job_id)
    options = [f"--nnodes={environment.num_nodes}", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint={head}:{61000 + job % 4000}", f"--rdzv-id={job}"]
    torchrun = str(Path(sys.executable).parent / "torchrun")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([torchrun, *options, script, result], check=True, env=env)
    return float(Path(result).read_text())


def up(folder: Path) -> None:
    """Start the sandbox, and make this process one of its login node."""
    state = str(folder / "sandbox")
    size = ["--nodes", str(NODES), "--dir", state]
    subprocess.run([SANDBOX, "up", *size], check=True, stdout=sys.stderr)
    login = subprocess.run(
        ["bash", "-c", f"eval \"$('{SANDBOX}' env --dir '{state}')\"; env -0"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (line.partition("=") for line in login.stdout.split("\0"))
    os.environ.update({name: value for name, equals, value in lines if equals})
    os.environ |= {"XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}


def calls_of(folder: Path) -> dict[str, Callable[[], submitit.Job[Any]]]:
    """Return the functions by which the three submit the call."""
    profile = toolkit.SlurmProfile(
        name="bench", runs_dir=str(folder / "runs"), venv=str(Path(sys.executable).parent.parent)
    )
    size: dict[str, Any] = {"nodes": NODES, "tasks_per_node": 1, "cpus_per_task": 1}
    ours = toolkit.SlurmExecutor(profile, **size, timeout_min=10)
    plain = submitit.AutoExecutor(folder=folder / "submitit", cluster="slurm")
    plain.update_parameters(**size, timeout_min=10)
    script = folder / "rank.py"
    script.write_text(RANK)
    return {
        "toolkit": lambda: ours.submit(add_up),
        "submitit": lambda: plain.submit(make_group_and_add_up),
        "submitit, torchrun": lambda: plain.submit(start_torchrun, str(script)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds (default 15)")
    rounds = parser.parse_args().rounds
    # Without accounting, submitit's watcher warns of sacct at each poll; results come all the same.
    logger.get_logger().setLevel("CRITICAL")
    folder = Path(tempfile.mkdtemp(prefix="bench-executor-"))
    try:
        up(folder)
        calls = calls_of(folder)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for count in range(rounds + 1):
            for name in list(calls) if count % 2 else reversed(calls):
                began_s = time.monotonic()
                results = calls[name]().results()
                seconds = time.monotonic() - began_s
                assert results == [SUM] * NODES, (name, results)
                if count:  # the first round warms the caches
                    times[name].append(seconds)
                while subprocess.check_output(["squeue", "-h"]):
                    time.sleep(0.2)
    finally:
        subprocess.run([SANDBOX, "down", "--dir", folder / "sandbox"], check=True)
        shutil.rmtree(folder)
    for name, values in times.items():
        print(
            f"submit to result, {name}: {statistics.median(values):.2f} s"
            f" (median of {rounds}; {min(values):.2f} to {max(values):.2f})"
        )
    for name in list(calls)[1:]:
        ratios = [a / b for a, b in zip(times["toolkit"], times[name], strict=True)]
        medians = statistics.median(times["toolkit"]) / statistics.median(times[name])
        print(
            f"toolkit / {name}: {medians:.3f} of the medians, {statistics.median(ratios):.3f}"
            f" median of the rounds' ratios (target {TARGET})"
        )


if __name__ == "__main__":
    main()
