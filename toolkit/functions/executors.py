"""submitit's executors for calls on all ranks of a group, on Slurm and on this machine."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from submitit.core import core
from submitit.core.utils import DelayedSubmission

from toolkit.errors import ProfileError
from toolkit.functions.job import FunctionJob, Inquiry
from toolkit.functions.parameters import job_of, name_of, updated
from toolkit.functions.payload import files_of
from toolkit.job.spec import JobSpec
from toolkit.planning import plan
from toolkit.profile import LocalProfile, Profile, SlurmProfile, load_profile
from toolkit.runs.run import Run

__all__ = ["LocalExecutor", "RunExecutor", "SlurmExecutor"]

R = TypeVar("R")


class RunExecutor(core.Executor):
    """An executor whose calls are runs, which `toolkit list` and the others show, too."""

    job_class = FunctionJob

    def __init__(self, folder: str, parameters: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self.update_parameters(**parameters)

    def submit(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> FunctionJob[R]:
        """Call `fn` with these arguments on every rank."""
        return cast(FunctionJob[R], super().submit(fn, *args, **kwargs))

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        merged = updated(self.parameters, kwargs)
        self._check(self._job(merged, None))
        self.parameters = merged

    def _job(self, parameters: Mapping[str, Any], function: object, calls: int = 1) -> JobSpec:
        name = parameters.get("name") or name_of(function)
        return job_of(parameters, name=name, calls=calls, source=type(self).__name__)

    def _check(self, job: JobSpec) -> None:
        """Refuse what cannot work."""
        raise NotImplementedError


def _files(job: JobSpec, call: DelayedSubmission) -> dict[str, bytes]:
    return files_of(job, call.function, call.args, call.kwargs)


class SlurmExecutor(RunExecutor):
    """Calls functions on every rank of a multi-node torchrun group on Slurm.

    The batch script is that of any other job: stopped with a checkpoint, queued again by outcome.
    `map_array`, `submit_array` and `batch()` make one job array.
    """

    def __init__(self, profile: str | Profile, **parameters: Any) -> None:
        """Prepare to submit.

        Args:
            profile: The site: a profile, its name, or the path of its file.
            parameters: Keys of a job file, those of `resources` among them (`nnodes=2,
                nproc_per_node=8, time_limit="4h"`), or submitit's names (`nodes=2,
                timeout_min=240`), with `slurm_OPTION` for options of sbatch.

        Raises:
            ProfileError: no such profile, or one of another kind.
            SpecError: parameters that are not known or cannot be used.
            PlanError: the parameters cannot work at the site.
        """
        site = load_profile(profile) if isinstance(profile, str) else profile
        if not isinstance(site, SlurmProfile):
            raise ProfileError(
                f"profile {site.name!r} is no Slurm site; toolkit.LocalExecutor needs none"
            )
        if site.via:
            raise ProfileError(
                f"profile {site.name!r} reaches its site by {site.via!r}, and calls and results "
                "lie in a run directory that this process must see; start it on the login node"
            )
        self._profile = site
        super().__init__(site.runs_dir, parameters)

    def _check(self, job: JobSpec) -> None:
        plan(job, self._profile)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[core.Job[Any]]:
        calls = list(delayed_submissions)
        job = self._job(self.parameters, calls[0].function, len(calls))
        made = plan(job, self._profile)
        if made.points:
            files = {
                f"{point.name}/{name}": content
                for point, call in zip(made.points, calls, strict=True)
                for name, content in _files(job, call).items()
            }
        else:
            files = _files(job, calls[0])
        from toolkit.slurm import SlurmLauncher

        run: Run = SlurmLauncher(self._profile).submit(made, files=files)
        inquiry = Inquiry(run)
        return [
            FunctionJob(one, inquiry=inquiry, index=index)
            for index, one in enumerate(run.points or [run])
        ]


class LocalExecutor(RunExecutor):
    """Calls functions on every rank of a torchrun group on this machine, on simulated nodes.

    Calls of an array all start at once. Parameters of Slurm alone are ignored.
    """

    def __init__(self, profile: str | Profile = "local", **parameters: Any) -> None:
        """Prepare to submit.

        Args:
            profile: Where run directories are made: a profile, its name, or the path of its file.
            parameters: As those of `SlurmExecutor`.

        Raises:
            ProfileError: no such profile, or one of another kind.
            SpecError: parameters that are not known or cannot be used.
            PlanError: the parameters cannot work on this machine.
        """
        site = load_profile(profile) if isinstance(profile, str) else profile
        if not isinstance(site, LocalProfile):
            raise ProfileError(f"profile {site.name!r} is not for this machine; leave it out")
        self._profile = site
        super().__init__(site.runs_dir, parameters)

    def _check(self, job: JobSpec) -> None:
        plan(job, self._profile)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[core.Job[Any]]:
        return [FunctionJob(self._start(call)) for call in delayed_submissions]

    def _start(self, call: DelayedSubmission) -> Run:
        job = self._job(self.parameters, call.function)
        made = plan(job, self._profile)
        from toolkit.local.launcher import LocalLauncher

        return LocalLauncher(self._profile).submit(made, files=_files(job, call))
