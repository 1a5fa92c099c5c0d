"""What the toolkit costs on Slurm, beside scripts written by hand. Needs root, like the sandbox.

Run as `make bench-slurm`. A sandbox of its own is started. Four measurements:

1. From the submitting command to the end of the first training step: `toolkit submit` beside
   `sbatch` of two scripts as a person would write them (srun, torchrun, the same training): one
   that can do no more than start, and one whose ranks can also start again in the job, as ours
   can, for which each start makes a store of its own. They take turns, and the first of a round is
   the last of the next.
2. A sweep of 1,000 points: how often sbatch is called, and how long `toolkit submit` takes, beside
   one `sbatch --array` by hand.
3. `toolkit submit`, beside `toolkit render | sbatch`: the cost of making a run directory,
   and of recording the run so that it can be found again.
4. A job of 10,000 nodes on a partition of as many cloud nodes: plan and render, and `sbatch
   --test-only` of the script, beside that of the one by hand.
"""

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SANDBOX = ROOT / "slurm/sandbox/sandbox"
TOOLKIT = str(Path(sys.executable).parent / "toolkit")
TARGET = 1.05
POINTS = 1000
CLOUD_NODES = 10_000

TRAINING = ("--task", "digits", "--steps", "20")
JOB = f"""\
name: bench
module: train
args: {json.dumps(TRAINING)}
resources: {{nnodes: 2, cpus_per_node: 1}}
env: {{OMP_NUM_THREADS: "1"}}
"""
RESTARTS = """\
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 PYTHONUNBUFFERED=1
export PET_MAX_RESTARTS=3 PET_TEE=3"""
BY_HAND = f"""\
#!/bin/bash
#SBATCH --job-name=hand
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
source {ROOT}/.venv/bin/activate
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK OMP_NUM_THREADS=1 TRAIN_RUN_DIR=$1
# restarts
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d \\
  --rdzv-endpoint="$head_node:$((61000 + SLURM_JOB_ID % 4000))" --rdzv-id="$SLURM_JOB_ID" \\
  -m train {" ".join(TRAINING)}
"""
ARRAY_BY_HAND = "#!/bin/bash\n#SBATCH --array=0-999\nsleep 1\n"


