"""Calls on all ranks of a group of pods, on Kubernetes."""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from submitit.core import core
from submitit.core.utils import DelayedSubmission, UncompletedJobError

from toolkit.errors import LauncherError, PlanError, ProfileError
from toolkit.functions.executors import RunExecutor
from toolkit.functions.job import FunctionJob
from toolkit.functions.payload import files_of
from toolkit.functions.worker import weight
from toolkit.job.spec import JobSpec
from toolkit.kubernetes import KubernetesLauncher, KubernetesRun, volume
from toolkit.kubernetes.delivered_files import whole_files
from toolkit.kubernetes.workloads import PAYLOAD_LIMIT, apart
from toolkit.planning import plan
from toolkit.profile import KubernetesProfile, Profile, as_profile
from toolkit.runs.state_dir import state_folder
from toolkit.text import untrusted
from toolkit.text.quantities import format_size

__all__ = ["KubernetesExecutor", "PodJob", "files_in"]

R = TypeVar("R", covariant=True)

_SIZE = ".size"
_NAME = re.compile(r"outcome\.json|function/attempt-\d{1,6}/rank-\d{1,9}\.(?:pkl|error\.json)")


class PodJob(FunctionJob[R], scheme="k8s"):
    """A call in pods, whose disks this process does not see: it reads results from their logs.

    For a file that is too large the log holds only its size; the file is read from the claim.
    """

    def _fetch_large(self, ranks: Sequence[int]) -> None:
        paths = [self._call.result(rank) for rank in ranks]
        if not all(path.exists() or size_of(path) for path in paths):
            self._fetch()
        large = [path for path in paths if not path.exists() and size_of(path)]
        if not large:
            return
        assert isinstance(self.run, KubernetesRun)
        try:
            if self.run.record.profile.get("runs_claim") is None:
                raise LauncherError(
                    "results come back in the logs of the pods, a few MiB from each; name a "
                    "runs_claim in the profile, which has room for more, or return less"
                )
            base = self._call.run_dir
            missing = volume.fetch(self.run, {str(p.relative_to(base)): p for p in large})
            if missing:
                raise LauncherError(f"not found on the claim: {', '.join(sorted(missing))}")
        except LauncherError as error:
            sizes = format_size(sum(map(size_of, large)))
            raise UncompletedJobError(
                f"Job {self.job_id} has results of {sizes} that cannot be copied here: {error}"
            ) from error

    def _has_returned(self, path: Path) -> bool:
        return super()._has_returned(path) or bool(size_of(path))

    def _fetch(self) -> None:
        assert isinstance(self.run, KubernetesRun)
        # A failure is tried again, and at last reported as a missing file.
        with contextlib.suppress(LauncherError):
            write(files_in(self.run.delivered(), self.run.key), self._call.run_dir)

    def _get_logs_string(self, name: str) -> str | None:
        """Return the output of a rank; a pod's log has both streams in one."""
        lines = list(self.run.logs(ranks=[self._rank or 0]))
        return "".join(f"{line}\n" for line in lines) if lines else None


class KubernetesExecutor(RunExecutor[KubernetesProfile]):
    """Calls functions on every rank of a torchrun group in pods.

    The function travels in a ConfigMap, and results come back in the logs of the pods, so pods and
    this process need not share a disk. A helper pod copies larger data to and from the volume of
    the run directories. Calls of an array are runs of their own.
    """

    job_class = PodJob

    def __init__(self, profile: str | Profile, **parameters: Any) -> None:
        """Prepare to submit.

        Args:
            profile: The site: a profile, its name, or the path of its file.
            parameters: As those of `SlurmExecutor`, including `image`, which must hold torch,
                cloudpickle, and the same version of Python as here.

        Raises:
            ProfileError: no such profile, or one of another kind.
            SpecError: parameters that are unknown or cannot be used.
            PlanError: the parameters cannot work on the cluster.
        """
        site = as_profile(profile)
        if not isinstance(site, KubernetesProfile):
            raise ProfileError(
                f"profile {site.name!r} is not a Kubernetes site; "
                "toolkit.SlurmExecutor and LocalExecutor are for the others"
            )
        super().__init__(site, str(state_folder() / "calls"), parameters)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[core.Job[Any]]:
        prepared: list[tuple[JobSpec, dict[str, bytes]]] = []
        for call in delayed_submissions:
            job = self._job(self.parameters, call.function)
            files = files_of(job, call, delivered=True)
            if apart(files) and self._profile.runs_claim is None:
                raise PlanError(
                    f"the call of {job.name!r} is {format_size(sum(map(len, files.values())))} "
                    f"pickled, and a ConfigMap holds {format_size(PAYLOAD_LIMIT)}; name a "
                    f"runs_claim in profile {self._profile.name!r}, by which it can travel, or let "
                    "the function read its data in the pod, from a volume (mounts) or the network"
                )
            prepared.append((job, files))
        # Nothing is submitted unless all calls can be: none is left behind alone.
        launcher = KubernetesLauncher(self._profile)
        return [
            PodJob(launcher.submit(plan(job, self._profile), files=files))
            for job, files in prepared
        ]


def files_in(lines: Iterable[str], key: str) -> dict[str, bytes]:
    """Return the files that the pods of a run deliver; of several outcomes, the heaviest.

    For a file that was too large for the log, the size is returned; see `size_of`.

    Args:
        lines: Lines of the pods' logs; the ranks' own output is skipped.
        key: The key of the run.
    """
    contents: dict[str, bytes] = {}
    for name, content in whole_files(lines, key):
        if not _NAME.fullmatch(name):
            continue
        if isinstance(content, int):
            contents[f"{name}{_SIZE}"] = str(content).encode()
        elif name != "outcome.json" or _weight(content) >= _weight(contents.get(name, b"")):
            contents[name] = content
    return contents


def _weight(outcome: bytes) -> tuple[int, ...]:
    """Return the weight of an outcome; what is not an outcome weighs least."""
    try:
        weighed = weight(untrusted.mapping(untrusted.parse_json(outcome)))
    except ValueError:
        return ()
    return weighed if all(isinstance(number, int) for number in weighed) else ()


def size_of(path: Path) -> int:
    """Return the size of a file that was too large for a log; 0 if it was not."""
    try:
        return int(untrusted.read_text(path.with_name(f"{path.name}{_SIZE}"), limit=20))
    except (OSError, ValueError):
        return 0


def write(files: Mapping[str, bytes], run_dir: Path) -> None:
    """Write files where `SubmittedCall` reads them; the outcome comes last and completes them."""
    for name, content in sorted(files.items(), key=lambda item: item[0] == "outcome.json"):
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        attempt = re.match(r"function/(attempt-\d+)/", name)
        if attempt:
            (run_dir / "logs" / attempt[1]).mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}")
        draft.write_bytes(content)
        draft.replace(path)
