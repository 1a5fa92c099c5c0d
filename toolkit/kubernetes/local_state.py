"""Local files of runs on Kubernetes: the client cannot see their run directories.

They hold the job file, the submitted manifest, and the files for the pods. The points of a sweep
have a file, so that a long list of runs reads no job files. The final status and the restarts of
each object are kept because the cluster deletes it after `ttl`.
"""

import contextlib
import gzip
import json
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.job.spec import JobSpec, load
from toolkit.runs.evidence.restarts import Restart
from toolkit.runs.records.state_dir import state_folder
from toolkit.runs.state import RunState, RunStatus
from toolkit.text import untrusted
from toolkit.text.yaml_reader import write_document

Settings = Mapping[str, str | bool]

_MANIFEST_BYTES = 256 << 20
"""Compressed manifests of a hundred thousand points, each about 15 KB uncompressed."""

_POINTS_BYTES = 64 << 20
"""Names and settings of a hundred thousand points."""


class LocalState:
    """The local files of a run, or of a sweep with all its points; they may be missing."""

    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        self.name = name
        self.folder = state_folder(environ) / "kubernetes" / name
        self._job = self.folder / "job.yaml"
        self._manifest = self.folder / "manifest.yaml.gz"
        self._points = self.folder / "points.json"

    def write(self, job: JobSpec, manifest: str, files: Mapping[str, bytes]) -> None:
        """Write the job, its manifest, and its files before the submission.

        Raises:
            LauncherError: the files cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._job.write_text(write_document(job.as_written()), encoding="utf-8")
            self._manifest.write_bytes(gzip.compress(manifest.encode(), compresslevel=1))
            if job.sweep is not None:
                points = [[point.name, dict(point.settings)] for point in job.points]
                self._points.write_text(json.dumps(points), encoding="utf-8")
            for path, content in files.items():
                (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / path).write_bytes(content)
        except OSError as error:
            raise LauncherError(
                f"the job cannot be kept: {error}; set XDG_STATE_HOME to another folder"
            ) from error

    def delete(self) -> None:
        """Delete the files of a run that was never created."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def job(self) -> JobSpec:
        """Return the job of the run.

        Raises:
            LauncherError: it was submitted elsewhere.
            InputError: this version cannot read it.
        """
        if not self._job.is_file():
            raise LauncherError(
                f"the job of {self.name} is not kept here ({self._job}); submit it again from its "
                "job file"
            )
        return load(self._job)

    def manifest(self) -> str:
        """Return the submitted manifest of the run.

        Raises:
            LauncherError: it was submitted elsewhere, or the manifest cannot be read.
        """
        try:
            packed = untrusted.read_bytes(self._manifest, limit=_MANIFEST_BYTES)
            return gzip.decompress(packed).decode()
        except FileNotFoundError as error:
            raise LauncherError(
                f"the manifest of {self.name} is not kept here ({self._manifest})"
            ) from error
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise LauncherError(f"the manifest of {self.name} cannot be read: {error}") from error

    def points(self) -> list[tuple[str, Settings]]:
        """Return name and settings of each point of a sweep; empty for any other run."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            points = untrusted.read_json(self._points, limit=_POINTS_BYTES)
            return [(str(point), dict(settings)) for point, settings in points]
        return []

    def end(self, object_name: str) -> RunStatus | None:
        """Return the recorded final status of an object; None if there is none."""
        try:
            end = untrusted.read_json(self._end(object_name))
            return RunStatus(state=RunState(end["state"]), reason=str(end["reason"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write_end(self, object_name: str, status: RunStatus) -> None:
        """Record the final status of an object, if the run has a folder."""
        text = json.dumps({"state": status.state, "reason": status.reason})
        self._write(self._end(object_name), text)
        with contextlib.suppress(OSError):
            self._start(object_name).unlink(missing_ok=True)

    def delete_end(self, object_name: str) -> None:
        """Delete the recorded final status of an object that continues or is recreated."""
        with contextlib.suppress(OSError):
            self._end(object_name).unlink(missing_ok=True)
            self._restarts(object_name).unlink(missing_ok=True)

    def restarts(self, object_name: str) -> list[Restart] | None:
        """Return the recorded restarts of an object that has succeeded; None if there are none."""
        try:
            found = untrusted.read_json(self._restarts(object_name))
            return [
                Restart(
                    attempt=int(one["attempt"]),
                    restart=int(one["restart"]),
                    why=str(one["why"]),
                    time=float(one["time"]),
                    away_s=float(one["away_s"]),
                )
                for one in found
            ]
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write_restarts(self, object_name: str, restarts: Iterable[Restart]) -> None:
        """Record the restarts of an object, if the run has a folder."""
        self._write(self._restarts(object_name), json.dumps(list(map(asdict, restarts))))

    def start(self, object_name: str) -> str:
        """Return the uid of an object that was seen running; empty if none was."""
        try:
            return untrusted.read_text(self._start(object_name))
        except OSError:
            return ""

    def write_start(self, object_name: str, uid: str) -> None:
        """Record that an object runs, if the run has a folder."""
        self._write(self._start(object_name), uid)

    def _write(self, path: Path, text: str) -> None:
        with contextlib.suppress(OSError):
            if not self.folder.is_dir():
                return
            if not path.exists() or untrusted.read_text(path) != text:
                untrusted.write_bytes(path, text.encode())

    def _end(self, object_name: str) -> Path:
        return self.folder / f"ended-{object_name}.json"

    def _restarts(self, object_name: str) -> Path:
        return self.folder / f"restarts-{object_name}.json"

    def _start(self, object_name: str) -> Path:
        return self.folder / f"started-{object_name}"
