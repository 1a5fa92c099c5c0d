"""What the supervisor costs: its look at a large job, and the start of torchrun.

Run as `make bench-supervisor`. A look: one attempt of 1,000 nodes with 8 ranks each, whose files
are made on this machine's disk; what is timed is what the batch host does each five seconds. A
start: the same job of two nodes on a sandbox of Slurm, by a rendered script and by one as people
write it, in turn; from the script's first line until the last node has started torchrun.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import toolkit
from tests.conftest import ROOT
from tests.support.ending_batch import Job
from tests.system.chaos.arena import SlurmArena, own_slurm
from toolkit.supervisor.batch_watch import Watch

NODES, RANKS = 1000, 8
LOOK_MS, LATER_S = 20.0, 0.3
PATIENCE_S = 120.0

BY_HAND = """\
#!/bin/bash
#SBATCH --job-name=hand
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
set -e
source {venv}/bin/activate
export OMP_NUM_THREADS=1
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task=1 --kill-on-bad-exit=1 \\
  torchrun --nnodes=2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d \\
  --rdzv-endpoint="$head_node:$((61000 + SLURM_JOB_ID % 4000))" \\
  --rdzv-id="$SLURM_JOB_ID" -m train --task digits
"""


def looks_ms(folder: Path, rounds: int) -> list[float]:
    """Return how long each look at a job takes whose nodes all live, in milliseconds."""
    job = Job(folder)
    logs = job.folder(0)
    (logs / "nodes").write_text("".join(f"n{number}\n" for number in range(NODES)))
    for number in range(NODES):
        (logs / f"began-{number}").write_text("3\n")
        (logs / f"alive-{number}").write_text("1795867100\n")
        for rank in range(RANKS):
            (logs / f"node-{number}/7_x/attempt_0/{rank}").mkdir(parents=True)
    took = []
    with job.batch() as batch:
        watch = Watch(batch)
        for count in range(rounds + 1):
            for number in range(0, NODES, 7):  # some nodes have shown meanwhile that they live
                (logs / f"alive-{number}").write_text(f"{1795867100 + count}\n")
            began = time.perf_counter()
            goes_on = watch.look()
            took.append(1e3 * (time.perf_counter() - began))
            assert goes_on
    return took[1:]


def stand_in(folder: Path) -> Path:
    """Make an environment whose torchrun writes down when it has started."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/activate").write_text(f"export PATH={folder}/bin:$PATH\n")
    (folder / "bin/python3").symlink_to(Path(sys.executable).resolve())
    torchrun = folder / "bin/torchrun"
    torchrun.write_text('#!/bin/sh\ndate +%s.%N >"$BENCH_FOLDER/torchrun-$SLURM_NODEID"\n')
    torchrun.chmod(0o755)
    return folder


def script_of(arena: SlurmArena, venv: Path, *, ours: bool) -> str:
    """Return a script that writes down when it has started, and which torchrun leaves behind."""
    if ours:
        site = arena.site
        profile = site.profile.model_copy(update={"venv": str(venv), "partition": "low"})
        text = toolkit.render(toolkit.plan(toolkit.load(ROOT / "jobs/digits.yaml"), profile))
    else:
        text = BY_HAND.format(venv=venv)
    begin = text.index("set -e")
    return f'{text[:begin]}date +%s.%N >"$BENCH_FOLDER/script"\n{text[begin:]}'


def start_s(arena: SlurmArena, venv: Path, folder: Path, *, ours: bool) -> float:
    """Submit a script; return the seconds from its first line until all nodes have torchrun."""
    folder.mkdir()
    script = folder / "job.sbatch"
    script.write_text(script_of(arena, venv, ours=ours))
    argv = ["sbatch", "--parsable", "--partition=low", f"--export=ALL,BENCH_FOLDER={folder}"]
    arena.cluster.slurm(*argv, f"--output={folder}/log", str(script), str(folder / "run"))
    marks = [folder / f"torchrun-{number}" for number in range(2)]
    until = time.monotonic() + PATIENCE_S
    while not all(mark.exists() and mark.read_text().endswith("\n") for mark in marks):
        assert time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.05)
    last = max(float(mark.read_text()) for mark in marks)
    while "R" in arena.cluster.slurm("squeue", "-h", "-o", "%t"):  # the next one meets free nodes
        time.sleep(0.1)
    return last - float((folder / "script").read_text())


def main() -> int:
    """Print the figures; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--looks", type=int, default=200, help="how many looks")
    parser.add_argument("--starts", type=int, default=10, help="how many starts by each script")
    options = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory() as name:
        took = looks_ms(Path(name), options.looks)
        median, worst = statistics.median(took), sorted(took)[int(0.99 * len(took)) - 1]
        late = median > LOOK_MS
        print(
            f"a look at {NODES} nodes with {RANKS} ranks each: {median:.2f} ms (median of "
            f"{len(took)}; 99 %: {worst:.2f}; target: {LOOK_MS:g}{', missed' if late else ''})"
        )
        missed.append(late)
    with tempfile.TemporaryDirectory() as name, own_slurm(Path(name) / "slurm") as arena:
        venv = stand_in(Path(name) / "venv")
        times: dict[bool, list[float]] = {True: [], False: []}
        for count in range(options.starts + 1):
            for ours in (True, False):
                spent = start_s(arena, venv, Path(name) / f"{count}-{ours}", ours=ours)
                if count:
                    times[ours].append(spent)
        for ours, who in ((True, "toolkit"), (False, "by hand")):
            spread = f"{len(times[ours])}; {min(times[ours]):.2f} to {max(times[ours]):.2f}"
            middle = statistics.median(times[ours])
            print(f"script to torchrun, {who:<8} {middle:.2f} s (median of {spread})")
        later = statistics.median(times[True]) - statistics.median(times[False])
        late = later > LATER_S
        print(f"later by {later:.2f} s (target: {LATER_S:g}{', missed' if late else ''})")
        missed.append(late)
    return int(any(missed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}")
