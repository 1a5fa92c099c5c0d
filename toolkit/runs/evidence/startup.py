"""The reason why an attempt has made no step: missing nodes, the rendezvous, or a long first step.

torchrun creates its log folder on each node when it starts, and the ranks' folders in it after the
rendezvous of all nodes (docs/reference/run-directory.md).
"""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.runs.evidence.progress import Progress
from toolkit.runs.records.log_reader import attempt_numbers, modified_at, nodes_of
from toolkit.text import control, untrusted
from toolkit.text.quantities import rounded_duration
from toolkit.text.yaml_reader import read_document

_NODE = re.compile(r"node-(\d{1,6})")
_START = re.compile(r"attempt_(\d{1,6})")
_MOST_NAMED = 4
_JOB_BYTES = 1 << 20
_TRAIN = ("train", "toolkit_train")
"""The names of the module that records its steps, in a checkout and in the wheel."""


def waits_for(run_dir: Path, progress: Progress | None, *, now: float | None = None) -> str | None:
    """Return what the newest attempt of a running run waits for; None once it has made a step.

    It is also None if the run directory does not show the cause: before the first attempt, or after
    the start of ranks with a script that may never record a step.

    Args:
        run_dir: The run directory itself.
        progress: The progress of the run.
        now: The time, in seconds since 1970; by default the present.
    """
    attempts = attempt_numbers(run_dir)
    if not attempts or (progress is not None and progress.attempt >= attempts[-1]):
        return None
    folder = run_dir / f"logs/attempt-{attempts[-1]}"
    started = _nodes_with_torchrun(folder, run_dir)
    ranks = [path for path in started.values() if path is not None]
    job = _job(run_dir)
    if ranks:
        began = min(map(modified_at, ranks))
        # The file may contain an unrecognised step of this attempt: from a newer version, or
        # without the attempt's number.
        if modified_at(run_dir / "metrics.jsonl") > began or not _records_steps(job, run_dir):
            return None
        now = time.time() if now is None else now
        return f"the first step; its ranks started {rounded_duration(max(now - began, 0.0))} ago"
    nnodes = _nnodes(job)
    if nnodes is None or nnodes == 1:
        return "torchrun" if not started else "the start of its ranks"
    if len(started) >= nnodes:
        return f"the rendezvous of {nnodes} nodes"
    return f"torchrun on {_missing(folder, started, nnodes)}"


def _nodes_with_torchrun(folder: Path, run_dir: Path) -> dict[str, Path | None]:
    """Return the newest ranks' folder by node or pod, for those where torchrun has started."""
    started: dict[str, Path | None] = {}
    for node in untrusted.entries(folder, below=run_dir):
        if not node.is_folder or node.name == "watchdog":
            continue
        for logs in untrusted.entries(folder / node.name, below=run_dir):
            if logs.is_folder:
                starts = untrusted.entries(folder / node.name / logs.name, below=run_dir)
                numbers = [int(match[1]) for one in starts if (match := _START.fullmatch(one.name))]
                ranks = folder / node.name / logs.name / f"attempt_{max(numbers, default=0)}"
                has_ranks = bool(untrusted.entries(ranks, below=run_dir))
                started[node.name] = ranks if has_ranks else started.get(node.name)
    return started


def _missing(folder: Path, started: dict[str, Path | None], nnodes: int) -> str:
    """Return the nodes without torchrun by name, if the nodes have numbers."""
    share = f"{nnodes - len(started)} of {nnodes} nodes"
    if any(_NODE.fullmatch(name) is None for name in started):  # pods
        return share
    hosts = nodes_of(folder)
    lacking = [number for number in range(nnodes) if f"node-{number}" not in started]
    names = [hosts[n] if len(hosts) == nnodes else f"node {n}" for n in lacking[:_MOST_NAMED]]
    more = ", …" if len(lacking) > _MOST_NAMED else ""
    return f"{share}: {', '.join(map(control.printable, names))}{more}"


def _job(run_dir: Path) -> Mapping[str, Any]:
    """Return the job file of a run, if it can be read."""
    try:
        text = untrusted.read_text(run_dir / "job.yaml", limit=_JOB_BYTES, below=run_dir)
        return untrusted.mapping(read_document(text, "job.yaml").data)
    except (OSError, InputError):
        return {}


def _records_steps(job: Mapping[str, Any], run_dir: Path) -> bool:
    """Whether the run is expected to record steps; not every script does."""
    return (
        job.get("module") in _TRAIN
        or job.get("log_pattern") is not None
        or os.path.lexists(run_dir / "events.jsonl")
    )


def _nnodes(job: Mapping[str, Any]) -> int | None:
    """Return the job's minimum number of nodes; None for an unreadable job file."""
    if not job:
        return None
    nnodes = untrusted.mapping(job.get("resources")).get("nnodes", 1)
    least = untrusted.mapping(nnodes).get("min") if isinstance(nnodes, dict) else nnodes
    return untrusted.whole(least, least=1, most=1 << 20)
