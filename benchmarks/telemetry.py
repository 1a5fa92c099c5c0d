"""What it costs to see a run: microseconds per step, and reading what many have written.

Run as `make bench-telemetry`, with nothing else running. Each figure has its target:

- a line of `metrics.jsonl`: the call after each step, of a rank that does nothing else;
- a stall: from the limit (`stall_timeout`) after the last step until the rank is named, for a rank
  that is stopped, one that sleeps, and one that holds the GIL; the longest of them;
- the watchdog: steps of two ranks that only exchange a number, with it and without it, in turns;
- 10,000 ranks: the answers of 1,250 nodes read and compared, as rank 0's watchdog does it;
- `toolkit status -w` of 100 runs that make ten steps a second: the CPU time of its lines, as a
  share of the five seconds between them. The one query to Slurm for all of them is not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import ROOT
from tests.support.told_run import run_at
from toolkit.runs.state import RunState, RunStatus
from toolkit.supervisor.watchdog_files import write_watchdog
from train.rundir.files import RunDirectory
from train.runtime.rank import RankInfo

WATCHDOG = ROOT / "toolkit/supervisor/watchdog"
STEP_US, STALL_S, SECONDS, MEGABYTES, PERCENT = 20.0, 1.0, 10.0, 500.0, 5.0
"""The targets."""

WATCHED, BETWEEN_S, STEPS_PER_S = 100, 5, 10

LIMIT_S, MOST_S = 3, 600

HANGS = {
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "sleeps": "time.sleep(600)",
    "holds the GIL": "mutex = ctypes.create_string_buffer(64)\n"
    "for _ in range(2): ctypes.PyDLL(None).pthread_mutex_lock(mutex)",
}
"""What rank 1 does after 40 steps."""

HANGING = """
import ctypes, json, os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1, 1000):
    time.sleep(0.05)
    if step > 40 and dist.get_rank() == 1:
        exec(sys.argv[1])
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        with open(os.environ["TRAIN_RUN_DIR"] + "/metrics.jsonl", "a") as file:
            print(json.dumps({"time": time.time(), "step": step}), file=file)
"""

LOOP = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
number = torch.ones(1)
def steps(count):
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(number)
    return (time.perf_counter() - began) / count * 1e6
steps(2000)
took = steps(int(os.environ["STEPS"]))
if dist.get_rank() == 0:
    print("took", took, flush=True)
dist.destroy_process_group()
"""


def metrics_us(folder: Path, steps: int) -> float:
    """Return how long a step's line of `metrics.jsonl` holds the training up."""
    directory = RunDirectory(folder, RankInfo(rank=0, world_size=1, local_rank=0))
    began = time.perf_counter()
    for step in range(steps):
        directory.metric(
            step=step, epoch=0, samples_seen=64 * step, loss=0.1, lr=0.01, samples_per_s=1e4
        )
    directory.flush()
    return (time.perf_counter() - began) / steps * 1e6


def run_of(folder: Path, text: str, *args: str, limit: str = "", **environ: str) -> str:
    """Run a script on two ranks in a new folder, with a watchdog or not; return what it prints."""
    shutil.rmtree(folder, ignore_errors=True)
    exchange = str(folder / "logs/attempt-0/watchdog")
    begin = write_watchdog(exchange, watches=True, reads_steps=False, children=False)
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    start = ["sh", begin, limit] if limit else []
    environ |= {"TRAIN_ATTEMPT": "0", "TRAIN_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, *torchrun, *args],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if args else None,
        text=True,
        check=not args,
        timeout=MOST_S,
    )
    return done.stdout


def loop_us(folder: Path, steps: int, *, watched: bool) -> float:
    """Return how long a step of two ranks takes, with the watchdog beside them or without it."""
    printed = run_of(folder, LOOP, limit="learned" if watched else "", STEPS=str(steps))
    return float(printed.split("took ")[1].split()[0])


def stall_s(folder: Path, hang: str) -> float:
    """Return how long after the limit a rank that hangs is named."""
    run_of(folder, HANGING, hang, limit=str(LIMIT_S))
    stalls = folder / "logs/attempt-0/watchdog/stalls.jsonl"
    steps, named = (path.read_text().splitlines() for path in (folder / "metrics.jsonl", stalls))
    stall = json.loads(named[0])
    assert stall["ranks"] == [1], stall
    took: float = stall["time"] - json.loads(steps[-1])["time"] - LIMIT_S
    return took


