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
from toolkit.kubernetes.delivered_files import files_of_parts, parts_of
from toolkit.kubernetes.objects import PAYLOAD_LIMIT, apart
from toolkit.planning import plan
from toolkit.profile import KubernetesProfile, Profile, load_profile
from toolkit.runs.run import Run
from toolkit.runs.state_dir import state_folder
from toolkit.text import untrusted
from toolkit.text.quantities import format_size

__all__ = ["KubernetesExecutor", "PodJob", "files_in"]

R = TypeVar("R", covariant=True)

_SIZE = ".size"
_NAME = re.compile(r"outcome\.json|function/attempt-\d{1,6}/rank-\d{1,9}\.(?:pkl|error\.json)")


class PodJob(FunctionJob[R]):
    """A call in pods, whose disks this process does not see: their results are in their logs.

    The log holds only the size of a file that is too large for it; it is read from the claim.
    """

    def _bring(self, ranks: Sequence[int]) -> None:
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
                    "runs_claim in the profile, on which there is room, or return less"
                )
            base = self._call.run_dir
            missing = volume.fetch(self.run, {str(p.relative_to(base)): p for p in large})
            if missing:
                raise LauncherError(f"there is no {', '.join(sorted(missing))} on the claim")
        except LauncherError as error:
            sizes = format_size(sum(map(size_of, large)))
            raise UncompletedJobError(
                f"Job {self.job_id} has results of {sizes} that cannot be brought here: {error}"
            ) from error

    def _has_returned(self, path: Path) -> bool:
        return super()._has_returned(path) or bool(size_of(path))

    def _fetch(self) -> None:
        assert isinstance(self.run, KubernetesRun)
        with contextlib.suppress(
            LauncherError
        ):  # tried again, and reported at last as a missing file
            write(files_in(self.run.delivered(), self.run.key), self._call.run_dir)

    def _can_tell(self) -> bool:
        if not super()._can_tell():
            self._fetch()
        return super()._can_tell()

    def _is_here(self, path: Path) -> bool:
        if not path.exists():
            self._fetch()
        return path.exists()

    def _get_logs_string(self, name: str) -> str | None:
        """Return what a rank has printed; both streams are one in a pod's log."""
        lines = list(self.run.logs(ranks=[self._rank or 0]))
        return "".join(f"{line}\n" for line in lines) if lines else None


class KubernetesExecutor(RunExecutor):
    """Calls functions on every rank of a torchrun group in pods.

    The function travels in a ConfigMap, and results come back in the logs of the pods: so neither
    needs a disk that pods and this process share. Larger data pass to and from the volume of the
    run directories through a helper pod. Calls of an array are runs of their own.
    """

    job_class = PodJob

    def __init__(self, profile: str | Profile, **parameters: Any) -> None:
        """Prepare to submit.

        Args:
            profile: The site: a profile, its name, or the path of its file.
            parameters: As those of `SlurmExecutor`, `image` among them, which needs torch and
                cloudpickle, and the Python that pickles here.

        Raises:
            ProfileError: no such profile, or one of another kind.
            SpecError: parameters that are not known or cannot be used.
            PlanError: the parameters cannot work on the cluster.
        """
        site = load_profile(profile) if isinstance(profile, str) else profile
        if not isinstance(site, KubernetesProfile):
            raise ProfileError(
                f"profile {site.name!r} is no Kubernetes site; "
                "toolkit.SlurmExecutor and LocalExecutor are for the others"
            )
        self._profile = site
        super().__init__(str(state_folder() / "calls"), parameters)

    def _check(self, job: JobSpec) -> None:
        plan(job, self._profile)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[core.Job[Any]]:
        # All are looked at before one is submitted: none is left behind by another's fault.
        prepared = [self._prepared(call) for call in delayed_submissions]
        return [self._start(job, files) for job, files in prepared]

    def _prepared(self, call: DelayedSubmission) -> tuple[JobSpec, dict[str, bytes]]:
        job = self._job(self.parameters, call.function)
        files = files_of(job, call.function, call.args, call.kwargs, delivered=True)
        if apart(files) and self._profile.runs_claim is None:
            raise PlanError(
                f"the call of {job.name!r} is {format_size(sum(map(len, files.values())))} "
                f"pickled, and a ConfigMap holds {format_size(PAYLOAD_LIMIT)}; name a runs_claim "
                f"in profile {self._profile.name!r}, by which it can travel, or let the function "
                "read its data in the pod, from a volume (mounts) or the network"
            )
        return job, files

    def _start(self, job: JobSpec, files: Mapping[str, bytes]) -> PodJob[Any]:
        run: Run = KubernetesLauncher(self._profile).submit(plan(job, self._profile), files=files)
        return PodJob(run)


def files_in(lines: Iterable[str], key: str) -> dict[str, bytes]:
    """Return the files that the pods of a run hand over; of several outcomes, what weighs most.

    Of a file that was too large for the log, the size, see `size_of`.

    Args:
        lines: Of the pods' logs; those that ranks print are passed over.
        key: The run's.
    """
    contents: dict[str, bytes] = {}
    for name, content in files_of_parts(parts_of(lines, key)):
        if not _NAME.fullmatch(name):
            continue
        if isinstance(content, int):
            contents[f"{name}{_SIZE}"] = str(content).encode()
        elif name != "outcome.json" or _weight(content) >= _weight(contents.get(name, b"")):
            contents[name] = content
    return contents


def _weight(outcome: bytes) -> tuple[int, ...]:
    """Return the weight of an outcome; anything else weighs least."""
    try:
        weighed = weight(untrusted.mapping(untrusted.parse_json(outcome)))
    except ValueError:
        return ()
    return weighed if all(isinstance(number, int) for number in weighed) else ()


def size_of(path: Path) -> int:
    """Return the size of a file that was too large for a log; 0 where none is known."""
    try:
        return int(untrusted.read_text(path.with_name(f"{path.name}{_SIZE}"), limit=20))
    except (OSError, ValueError):
        return 0


def write(files: Mapping[str, bytes], run_dir: Path) -> None:
    """Write files where `Call` looks for them, the outcome last: the log lists them all."""
    for name, content in sorted(files.items(), key=lambda item: item[0] == "outcome.json"):
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        attempt = re.match(r"function/(attempt-\d+)/", name)
        if attempt:
            (run_dir / "logs" / attempt[1]).mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}")
        draft.write_bytes(content)
        draft.replace(path)