@dataclass(frozen=True)
class Bench:
    """A sandbox with a folder for the job files and runs."""

    folder: Path
    environ: dict[str, str]

    def run(self, *argv: str | Path) -> str:
        """Run a command as on the login node; exit with its output if it fails."""
        done = subprocess.run(
            argv, cwd=ROOT, env=self.environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{argv[0]} failed: {done.stderr}{done.stdout}")
        return done.stdout + done.stderr

    def spent(self, *argv: str | Path) -> tuple[float, float]:
        """Return the seconds on the clock and of CPU time that a command takes."""
        before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        self.run(*argv)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.monotonic() - began_s, cpu_s

    def profile(self, name: str, **keys: object) -> str:
        """Write a profile and return its path."""
        path = self.folder / f"{name}.yaml"
        known = {"kind": "slurm", "runs_dir": str(self.folder / "runs"), **keys}
        path.write_text(json.dumps(known | {"venv": str(ROOT / ".venv")}))
        return str(path)


def up(folder: Path) -> Bench:
    """Start the sandbox."""
    state = folder / "sandbox"
    size = ["--nodes", "2", "--cloud", str(CLOUD_NODES)]
    subprocess.run([SANDBOX, "up", *size, "--dir", state], check=True, stdout=sys.stderr)
    login = subprocess.run(
        ["bash", "-c", f"eval \"$('{SANDBOX}' env --dir '{state}')\"; env -0"],
        capture_output=True,
        text=True,
        check=True,
    )
    environ = dict(line.split("=", 1) for line in login.stdout.split("\0") if "=" in line)
    return Bench(folder, environ | {"XDG_STATE_HOME": str(folder / "state")})


def first_step_s(bench: Bench, command: Sequence[str], run_dir: Path) -> float:
    """Return the seconds from the command to the end of the first step; waits for the job's end."""
    began_s = time.time()
    bench.run(*command)
    while bench.run("squeue", "-h", "-o", "%i").strip():
        time.sleep(0.2)
    (found,) = run_dir.parent.glob(f"{run_dir.name}*")
    with (found / "metrics.jsonl").open() as lines:
        first = json.loads(next(lines))
    assert first["step"] == 1
    return float(first["time"]) - began_s


def to_first_step(bench: Bench, rounds: int) -> None:
    """Measure the way to the first step: ours, and twice by hand, in turn."""
    job, profile = bench.folder / "bench.yaml", bench.profile("site")
    scripts = {"hand": "hand.sbatch", "hand, restarts": "restarts.sbatch"}

    def command(name: str, run_dir: Path) -> Sequence[str]:
        if name in scripts:
            output = f"--output={bench.folder}/%j.out"
            return ("sbatch", output, str(bench.folder / scripts[name]), str(run_dir))
        there = bench.profile(f"site-{run_dir.parent.name}", runs_dir=str(run_dir.parent))
        return (TOOLKIT, "submit", str(job), "--to", there)

    bench.run(TOOLKIT, "check", job, "--to", profile, "--server")
    found: dict[str, list[float]] = {"toolkit": [], **{name: [] for name in scripts}}
    for count in range(rounds + 1):
        for name in list(found) if count % 2 else reversed(found):
            run_dir = bench.folder / "runs" / f"{name}-{count}" / "bench"
            run_dir.parent.mkdir(parents=True)
            seconds = first_step_s(bench, command(name, run_dir), run_dir)
            if count:  # the first round warms the caches
                found[name].append(seconds)
    for name, values in found.items():
        print(
            f"submit to first step, {name}: {statistics.median(values):.2f} s"
            f" (median of {rounds}; {min(values):.2f} to {max(values):.2f})"
        )
    for name in scripts:
        medians = statistics.median(found["toolkit"]) / statistics.median(found[name])
        ratios = [a / b for a, b in zip(found["toolkit"], found[name], strict=True)]
        print(
            f"toolkit / {name}: {medians:.3f} of the medians, {statistics.median(ratios):.3f}"
            f" median of the rounds' ratios (target {TARGET})"
        )


def sweep(bench: Bench) -> None:
    """Submit many points at once; count the calls of sbatch."""
    job, hand = bench.folder / "sweep.yaml", bench.folder / "array.sbatch"
    points = {"grid": {"--seed": list(range(POINTS))}, "max_running": 1}
    job.write_text(JOB + f"sweep: {json.dumps(points)}\n")
    hand.write_text(ARRAY_BY_HAND)
    calls = bench.folder / "calls"
    counting = bench.folder / "bin"
    counting.mkdir()
    real = shutil.which("sbatch", path=bench.environ["PATH"])
    (counting / "sbatch").write_text(f'#!/bin/sh\necho "$*" >>{calls}\nexec {real} "$@"\n')
    (counting / "sbatch").chmod(0o755)
    path = f"{counting}{os.pathsep}{bench.environ['PATH']}"
    counted = Bench(bench.folder, bench.environ | {"PATH": path})
    profile = bench.profile("held", sbatch={"hold": True})
    wall_s, cpu_s = counted.spent(TOOLKIT, "submit", job, "--to", profile)
    by_hand_s, _ = bench.spent("sbatch", "--hold", "--output=/dev/null", hand)
    bench.run("scancel", "--user", str(os.getuid()))
    number = len(calls.read_text().splitlines())
    print(
        f"sweep of {POINTS} points: {number} call of sbatch, {wall_s:.2f} s"
        f" ({cpu_s:.2f} s CPU); sbatch --array by hand {by_hand_s:.2f} s"
    )


def submitting(bench: Bench, rounds: int) -> None:
    """Submit jobs that are held, and the same by way of a pipe, in turn."""
    profile = bench.profile("held", sbatch={"hold": True})
    ours = (TOOLKIT, "submit", bench.folder / "bench.yaml", "--to", profile)
    pipe = f"{TOOLKIT} render {bench.folder}/bench.yaml --to {profile} | sbatch -o /dev/null"
    cpu_s: dict[str, list[float]] = {"submit": [], "render | sbatch": []}
    for count in range(rounds + 1):
        for name in list(cpu_s) if count % 2 else reversed(cpu_s):
            argv = ours if name == "submit" else ("bash", "-c", pipe)
            _, spent_s = bench.spent(*argv)
            if count:
                cpu_s[name].append(spent_s)
    bench.run("scancel", "--user", str(os.getuid()))
    medians = {name: statistics.median(values) for name, values in cpu_s.items()}
    print(
        f"CPU time: toolkit submit {medians['submit']:.3f} s, render | sbatch "
        f"{medians['render | sbatch']:.3f} s, ratio "
        f"{medians['submit'] / medians['render | sbatch']:.3f}"
    )


def planning(bench: Bench) -> None:
    """Plan for very many nodes, and have the scheduler plan, too."""
    job, hand = bench.folder / "wide.yaml", bench.folder / "hand.sbatch"
    training = (*TRAINING, "--global-batch", CLOUD_NODES)  # a sample per rank
    job.write_text(JOB.replace(json.dumps(TRAINING), json.dumps(training)))
    nodes = f"resources.nnodes={CLOUD_NODES}"
    profile = bench.profile("cloud", partition="cloud")
    script = bench.folder / "cloud.sbatch"
    began_s = time.monotonic()
    script.write_text(bench.run(TOOLKIT, "render", job, "--to", profile, "--set", nodes))
    wall_s = time.monotonic() - began_s
    checked_s, _ = bench.spent(TOOLKIT, "check", job, "--to", profile, "--set", nodes, "--server")
    said = bench.run("sbatch", "--test-only", script)
    ours_s, _ = bench.spent("sbatch", "--test-only", script)
    size = (f"--nodes={CLOUD_NODES}", "--partition=cloud")
    by_hand_s, _ = bench.spent("sbatch", "--test-only", *size, hand)
    print(said.strip())
    print(
        f"{CLOUD_NODES} nodes: plan and render {wall_s:.2f} s, check --server {checked_s:.2f} s,"
        f" sbatch --test-only {ours_s:.2f} s (by hand {by_hand_s:.2f} s)"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds (default 15)")
    rounds = parser.parse_args().rounds
    folder = Path(tempfile.mkdtemp(prefix="bench-slurm-"))
    try:
        bench = up(folder)
        (folder / "bench.yaml").write_text(JOB)
        (folder / "hand.sbatch").write_text(BY_HAND)
        (folder / "restarts.sbatch").write_text(BY_HAND.replace("# restarts", RESTARTS))
        planning(bench)
        sweep(bench)
        submitting(bench, rounds)
        to_first_step(bench, rounds)
    finally:
        subprocess.run([SANDBOX, "down", "--dir", folder / "sandbox"], check=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