def aggregation(folder: Path, ranks: int) -> tuple[float, float]:
    """Return seconds and megabytes that the comparison of so many ranks takes, in this process."""
    import stragglers
    import watchdog

    answers: dict[int, tuple[stragglers.Arrivals, str]] = {}
    began = time.perf_counter()
    for file in folder.iterdir():
        answers |= watchdog.begun_in(watchdog.read_json(file))
    begun = {rank: own for rank, (own, _) in answers.items()}
    compared = stragglers.compare(begun, {rank: node for rank, (_, node) in answers.items()})
    took = time.perf_counter() - began
    assert compared and compared.straggler and compared.straggler.rank == 7, compared
    assert len(begun) == ranks
    return took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def write_answers(folder: Path, ranks: int) -> None:
    """Write the answers of nodes with eight ranks each; rank 7 is slow, and each clock differs."""
    import stragglers

    folder.mkdir()
    kinds = [number % 2 for number in range(stragglers.MOST)]
    for node in range(ranks // 8):
        answers = []
        for rank in range(node * 8, node * 8 + 8):
            work = 1.3 if rank == 7 else 1 + rank % 13 / 1000
            times = [
                1e9 + node / 100 + 1.4 * (number // 2) + (1.31 if kind else work)
                for number, kind in enumerate(kinds)
            ]
            answers.append({"rank": rank, "arrivals": [1, times, [] if rank else kinds, []]})
        report = {"version": 1, "node": f"node{node}", "ranks": answers}
        (folder / f"answer-{node}.json").write_text(json.dumps(report), encoding="utf-8")


def watching_percent(folder: Path, rounds: int) -> float:
    """Return how much of a core it takes to show many runs that go on."""
    from toolkit.cli.summary import top_lines, top_rows
    from toolkit.runs.evidence.progress import ProgressReader

    runs = [run_at(folder / f"run-{number}", name=f"run-{number}") for number in range(WATCHED)]
    for run in runs:
        (folder / run.name / "logs/attempt-0/watchdog").mkdir(parents=True)
        run.told = RunStatus(state=RunState.RUNNING)
        write_steps(folder / run.name, 1, 10_000)
    readers: dict[str, ProgressReader] = {}
    took = []
    for number in range(rounds + 1):
        began = time.process_time()
        lines = list(top_lines(top_rows(((run, run.told) for run in runs), readers)))
        took.append(time.process_time() - began)
        assert len(lines) == WATCHED and "step " in lines[-1]
        for run in runs:
            first = 10_000 + number * BETWEEN_S * STEPS_PER_S
            write_steps(folder / run.name, first, BETWEEN_S * STEPS_PER_S)
    return 100 * statistics.median(took[1:]) / BETWEEN_S


def write_steps(folder: Path, first: int, count: int) -> None:
    """Append records as `train` writes them."""
    place = {"version": 1, "attempt": 0, "restart": 0, "epoch": 0, "lr": 0.01}
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for step in range(first, first + count):
            figures = {"samples_seen": 64 * step, "loss": 1 / step, "samples_per_s": 640.123}
            record = {**place, "time": 1e9 + step / STEPS_PER_S, "step": step, **figures}
            file.write(json.dumps(record) + "\n")


def shown(what: str, figure: float, target: float, unit: str) -> bool:
    """Print a figure beside its target; return whether the target is missed."""
    missed = figure > target
    print(f"{what}: {figure:.3g} {unit} (target: {target:g}{', missed' if missed else ''})")
    return missed


def main() -> int:
    """Print all figures; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each loop runs")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of a loop")
    parser.add_argument("--ranks", type=int, default=10_000, help="ranks that are compared")
    parser.add_argument("--compare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.dont_write_bytecode = True  # beside the templates
    sys.path.insert(0, str(WATCHDOG))
    if options.compare:
        print(*aggregation(options.compare, options.ranks))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "metrics").mkdir()
        line_us = metrics_us(folder / "metrics", options.steps)
        pairs = [
            (
                loop_us(folder / "loop", options.steps, watched=True),
                loop_us(folder / "loop", options.steps, watched=False),
            )
            for _ in range(options.rounds)
        ]
        named_s = {how: stall_s(folder / "loop", code) for how, code in HANGS.items()}
        write_answers(folder / "answers", options.ranks)
        # In a process of its own, whose memory is that of the comparison alone.
        argv = [sys.executable, "-m", "benchmarks.telemetry", f"--ranks={options.ranks}"]
        argv.append(f"--compare={folder / 'answers'}")
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
        seconds, megabytes = map(float, done.stdout.split())
        (folder / "runs").mkdir()
        percent = watching_percent(folder / "runs", options.rounds)
    more_us = statistics.median(with_it - without for with_it, without in pairs)
    plain_us = statistics.median(without for _, without in pairs)
    print(f"a step of two ranks that exchange a number: {plain_us:.3g} µs")
    words = ", ".join(f"{seconds:.2f} s where it {how}" for how, seconds in named_s.items())
    print(f"a rank that hangs is named so long after the limit of {LIMIT_S} s: {words}")
    missed = [
        shown("a rank that hangs is named, after the limit", max(named_s.values()), STALL_S, "s"),
        shown("a line of metrics.jsonl, per step", line_us, STEP_US, "µs"),
        shown("the watchdog, per step", more_us, STEP_US, "µs"),
        shown(f"{options.ranks} ranks compared", seconds, SECONDS, "s"),
        shown(f"{options.ranks} ranks compared", megabytes, MEGABYTES, "MB"),
        shown(f"status -w of {WATCHED} runs", percent, PERCENT, "% of a core"),
    ]
    return int(any(missed))


if __name__ == "__main__":
    sys.exit(main())
