"""The provenance of a run: the project's commit and changes, and the versions at the submission.

The ranks' own versions, nodes and GPUs are in the run directory: the event `environment`.
"""

import contextlib
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import __version__
from toolkit.errors import LauncherError, NewerFormat
from toolkit.runs.records.git_commands import is_own_tree, rev_parse, run_git, without_filters
from toolkit.runs.records.record_version import require_known
from toolkit.text import secret_scan, untrusted

if TYPE_CHECKING:
    from toolkit.runs.run import Run

_DIFF_BYTES = 64 << 10
"""Byte limit of a diff that is kept."""

_GIT_S = 5.0
"""Time limit of git; with a large working tree on a slow disk, a run is submitted without it."""

_EVENTS_BYTES = 1 << 30
_LINE_BYTES = 1 << 22


def collect(folder: Path | None = None) -> dict[str, Any]:
    """Return the provenance of a run that is submitted now, for `launch.json`.

    Args:
        folder: The project; by default the current folder.
    """
    made: dict[str, Any] = {"toolkit": __version__, "python": platform.python_version()}
    if git := _git_state(folder or Path.cwd()):
        made["git"] = git
    return made


def _git_state(folder: Path) -> dict[str, Any]:
    """Return commit, branch and changes of a working tree; empty without a tree, or without git.

    Changes within a submodule count only after they are committed there.
    """
    try:
        if not is_own_tree(folder, limit_s=_GIT_S):
            return {}
        commit = rev_parse(folder, "HEAD", limit_s=_GIT_S)
        branch = rev_parse(folder, "--abbrev-ref", "HEAD", limit_s=_GIT_S)
        settings = without_filters(folder, limit_s=_GIT_S)
        own = "--ignore-submodules=dirty"  # a submodule has a separate configuration
        # With -z, because a git wrapper may print other lines.
        changed = "\0" in _git(folder, "status", "--porcelain", "-z", own, settings=settings)
        state: dict[str, Any] = {"commit": commit, "branch": branch, "dirty": changed}
        if changed:
            plain = ("--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short")
            diff = _git(folder, "diff", "HEAD", own, *plain, settings=settings)
            diff = "".join(diff.partition("diff --git ")[1:])
            if len(diff.encode()) <= _DIFF_BYTES:
                state["diff"] = secret_scan.conceal(
                    secret_scan.Mask(secret_scan.values_of(os.environ)).hide(diff)
                )
    except (OSError, subprocess.SubprocessError):
        return {}
    return state


def _git(folder: Path, *words: str, settings: Sequence[str] = ()) -> str:
    done = run_git(folder, *words, settings=settings, limit_s=_GIT_S)
    done.check_returncode()
    return done.stdout.decode("utf-8", "replace")


def environment_of(folder: Path) -> dict[str, Any]:
    """Return the versions and nodes that the newest start of the ranks has recorded.

    Raises:
        NewerFormat: a record has an unknown version.
    """
    newest: dict[str, Any] = {}
    for value in untrusted.stream_json(
        folder / "events.jsonl", limit=_EVENTS_BYTES, line_limit=_LINE_BYTES
    ):
        row = require_known(untrusted.mapping(value), "events.jsonl")
        if row.get("event") == "environment":
            newest = row
    return newest


_ENVIRONMENT = ("python", "torch", "cuda", "nccl", "driver", "packages", "packages_differ", "nodes")


def origin_of(run: "Run") -> dict[str, Any]:
    """Return the content of `toolkit show`."""
    made = dict(run.record.provenance)
    folder = run.run_dir
    if folder is not None:  # the list of runs does not contain diffs
        with contextlib.suppress(OSError, ValueError, NewerFormat):
            launch = untrusted.mapping(untrusted.read_json(folder / "launch.json"))
            made |= untrusted.mapping(require_known(launch, "launch.json").get("provenance"))
    environment: dict[str, Any] = {}
    unread = {}
    try:
        with run.recorded("events.jsonl") as recorded:
            environment = environment_of(recorded)
    except NewerFormat as error:
        unread = {"unread": str(error)}
    except LauncherError:
        pass  # the run directory cannot be seen from here
    created = datetime.fromtimestamp(run.record.created).astimezone()
    return {
        "uri": run.uri,
        "name": run.name,
        "job": run.record.job,
        "profile": run.record.profile.get("name"),
        "created": created.isoformat(timespec="seconds"),
        "run_dir": str(folder) if folder else None,
        "toolkit": made.get("toolkit"),
        "python": made.get("python"),
        "git": untrusted.mapping(made.get("git")) or None,
        "environment": {key: environment.get(key) for key in _ENVIRONMENT} if environment else None,
        **unread,
    }


def origin_lines(origin: Mapping[str, Any]) -> Iterator[str]:
    """Yield the content of `toolkit show` as lines."""
    for key in ("uri", "name", "job", "profile", "created", "run_dir"):
        if origin[key] is not None:
            yield f"{key + ':':<12} {origin[key]}"
    if git := origin["git"]:
        changed = ", with changes that are not committed" if git.get("dirty") else ""
        yield f"{'commit:':<12} {git.get('commit')} ({git.get('branch')}){changed}"
    if origin["toolkit"]:
        yield f"{'toolkit:':<12} {origin['toolkit']}, submitted with Python {origin['python']}"
    if ranks := origin["environment"]:
        for name in ("python", "torch", "cuda", "nccl", "driver", "packages"):
            if ranks[name]:
                yield f"{name + ':':<12} {ranks[name]}"
        if differing := ranks["packages_differ"]:
            yield f"{'':<12} ranks with other packages than rank 0: {differing}"
        for node in map(untrusted.mapping, untrusted.sequence(ranks["nodes"])):
            gpu = f" on {node['gpu']}" if node.get("gpu") else ""
            yield f"{'node:':<12} {node.get('host')}, ranks: {node.get('ranks')}{gpu}"
    if unread := origin.get("unread"):
        yield f"{'unread:':<12} {unread}"
