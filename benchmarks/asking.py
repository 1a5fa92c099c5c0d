"""The time of `toolkit list` for 10,000 runs, and its queries to Slurm. Needs root.

Run as `python -m benchmarks.asking`; it starts a sandbox. 1,000 of the runs have a pending job in
Slurm. The others have ended, one in five with a failure, and their state stands in their run
directories alone. Every call of squeue, scontrol and sacct is counted. Then ten processes list as
fast as they can, like `watch` in ten shells.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SANDBOX = ROOT / "slurm/sandbox/sandbox"
TOOLKIT = str(Path(sys.executable).parent / "toolkit")
RUNS, LIVE, SHELLS, TARGET_S = 10_000, 1_000, 10, 2.0
WATCH_S = 10.0
COUNTED = ("squeue", "scontrol", "sacct")

JOB = """\
name: bench
module: train
args: [--task, digits, --steps, '20']
"""


@dataclass(frozen=True)
class Bench:
    """A sandbox with counted commands, and a user with many runs."""

    folder: Path
    environ: dict[str, str]

    def run(self, *argv: str | Path) -> str:
        """Run a command as on the login node; show its output if it fails."""
        done = subprocess.run(
            argv, cwd=ROOT, env=self.environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{argv[0]} failed: {done.stderr}{done.stdout}")
        return done.stdout

    def calls(self) -> dict[str, int]:
        """Return how often each command was called since the last call of this method."""
        counts = {}
        for name in COUNTED:
            path = self.folder / f"{name}.calls"
            counts[name] = len(path.read_bytes()) if path.exists() else 0
            path.unlink(missing_ok=True)
        return counts


def up(folder: Path) -> Bench:
    """Start the sandbox, with counting programs before its own in PATH."""
    state = folder / "sandbox"
    subprocess.run([SANDBOX, "up", "--nodes", "1", "--dir", state], check=True, stdout=sys.stderr)
    login = subprocess.run(
        ["bash", "-c", f"eval \"$('{SANDBOX}' env --dir '{state}')\"; env -0"],
        capture_output=True,
        text=True,
        check=True,
    )
    environ = dict(line.split("=", 1) for line in login.stdout.split("\0") if "=" in line)
    counting = folder / "counting"
    counting.mkdir()
    for name in COUNTED:
        script = counting / name
        script.write_text(
            f'#!/bin/sh\nprintf . >>{folder}/{name}.calls\nexec {state}/bin/{name} "$@"\n'
        )
        script.chmod(0o755)
    path = f"{counting}:{environ['PATH']}"
    return Bench(folder, {**environ, "PATH": path, "XDG_STATE_HOME": str(folder / "state")})


def make_runs(bench: Bench, runs: int, live: int) -> None:
    """Write the files of `toolkit submit` and of the jobs, and queue the live jobs."""
    profile = {"kind": "slurm", "name": "site", "runs_dir": str(bench.folder / "runs")}
    (bench.folder / "state/torch-deploy-toolkit").mkdir(parents=True)
    lines = []
    for number in range(runs):
        name = f"bench-1121-{number:06}-abcd"
        run_dir = bench.folder / "runs" / name
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "job.yaml").write_text(JOB)
        job_id = str(number + 1)
        if number >= runs - live:
            script = run_dir / "bench.sbatch"
            script.write_text("#!/bin/bash\ntrue\n")
            argv = ("sbatch", "--parsable", "--hold", "-o", "/dev/null", script, run_dir)
            job_id = bench.run(*argv).strip()
        else:
            attempt = run_dir / "logs/attempt-0"
            attempt.mkdir()
            bad = number % 5 == 0
            (attempt / "exit_status").write_text("1\n" if bad else "0\n")
            (attempt / "reason").write_text("retryable: rank 1 failed\n" if bad else "done\n")
            status = "retryable" if bad else "done"
            outcome = {"version": 1, "status": status, "attempt": 0, "step": 20, "reason": "x"}
            (run_dir / "outcome.json").write_text(json.dumps(outcome))
            (run_dir / "metrics.jsonl").write_text('{"step": 20, "loss": 0.5}\n' * 20)
        job = {
            "version": 1,
            "job_id": job_id,
            "mode": "",
            "points": None,
            "after": "",
            "folder": "",
        }
        (run_dir / "jobs.jsonl").write_text(json.dumps(job) + "\n")
        record = {
            "version": 1,
            "uri": f"slurm://sandbox/{job_id}",
            "name": name,
            "job": "bench",
            "profile": profile,
            "created": time.time(),
            "run_dir": str(run_dir),
        }
        lines.append(json.dumps(record) + "\n")
    (bench.folder / "state/torch-deploy-toolkit/runs.jsonl").write_text("".join(lines))


def listing(bench: Bench, runs: int, *, rounds: int) -> float:
    """Measure `toolkit list` with an empty cache; return the longest median in seconds."""
    medians = []
    for more in ((), ("--json",), ("--state", "PENDING")):
        times = []
        for _ in range(rounds):
            for path in bench.folder.glob("state/torch-deploy-toolkit/queues/*"):
                path.unlink()
            bench.calls()
            before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            shown = bench.run(TOOLKIT, "list", "--last", str(runs), *more)
            took_s = time.monotonic() - began_s
            after, calls = resource.getrusage(resource.RUSAGE_CHILDREN), bench.calls()
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            times.append(took_s)
            rows = len(json.loads(shown)) if "--json" in more else shown.count("\n")
            words = " ".join(["toolkit list", *more])
            print(f"{words}: {rows} rows in {took_s:.2f} s (CPU {cpu_s:.2f} s); calls: {calls}")
            assert calls["squeue"] == 1, calls
        medians.append(statistics.median(times))
    return max(medians)


def watching(bench: Bench, shells: int, watch_s: float) -> None:
    """Let several processes list without a pause, and count the queries to Slurm."""
    bench.calls()
    loop = f"end=$(($(date +%s) + {watch_s:.0f})); n=0; while [ $(date +%s) -lt $end ]; do "
    loop += f"{TOOLKIT} list >/dev/null || exit; n=$((n + 1)); done; echo $n"
    began_s = time.monotonic()
    many = [
        subprocess.Popen(["sh", "-c", loop], env=bench.environ, stdout=subprocess.PIPE, text=True)
        for _ in range(shells)
    ]
    lists = sum(int(each.communicate()[0]) for each in many)
    took_s = time.monotonic() - began_s
    print(f"{shells} shells, {lists} lists in {took_s:.1f} s; calls: {bench.calls()}")


def main() -> None:
    """Measure, and print the times beside the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--live", type=int, default=LIVE)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asking", dir="/tmp") as name:
        folder = Path(name)
        try:
            bench = up(folder)
            make_runs(bench, arguments.runs, arguments.live)
            longest_s = listing(bench, arguments.runs, rounds=arguments.rounds)
            watching(bench, SHELLS, WATCH_S)
        finally:
            subprocess.run([SANDBOX, "down", "--dir", folder / "sandbox"], check=True)
    load = os.getloadavg()[0]
    machine = f"{os.cpu_count()} cores, load {load:.1f}"
    print(f"longest median {longest_s:.2f} s, target {TARGET_S} s; {machine}")


if __name__ == "__main__":
    main()
