"""A training script that imports little and steps only when it may.

`$COUNTED` names a folder that all ranks see: a rank leaves a mark there for each phase of its
start. The number in its file `go` is the first attempt that may make steps. The run directory holds
the checkpoint of each rank: its step, and a digest of all steps so far. `$TINY_RECORDS` says
whether the script writes an `outcome.json` and handles signals, as `train` does.
"""

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import signal
import time
from pathlib import Path

STEPS, PACE_S, LOOK_S = 20, 0.05, 0.02


def digest(rank: int, step: int, before: str) -> str:
    """Return the digest of all steps of a rank, from that of the steps before."""
    return hashlib.sha256(f"{rank} {step} {before}".encode()).hexdigest()


def replace(path: Path, content: object) -> None:
    """Write JSON in the place of a file."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(content))
    draft.replace(path)


def checkpoint(run_dir: Path, rank: int) -> tuple[int, str]:
    """Return step and digest of a rank's newest checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        step, so_far = json.loads((run_dir / f"checkpoint-{rank}.json").read_text())
        return step, so_far
    return 0, ""


def main() -> None:
    """Train one rank."""
    environ = os.environ
    folder, run_dir = Path(environ["COUNTED"]), Path(environ["TRAIN_RUN_DIR"])
    rank, world, attempt = (int(environ[n]) for n in ("RANK", "WORLD_SIZE", "TRAIN_ATTEMPT"))
    (folder / f"importing-{attempt}-{rank}").touch()
    gate = Path(environ["TINY_GATES"], f"{environ['SLURM_JOB_ID']}.imports")
    if gate.exists():
        Path(f"{gate}.arrived").touch()
        while gate.exists():
            time.sleep(LOOK_S)
    for name in ("asyncio.subprocess", "email.message", "http.server", "xml.dom.minidom"):
        importlib.import_module(name)

    step, so_far = checkpoint(run_dir, rank)

    def tell(status: str, reason: str | None = None) -> None:
        if rank == 0 and environ.get("TINY_RECORDS"):
            outcome = {"version": 1, "status": status, "attempt": attempt, "step": step}
            replace(run_dir / "outcome.json", {**outcome, "rank": None, "reason": reason})

    def stop(number: int, _: object) -> None:
        tell("preempted", f"stopped by {signal.Signals(number).name}")
        os._exit(75)

    if environ.get("TINY_RECORDS"):
        signal.signal(signal.SIGTERM, stop)
    with (folder / f"lock-{rank}").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (folder / f"twice-{attempt}-{rank}").touch()
        tell("running")
        (folder / f"ready-{attempt}-{rank}").touch()
        while not may_step(folder, attempt):
            time.sleep(LOOK_S)
        while step < STEPS:
            time.sleep(PACE_S)
            so_far = digest(rank, step + 1, so_far)
            step += 1
            replace(run_dir / f"checkpoint-{rank}.json", [step, so_far])
            while min(checkpoint(run_dir, other)[0] for other in range(world)) < step:
                time.sleep(LOOK_S)
        tell("done")


def may_step(folder: Path, attempt: int) -> bool:
    """Whether an attempt may make steps."""
    with contextlib.suppress(FileNotFoundError):
        return attempt >= int((folder / "go").read_text())
    return False


if __name__ == "__main__":
    main()
