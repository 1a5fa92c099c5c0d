"""The points of a sweep, in order, from `points.jsonl` in its run directory."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.job.sweep import Point
from toolkit.runs.records.registry import RunRecord
from toolkit.text import untrusted

_POINTS, _VERSION, _BYTES = "points.jsonl", 1, 64 << 20
_NAME = re.compile(r"(?!\.)[^/\x00-\x1f]{1,255}")
"""The name of a point, and of its folder in the sweep's run directory."""


def record_of_point(whole: RunRecord, index: int, folder: str) -> RunRecord:
    """Return the record of a point, derived from its sweep's record."""
    assert whole.run_dir is not None
    return replace(
        whole,
        uri=f"{whole.uri}_{index}",
        name=f"{whole.name}/{folder}",
        run_dir=whole.run_dir / folder,
        remote_dir=whole.remote_dir and f"{whole.remote_dir}/{folder}",
    )


def write_points(run_dir: Path, points: Sequence[Point]) -> None:
    """Write the points of a sweep.

    Raises:
        LauncherError: they cannot be written.
    """
    lines = [
        json.dumps(
            {"version": _VERSION, "index": p.index, "name": p.name, "settings": dict(p.settings)}
        )
        for p in points
    ]
    try:
        untrusted.write_bytes(run_dir / _POINTS, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise LauncherError(f"{run_dir} cannot be written: {error.strerror}") from error


def has_points(run_dir: Path | None) -> bool:
    """Whether a run is a sweep."""
    path = f"{run_dir}/{_POINTS}"
    return run_dir is not None and os.path.exists(path)  # noqa: PTH110  # for each of many runs


def read_points(run_dir: Path | None) -> list[tuple[str, dict[str, str | bool]]]:
    """Return name and settings of each point; empty if the run is not a sweep.

    Raises:
        LauncherError: a point cannot be read, so the points after it would get wrong indices.
    """
    if run_dir is None or not has_points(run_dir):
        return []
    try:
        lines = untrusted.read_bytes(run_dir / _POINTS, limit=_BYTES).split(b"\n")
        points = [_point(line) for line in lines if line]
        if not points:  # a sweep has at least one
            raise ValueError(_POINTS)
        return points
    except (OSError, ValueError) as error:
        why = (
            error.strerror
            if isinstance(error, OSError)
            else "it is incomplete, or was not written by this toolkit"
        )
        raise LauncherError(f"the points of the sweep cannot be read: {_POINTS}: {why}") from None


def _point(line: bytes) -> tuple[str, dict[str, str | bool]]:
    data = untrusted.mapping(untrusted.parse_json(line))
    name, settings = data.get("name"), data.get("settings")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(settings, dict):
        raise ValueError(line)
    if not all(isinstance(value, str | bool) for value in settings.values()):
        raise ValueError(line)
    return name, settings
