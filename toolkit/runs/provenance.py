"""What a run was made from: the project's commit and its changes, and the versions that submit it.

The ranks' own versions, nodes and GPUs are in the run directory: the event `environment`.
"""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.text import secret_scan, untrusted

_DIFF_BYTES = 64 << 10
"""The largest diff that is kept."""

_GIT_S = 5.0
"""How long git may take; in a large working tree on a slow disk, a run is submitted without it."""

_EVENTS_BYTES = 1 << 30
_LINE_BYTES = 1 << 22


def collect(folder: Path | None = None) -> dict[str, Any]:
    """Return the provenance of a run that is submitted now, as `launch.json` holds it.

    Args:
        folder: The project; by default the current folder.
    """
    made: dict[str, Any] = {"toolkit": __version__, "python": platform.python_version()}
    if git := _git_state(folder or Path.cwd()):
        made["git"] = git
    return made


def _git_state(folder: Path) -> dict[str, Any]:
    """Return commit, branch and changes of a working tree; empty without a tree, or without git.

    Git itself refuses a repository of another user, whose configuration could name programs.
    """
    try:
        commit = _git(folder, "rev-parse", "HEAD").strip()
        branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD").strip()
        changed = _git(folder, "status", "--porcelain")
        state: dict[str, Any] = {"commit": commit, "branch": branch, "dirty": bool(changed)}
        if changed:
            diff = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")
            if len(diff.encode()) <= _DIFF_BYTES:
                state["diff"] = secret_scan.conceal(
                    secret_scan.Mask(secret_scan.values_of(os.environ)).hide(diff)
                )
    except (OSError, subprocess.SubprocessError):
        return {}
    return state


def _git(folder: Path, *words: str) -> str:
    # Without locks: a `git commit` in another terminal must not fail because of a submission.
    done = subprocess.run(
        ["git", "-C", folder, "--no-optional-locks", *words],
        check=True,
        capture_output=True,
        timeout=_GIT_S,
    )
    return done.stdout.decode("utf-8", "replace")


def environment_of(folder: Path) -> dict[str, Any]:
    """Return what the newest start of the ranks has recorded about its versions and nodes."""
    newest: dict[str, Any] = {}
    for value in untrusted.stream_json(
        folder / "events.jsonl", limit=_EVENTS_BYTES, line_limit=_LINE_BYTES
    ):
        row = untrusted.mapping(value)
        if row.get("event") == "environment":
            newest = row
    return newest
