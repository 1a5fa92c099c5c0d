"""Local files of runs on Kubernetes, whose run directories cannot be seen from here.

They are the job file, the manifest that the run was submitted by, and the files for its pods; the
points of a sweep, so that a long list of runs reads no job files; and how each object has ended,
since the cluster deletes it after `ttl`.
"""

import contextlib
import gzip
import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from toolkit.errors import LauncherError
from toolkit.job.spec import JobSpec, load
from toolkit.kubernetes.objects import manifest_for
from toolkit.planning import plan
from toolkit.profile import KubernetesProfile
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.state_dir import state_folder
from toolkit.text import untrusted
from toolkit.text.yaml_reader import write_document

__all__ = [
    "end_of",
    "folder_of",
    "forget",
    "forget_end",
    "job_of",
    "keep",
    "manifest_of",
    "points_of",
    "remember_end",
]

Settings = Mapping[str, str | bool]

_MANIFEST = "manifest.yaml.gz"
_MANIFEST_BYTES = 256 << 20
"""Packed manifests of a hundred thousand points; each is some 15 KB long before."""

_POINTS_BYTES = 64 << 20
"""Names and settings of a hundred thousand points."""


def keep(
    name: str,
    job: JobSpec,
    environ: Mapping[str, str],
    *,
    files: Mapping[str, bytes],
    manifest: str,
) -> Path:
    """Write down the job of a run, its manifest, and the files that go with it.

    Returns:
        The folder.

    Raises:
        LauncherError: nothing can be written.
    """
    folder = folder_of(name, environ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.yaml").write_text(write_document(job.as_written()), encoding="utf-8")
        (folder / _MANIFEST).write_bytes(gzip.compress(manifest.encode(), compresslevel=1))
        if job.sweep is not None:
            points = [[point.name, dict(point.settings)] for point in job.points]
            (folder / "points.json").write_text(json.dumps(points), encoding="utf-8")
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    except OSError as error:
        raise LauncherError(
            f"the job cannot be kept: {error}; set XDG_STATE_HOME to another folder"
        ) from error
    return folder


def forget(name: str, environ: Mapping[str, str]) -> None:
    """Delete the local files of a run that was never created."""
    shutil.rmtree(folder_of(name, environ), ignore_errors=True)


def job_of(name: str, environ: Mapping[str, str]) -> JobSpec:
    """Return the job of a run.

    Raises:
        LauncherError: it was submitted elsewhere.
        InputError: this version cannot read it.
    """
    path = folder_of(name, environ) / "job.yaml"
    if not path.is_file():
        raise LauncherError(
            f"the job of {name} is not kept here ({path}); submit it again from its job file"
        )
    return load(path)


def manifest_of(
    name: str,
    profile: KubernetesProfile,
    environ: Mapping[str, str],
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> str:
    """Return the manifest that a run was submitted by.

    Args:
        name: The run's name.
        profile: Where it was submitted.
        environ: Where the state folder is looked for.
        files: The files that it was submitted with.

    Raises:
        LauncherError: it was submitted elsewhere, or cannot be read.
    """
    path = folder_of(name, environ) / _MANIFEST
    try:
        packed = untrusted.read_bytes(path, limit=_MANIFEST_BYTES)
        return gzip.decompress(packed).decode()
    except FileNotFoundError:  # version 0.1 has submitted it, which kept no manifest
        return manifest_for(plan(job_of(name, environ), profile, run_name=name), files)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise LauncherError(f"the manifest of {name} cannot be read: {error}") from error


def points_of(name: str, environ: Mapping[str, str]) -> list[tuple[str, Settings]]:
    """Return name and settings of each point of a sweep; none where the run is none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        points = untrusted.read_json(folder_of(name, environ) / "points.json", limit=_POINTS_BYTES)
        return [(str(point), dict(settings)) for point, settings in points]
    return []


def remember_end(
    name: str, object_name: str, status: RunStatus, environ: Mapping[str, str]
) -> None:
    """Write down how an object of a run has ended, where the run is kept."""
    text = json.dumps({"state": status.state, "reason": status.reason})
    with contextlib.suppress(OSError):
        if not folder_of(name, environ).is_dir():
            return
        path = _end(name, object_name, environ)
        if not path.exists() or untrusted.read_text(path) != text:
            untrusted.write_bytes(path, text.encode())


def end_of(name: str, object_name: str, environ: Mapping[str, str]) -> RunStatus | None:
    """Return the final status of an object of a run, as it was last seen; None if it had not."""
    try:
        end = untrusted.read_json(_end(name, object_name, environ))
        return RunStatus(state=RunState(end["state"]), reason=str(end["reason"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget_end(name: str, object_name: str, environ: Mapping[str, str]) -> None:
    """Take back that an object of a run has ended, since it is made again."""
    with contextlib.suppress(OSError):
        _end(name, object_name, environ).unlink(missing_ok=True)


def _end(name: str, object_name: str, environ: Mapping[str, str]) -> Path:
    return folder_of(name, environ) / f"ended-{object_name}.json"


def folder_of(name: str, environ: Mapping[str, str]) -> Path:
    """Return the folder in which a run is kept, whether or not there is one."""
    return state_folder(environ) / "kubernetes" / name
