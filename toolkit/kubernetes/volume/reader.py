"""Files of a run directory, read from the claim."""

import contextlib
import io
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml

from toolkit.kubernetes import local_state
from toolkit.kubernetes.client.connection import Denied, Missing
from toolkit.kubernetes.volume.files import Files
from toolkit.kubernetes.volume.helper_pod import run_dir_of
from toolkit.kubernetes.volume.transfers import runs, transfer
from toolkit.kubernetes.workloads import Object
from toolkit.profile import KubernetesProfile

if TYPE_CHECKING:
    from toolkit.kubernetes.run import KubernetesRun

__all__ = ["fetch", "read_file"]

T = TypeVar("T")


def read_file(run: "KubernetesRun", name: str) -> bytes | None:
    """Return a file of a run's run directory; None if it does not exist.

    It is read in a pod of the run while one runs, else in one that is made for it.

    Args:
        run: The run, or a point of a sweep.
        name: The file's path in the run directory, like `metrics.jsonl`.

    Raises:
        LauncherError: it cannot be read, or nothing outlives the pods.
    """
    content = io.BytesIO()
    complete = _with_files(run, lambda files: files.fetch(name, content))
    return content.getvalue() if complete else None


def fetch(run: "KubernetesRun", wanted: Mapping[str, Path]) -> set[str]:
    """Bring files of a run's run directory here, each whole or not at all.

    Args:
        run: The run, or a point of a sweep.
        wanted: Where they are to be, by their paths in the run directory.

    Returns:
        Those that there are not.

    Raises:
        LauncherError: they cannot be read, or nothing outlives the pods.
    """

    def bring(files: Files) -> set[str]:
        return {name for name, path in wanted.items() if not _brought(files, name, path)}

    return _with_files(run, bring)


def _brought(files: Files, name: str, path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(3)}")
    try:
        with draft.open("wb") as out:
            complete = files.fetch(name, out)
        if complete:
            draft.replace(path)
        return complete
    finally:
        draft.unlink(missing_ok=True)


def _with_files(run: "KubernetesRun", work: Callable[[Files], T]) -> T:
    """Do something with the run directory of a run."""
    cluster, kind, workload = run.cluster, run.kind, _object_of(run)
    pods: list[str] = []
    with contextlib.suppress(Denied):
        pods = [str(pod["metadata"]["name"]) for pod in cluster.pods(run.own_pods) if runs(pod)]
    for pod in pods[:1]:
        with contextlib.suppress(Missing):  # it has ended just now
            return work(Files(cluster, pod, kind.container, run_dir_of(workload, kind)))
    with transfer(cluster, kind, workload) as files:
        return work(files)


def _object_of(run: "KubernetesRun") -> Object:
    """Return the object of a run; where it is gone, as it was rendered."""
    if (obj := run.cluster.get(run.kind, run.object_name)) is not None:
        return obj
    whole = getattr(run, "sweep", run)
    profile = KubernetesProfile.model_validate(run.record.profile)
    text = local_state.manifest_of(whole.record.name, profile, run._environ)
    wanted = run.kind.kind, run.object_name
    rendered: list[Object] = [thing for thing in yaml.safe_load_all(text) if thing]
    return next(one for one in rendered if (one["kind"], one["metadata"]["name"]) == wanted)
