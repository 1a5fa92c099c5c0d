"""What `toolkit render` costs, beside `torchx run --dryrun` for the same job.

Run as `make bench`. TorchX is installed into benchmarks/.venv, beside the project and never into
it. The two commands run in turn, and what counts is CPU time of whole processes, so that a busy
machine disturbs both alike.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import toolkit

ROOT = Path(__file__).parent.parent
PEER = ROOT / "benchmarks/.venv/bin"
TORCHX = "torchx==0.7.0"
HERE = Path(sys.executable).parent

COMMANDS = {
    "toolkit render": [str(HERE / "toolkit"), "render", "jobs/digits.yaml", "--to", "slurm"],
    "torchx --dryrun": [
        str(PEER / "torchx"),
        *("run", "--dryrun", "-s", "slurm", "dist.ddp", "-j", "2x1", "-m", "train"),
        *("--", "--task", "digits", "--epochs", "10"),
    ],
    "toolkit --help": [str(HERE / "toolkit"), "--help"],
    "import toolkit": [str(HERE / "python"), "-c", "import toolkit"],
    "python": [str(HERE / "python"), "-c", "pass"],
}


def cpu_seconds(argv: Sequence[str]) -> float:
    """Return the user and system time of one run of a command, in seconds."""
    # What an editable install has not compiled yet, pip has compiled of the peer.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def install_peer(*more: str) -> None:
    """Make the peer's own environment, once, with more packages that it needs for a scheduler."""
    if not (PEER / "torchx").exists():
        print(f"installing {TORCHX} into benchmarks/.venv")
        subprocess.run([sys.executable, "-m", "venv", PEER.parent], check=True)
        subprocess.run([PEER / "pip", "install", "-qq", TORCHX], check=True)
    for name in more:
        if subprocess.run([PEER / "pip", "show", "-q", name], check=False).returncode:
            subprocess.run([PEER / "pip", "install", "-qq", name], check=True)


def in_turn(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, float]:
    """Run commands in turn; print and return the median CPU seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for count in range(rounds + 1):
        for name, argv in commands.items():
            spent = cpu_seconds(argv)
            if count:  # the first round warms the caches
                times[name].append(spent)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        low, high = min(times[name]), max(times[name])
        print(f"{name:<16} {median:.3f} s CPU (median of {rounds}; {low:.3f} to {high:.3f})")
    return medians


def many_renders(count: int, nnodes: int) -> float:
    """Return the CPU seconds of `count` loads, plans and renders in this process."""
    started = time.process_time()
    for _ in range(count):
        job = toolkit.load(ROOT / "jobs/digits.yaml", [f"resources.nnodes={nnodes}"])
        toolkit.render(toolkit.plan(job, toolkit.SlurmProfile(name="slurm")))
    return time.process_time() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="counted rounds (default 11)")
    rounds = parser.parse_args().rounds
    install_peer()
    medians = in_turn(COMMANDS, rounds)
    ratio = medians["toolkit render"] / medians["torchx --dryrun"]
    print(f"toolkit render / torchx --dryrun: {ratio:.2f}")
    print(f"import toolkit, beyond python: {medians['import toolkit'] - medians['python']:.3f} s")
    many_renders(10, 2)
    for nnodes in (2, 4096):
        print(f"1,000 x load, plan, render of {nnodes} nodes: {many_renders(1000, nnodes):.2f} s")


if __name__ == "__main__":
    main()
