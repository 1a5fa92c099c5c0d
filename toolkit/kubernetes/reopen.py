"""Runs whose submission was cut short: the client was killed, or got no answer.

A submission is written down first (toolkit/runs/submission_journal.py). When the run is opened
later, its existing objects are listed, and half-created ones are completed.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.kubernetes import local_state
from toolkit.kubernetes.client.connection import Denied
from toolkit.kubernetes.client.resources import Cluster, selector_of
from toolkit.kubernetes.objects import Group, groups_for, is_of
from toolkit.kubernetes.submission import TOGETHER, complete, withdraw
from toolkit.kubernetes.workloads import Kind, Object
from toolkit.planning.pods import SWEEP_LABEL
from toolkit.profile import KubernetesProfile
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.submission_journal import Intent
from toolkit.text import untrusted

__all__ = [
    "FORGOTTEN_S",
    "SETTLED_S",
    "cut_short",
    "groups_begun",
    "missing_of",
    "tidy",
]

_FILE_BYTES = 1 << 34
"""The arguments of a call; they are as large as the user's pickles."""

SETTLED_S = 120.0
"""After this time nothing is under way any more: an API server gives up a request after 60 s."""

FORGOTTEN_S = 86_400.0
"""How long a run is listed that was never created, in seconds."""


def groups_begun(
    intent: Intent,
    profile: KubernetesProfile,
    kind: Kind,
    name: str,
    environ: Mapping[str, str],
) -> list[Group]:
    """Return the objects of an interrupted submission.

    Raises:
        LauncherError: its local files are gone.
    """
    folder = local_state.folder_of(name, environ)
    try:
        files = {str(path): _file(folder, str(path)) for path in intent.data["files"]}
    except (KeyError, OSError, TypeError) as error:
        raise LauncherError(f"what was to be submitted as {name} is gone: {error}") from error
    return groups_for(local_state.manifest_of(name, profile, environ, files), kind, files)


def _file(folder: Path, path: str) -> bytes:
    return untrusted.read_bytes(folder / path, limit=_FILE_BYTES, below=folder)


def missing_of(cluster: Cluster, kind: Kind, groups: Sequence[Group], name: str) -> list[Group]:
    """Return the runs whose objects do not exist.

    Raises:
        LauncherError: the API server does not answer.
    """
    there = _there(cluster, kind, groups, name)
    return [group for group in groups if group.name not in there]


def tidy(
    cluster: Cluster,
    kind: Kind,
    groups: Sequence[Group],
    missing: Sequence[Group],
    *,
    settled: bool,
) -> None:
    """Complete each half-created run, and delete companions of runs that were never created.

    Runs are made some at a time, in order: only the last of them can be half done.
    """
    absent = {group.name for group in missing}
    last = max((n for n, group in enumerate(groups) if group.name not in absent), default=0)
    start = last - last % TOGETHER
    for group in groups[start : start + 2 * TOGETHER]:
        if group.name not in absent:
            obj = cluster.get(kind, group.name)
            if obj is not None and (group.companions or group.payload):
                complete(cluster, kind, group, obj)
        elif settled:
            withdraw(cluster, group)


def cut_short(kind: Kind, begun: float, name: str) -> RunStatus:
    """Return where a run stands that has no object.

    Args:
        kind: The kind of its workload.
        begun: When its submission went on last, in seconds since 1970.
        name: By which it is submitted again.
    """
    if time.time() < begun + SETTLED_S:
        reason = f"its submission was cut short, and the cluster has no {kind.kind} of it yet"
        return RunStatus(state=RunState.UNKNOWN, reason=reason)
    reason = (
        f"its submission was cut short before the cluster had the {kind.kind}; "
        f"`toolkit resubmit {name}` submits it"
    )
    return RunStatus(state=RunState.FAILED, reason=reason)


def _there(cluster: Cluster, kind: Kind, groups: Sequence[Group], name: str) -> dict[str, Object]:
    """Return the objects that there are, by name."""
    if len(groups) > 1:
        try:
            items, _ = cluster.objects(kind, selector_of(SWEEP_LABEL, [name]))
        except Denied:  # the right to submit need not include the right to list
            pass
        else:
            return {str(item["metadata"]["name"]): item for item in items}
    pairs = ((group, cluster.get(kind, group.name)) for group in groups)
    return {
        group.name: one for group, one in pairs if one is not None and is_of(group.workload, one)
    }
