"""The list of runs: one line per submitted run, for this user on this machine.

Schedulers forget ended jobs within minutes; this file and the run directories keep them.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.errors import LauncherError, RunNotFound
from toolkit.runs.records import submission_journal
from toolkit.runs.records.state_dir import append, lock_file, state_folder
from toolkit.text import control, untrusted

_VERSION = 1
_BYTES = 1 << 30
_RECORD_BYTES = 1 << 20
_WORD = 4096

OBJECT_URI = re.compile(
    r"k8s://(?P<namespace>[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)/(?P<name>[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)"
)
"""The URI of a run in a Kubernetes namespace, submitted from here or not."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The data needed to reopen a run."""

    uri: str
    """The URI, which names the site and the run."""

    name: str
    job: str
    """The job's name."""

    profile: Mapping[str, Any]
    """The profile at the submission, in the form of a profile file."""

    created: float
    """When it was submitted, in seconds since 1970."""

    run_dir: Path | None = None
    """The run directory, if this machine can see it; the local mirror of one on another host."""

    remote_dir: str | None = None
    """The run directory's path on that host; None if this machine sees the directory itself."""

    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Commit, changes and versions at the submission (toolkit/runs/records/provenance.py); empty in
    records from older versions."""

    believed: bool = True
    """Whether the record is trusted as this user's own. The record of a run directory opened by its
    path may be anybody's, so it is shown but never acted on."""

    problem: str = ""
    """Why the run cannot be queried; empty if it can."""

    @property
    def address(self) -> tuple[str, str, str]:
        """The URI's scheme, the cluster or namespace, and the run's id there.

        >>> RunRecord(uri="slurm://c/7", name="a", job="a", profile={}, created=0.0).address
        ('slurm', 'c', '7')
        """
        scheme, _, path = self.uri.partition("://")
        site, _, run_id = path.rpartition("/")
        return scheme, site, run_id

    @property
    def begun(self) -> bool:
        """Whether the job id is not known yet: the submission may have been interrupted."""
        scheme, _, run_id = self.address
        return scheme == "slurm" and run_id == self.name

    @property
    def remote(self) -> str:
        """`HOST:PATH` of a run directory on another host; else empty."""
        host = str(self.profile.get("via") or "").partition(" ")[2]
        return f"{host}:{self.remote_dir}" if self.remote_dir else ""

    def as_json(self) -> dict[str, Any]:
        """Return the record as it is stored, without keys that only machines with mirrors set."""
        data = asdict(self) | {"version": _VERSION, "run_dir": self.run_dir and str(self.run_dir)}
        del data["believed"], data["problem"]
        return {k: v for k, v in data.items() if k != "remote_dir" or v is not None}


def intents_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the submission journal."""
    return state_folder(environ) / "submitting"


def _file(environ: Mapping[str, str], name: str = "runs.jsonl") -> Path:
    return state_folder(environ) / name


def check(*, environ: Mapping[str, str] = os.environ) -> None:
    """Make sure that a run can be recorded, before it is submitted.

    Raises:
        LauncherError: the user's list cannot be written.
    """
    path = _file(environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise LauncherError(
            f"the list of runs cannot be written: {error}; set XDG_STATE_HOME to another folder"
        ) from error


def add(run: RunRecord, *, environ: Mapping[str, str] = os.environ) -> RunRecord:
    """Record a run, in the user's list and in its run directory.

    Raises:
        LauncherError: the record cannot be written.
    """
    line = json.dumps(run.as_json())
    git = {key: value for key, value in run.provenance.get("git", {}).items() if key != "diff"}
    listed = replace(run, provenance={**run.provenance, "git": git}) if git else run
    try:
        # The user's list first: it may be on another disk than a full run directory.
        append(_file(environ), json.dumps(listed.as_json()))  # in a long list, no diffs
        if run.run_dir is not None:
            untrusted.write_bytes(run.run_dir / "launch.json", f"{line}\n".encode())
    except OSError as error:
        raise LauncherError(
            f"{run.uri} has started, but its record is incomplete: {error}"
        ) from error
    return run


def records(*, environ: Mapping[str, str] = os.environ) -> Iterator[RunRecord]:
    """Yield every submitted run, oldest first; lines that are not a record are skipped.

    Interrupted submissions with an unknown outcome are included in order of time.
    """
    # Read the journal first: a submission that finishes meanwhile is then in the list.
    cut_short = [
        parse(data.get("record")) for data in submission_journal.orphans(intents_folder(environ))
    ]
    runs: list[RunRecord] = []
    with contextlib.suppress(OSError):
        lines = untrusted.lines_of_json(_file(environ), limit=_BYTES)
        runs += [run for data in lines if (run := parse(data)) is not None]
    names = {run.name for run in runs}
    for run in cut_short:
        if run is not None and run.name not in names:
            older = (at for at in range(len(runs), 0, -1) if runs[at - 1].created <= run.created)
            runs.insert(next(older, 0), run)
    yield from runs


def find(name: str, *, trust: bool = False, environ: Mapping[str, str] = os.environ) -> RunRecord:
    """Return the run with this URI, name, or run directory.

    Args:
        name: The URI, name or run directory.
        trust: Whether to trust a run directory that is not in the user's list.
        environ: The variables that locate the user's list of runs.

    Raises:
        RunNotFound: the run does not exist.
    """
    all_records = list(records(environ=environ))
    for run in reversed(all_records):
        if name in (run.uri, run.name) or (name and name in (run.remote, run.remote_dir)):
            return run
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # a name need not be a path
        folder = Path(name).resolve()
        for run in reversed(all_records):
            own = run.run_dir
            if own is not None and own.name == folder.name and own.resolve() == folder:
                return run
        record = parse(untrusted.read_json(folder / "launch.json", limit=_RECORD_BYTES))
        if record is not None:
            # The opened directory is the run directory, even if its files name another.
            return replace(record, run_dir=folder, remote_dir=None, believed=trust)
    of_job = [run for run in all_records if run.job == name]
    latest = ", ".join(run.name for run in (of_job or all_records)[-3:])
    whose = f" of job {name!r}" if of_job else ""
    hint = f"the latest{whose} are {latest}" if latest else "nothing was submitted from here yet"
    raise RunNotFound(f"no run {name!r}; {hint} (see `toolkit list`)")


def find_point(
    name: str, *, trust: bool = False, environ: Mapping[str, str] = os.environ
) -> tuple[RunRecord, str | None]:
    """Return a run, or a sweep and the key of a point: `RUN_7`, or `RUN/NAME` of the point.

    The arguments and errors are those of `find`.
    """
    try:
        return find(name, trust=trust, environ=environ), None
    except RunNotFound:
        whole = name.rstrip("/")
        for separator in ("_", "-", "/"):  # Kubernetes names a point RUN-7
            sweep, separated, point = whole.rpartition(separator)
            if separated and (separator == "/" or point.isdecimal()):
                with contextlib.suppress(RunNotFound):
                    return find(sweep, trust=trust, environ=environ), point
        raise


def mark_cancelled(uri: str, *, environ: Mapping[str, str] = os.environ) -> None:
    """Record that a run was cancelled, for schedulers that do not record a cancellation."""
    with contextlib.suppress(OSError), _turn(environ):  # a full disk must not keep a job running
        append(_file(environ, "cancelled"), uri)


def is_cancelled(uri: str, *, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this user cancelled the run from this machine."""
    try:
        return uri in untrusted.read_text(_file(environ, "cancelled"), limit=_BYTES).splitlines()
    except OSError:
        return False


