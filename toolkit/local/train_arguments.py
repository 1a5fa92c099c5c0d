"""Arguments of a job that this installation's `train` refuses, checked before the submission."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import toolkit
from toolkit.errors import Problem
from toolkit.job.environment import without_outer_job
from toolkit.job.spec import JobSpec
from toolkit.planning.plans import refusal
from toolkit.text import untrusted
from toolkit.text.answers import values

_MODULE = "train"
_TIMEOUT_S = 30.0
_MOST_POINTS = 20
_PREFIX = "train: "
"""The beginning of its messages, whatever the module's name."""
_PROOF_S = 900.0
_MOST_RANKS = 16
"""Limit of ranks that a proof starts on this machine."""


def train_problems(job: JobSpec, *, here: bool) -> Iterator[Problem]:
    """Yield the problems that `train` would report about a job's arguments.

    It imports neither torch nor code from the folder: another `train`, there or in `PYTHONPATH`,
    is not checked.

    Args:
        job: The job; for a sweep, its first points are checked.
        here: Whether the job runs on this machine, so that files in its arguments must exist.
    """
    folder = Path(job.workdir or ".")
    if job.module != _MODULE or "PYTHONPATH" in job.env or not folder.is_dir():
        return
    if _another_train(job):
        return
    points = job.points[:_MOST_POINTS]
    argvs: list[Sequence[str]] = [point.args for point in points] or [job.args]
    need = job.resources
    request = {
        "argvs": argvs,
        "world_size": need.max_nodes * need.nproc_per_node,
        "local_world_size": need.nproc_per_node,
        "here": here,
    }
    which: dict[str, list[int]] = {}
    for index, problems in enumerate(_answers(request, folder)):
        for problem in problems:
            which.setdefault(problem, []).append(index)
    for problem, indices in which.items():
        more = f" and {len(indices) - 1} more" if indices[1:] else ""
        at = f"point {indices[0]}{more}: " if len(indices) < len(argvs) else ""
        yield refusal("train-arguments", f"args: {at}{problem}", "args")


def proof_problems(job: JobSpec) -> Iterator[Problem]:
    """Yield why a job that starts `train` would train differently from one process.

    The job's number of ranks is started on the CPUs of this machine, with the job's task.

    Args:
        job: The job; for a sweep, its first point is checked.
    """
    need = job.resources
    ranks = need.max_nodes * need.nproc_per_node
    why = ""
    if job.module != _MODULE:
        why = f"--verify proves only jobs with `module: {_MODULE}`, not other scripts"
    elif ranks > _MOST_RANKS:
        why = (
            f"--verify starts all ranks of the job on this machine, at most {_MOST_RANKS}, "
            f"not {ranks}; prove a smaller layout of the same kind with --set"
        )
    elif where := _another_train(job):
        why = f"--verify proves only the installed {_MODULE}, and the job starts that in {where}"
    if why:
        yield refusal("train-arguments", why)
        return
    args = next((point.args for point in job.points), job.args)
    argv = [sys.executable, "-P", "-m", _MODULE]
    argv += ["--spawn", str(ranks)] if ranks > 1 else []
    argv += [*map(str, args), "--device", "auto", "--backend", "auto", "--verify-only"]
    environ = {**without_outer_job(local=True), **job.env, "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            argv,
            cwd=job.workdir or ".",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=_PROOF_S,
            env=environ,
        )
    except subprocess.TimeoutExpired:
        yield refusal("train-arguments", f"--verify: no proof within {_PROOF_S:.0f} s")
        return
    except OSError as error:
        yield refusal("train-arguments", f"--verify: cannot start {_MODULE}: {error}")
        return
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(_PREFIX)]
        text = (lines or done.stderr.splitlines() or ["no message"])[-1]
        yield refusal("train-arguments", f"args: {text.removeprefix(_PREFIX)}", "args")


def _another_train(job: JobSpec) -> str:
    """Return the folder in which the job finds another `train` than ours; '' for none.

    It imports nothing.
    """
    own = Path(toolkit.__file__).resolve().parents[1]
    folder = Path(job.workdir or ".")
    paths = (job.env.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
    entries = [entry for path in paths if path for entry in path.split(os.pathsep)]
    for entry in (".", *entries):
        at = (folder / entry).resolve()
        found = PathFinder.find_spec(_MODULE, [str(at)])
        # Without a file, it is a folder of another kind: all modules come before it.
        if found and found.origin and at != own:
            return str(at)
    return ""


def _answers(request: dict[str, object], folder: Path) -> list[list[str]]:
    """Return the problems of each command line; empty without an answer."""
    # -P: nothing is imported from the folder, which is untrusted.
    argv = [sys.executable, "-P", "-m", f"{_MODULE}.cli.check"]
    try:
        done = subprocess.run(
            argv,
            input=json.dumps(request),
            cwd=folder,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=_TIMEOUT_S,
            check=True,
            env=without_outer_job(local=True),
        )
    except (OSError, subprocess.SubprocessError):
        return []
    answers = values(done.stdout, "problems")
    found: list[list[str]] = untrusted.parse_json(answers[-1]) if answers else []
    return found