def withdraw_cancelled(uri: str, *, environ: Mapping[str, str] = os.environ) -> None:
    """Remove the record of a run's cancellation, because the run is resubmitted."""
    path = _file(environ, "cancelled")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _turn(environ):
            lines = untrusted.read_text(path, limit=_BYTES).splitlines()
            others = "".join(f"{line}\n" for line in lines if line != uri)
            draft.write_text(others, encoding="utf-8")
            draft.replace(path)  # a full disk must not lose the other runs' records
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()


@contextlib.contextmanager
def _turn(environ: Mapping[str, str]) -> Iterator[None]:
    """Let one process at a time change the list of cancelled runs."""
    with _file(environ, "cancelled.lock").open("a", encoding="utf-8") as lock:
        lock_file(lock, wait_s=None)
        yield


def parse(data: Any) -> RunRecord | None:
    """Return a record written by `as_json`; None if the line does not describe a run.

    A record that names a run but is otherwise not understood, for example from a newer version, has
    a `problem`.
    """
    content = untrusted.mapping(data)
    uri, name, job = (_word(content.get(key)) for key in ("uri", "name", "job"))
    if not uri or not name:
        return None
    run_dir, remote_dir = content.get("run_dir"), content.get("remote_dir")
    created = untrusted.moment(content.get("created"))
    profile = content.get("profile")
    odd = [
        key
        for key, good in {
            "job": job,
            "created": created is not None,
            "profile": isinstance(profile, dict),
            "run_dir": run_dir is None or _is_path(_word(run_dir)),
            "remote_dir": remote_dir is None or _word(remote_dir),
        }.items()
        if not good
    ]
    problem = f"its record has an invalid {', '.join(odd)}" if odd else ""
    if content.get("version") != _VERSION:
        version = untrusted.whole(content.get("version"))
        problem = f"its record is of version {version}, and this one reads {_VERSION}"
    if problem or created is None or not isinstance(profile, dict):
        return RunRecord(uri=uri, name=name, job=name, profile={}, created=0.0, problem=problem)
    return RunRecord(
        uri=uri,
        name=name,
        job=job,
        profile=profile,
        created=created,
        run_dir=Path(run_dir) if run_dir else None,
        remote_dir=remote_dir,
        provenance=untrusted.mapping(content.get("provenance")),
    )


def _is_path(text: str) -> bool:
    return text.startswith("/") and (
        len(text) < 64 or all(len(os.fsencode(part)) < 256 for part in text.split("/"))
    )


def _word(value: Any) -> str:
    """Return the text if it fits in one line; else an empty text."""
    good = isinstance(value, str) and len(value) <= _WORD and control.printable(value) == value
    return value if good and "\n" not in value else ""
