"""submitit's executors for calls on all ranks of a group: on Slurm, in pods, on this machine."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import submitit
from submitit.core import core
from submitit.core.utils import DelayedSubmission

from toolkit.errors import LauncherError, ProfileError
from toolkit.functions.job import FunctionJob, PodJob, StatusPoll
from toolkit.functions.parameters import job_of, name_of, updated
from toolkit.functions.payload import files_of
from toolkit.functions.worker import join_group
from toolkit.job.spec import JobSpec
from toolkit.kubernetes import KubernetesLauncher
from toolkit.local.launcher import LocalLauncher
from toolkit.planning import plan
from toolkit.profile import KubernetesProfile, LocalProfile, Profile, SlurmProfile, as_profile
from toolkit.runs.records.state_dir import state_folder
from toolkit.runs.run import Run
from toolkit.slurm import SlurmLauncher

R = TypeVar("R")
ProfileT = TypeVar("ProfileT", bound=Profile)
_Calls = list[DelayedSubmission]
_Jobs = list[core.Job[Any]]

_LOCAL = "for this machine; leave it out"


def _site(profile: str | Profile, kind: type[ProfileT], wanted: str) -> ProfileT:
    """Return a profile of this kind; raise ProfileError if it is missing or not `wanted`."""
    site = as_profile(profile)
    if not isinstance(site, kind):
        raise ProfileError(f"profile {site.name!r} is not {wanted}")
    return site


class _RunExecutor(core.Executor, Generic[ProfileT]):
    """An executor that makes calls runs, so that `toolkit list` and other commands find them."""

    job_class = FunctionJob

    def __init__(self, profile: ProfileT, folder: str, parameters: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self._profile = profile
        self.update_parameters(**parameters)

    def submit(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> FunctionJob[R]:
        """Call `fn` with these arguments on every rank."""
        return cast(FunctionJob[R], super().submit(fn, *args, **kwargs))

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        merged = updated(self.parameters, kwargs)
        plan(self._job(merged, None), self._profile)
        self.parameters = merged

    def _job(self, parameters: Mapping[str, Any], function: object, calls: int = 1) -> JobSpec:
        name = parameters.get("name") or name_of(function)
        return job_of(parameters, name=name, calls=calls, source=type(self).__name__)

    def _submitted(self, submit: Callable[..., Run], calls: _Calls) -> list[Run]:
        """Submit each call as a run, all or none."""
        jobs = [(self._job(self.parameters, call.function), call) for call in calls]
        prepared = [(plan(job, self._profile), files_of(job, call)) for job, call in jobs]
        runs: list[Run] = []
        try:
            for made, files in prepared:
                runs.append(submit(made, files=files))
        except BaseException:
            for run in runs:
                with contextlib.suppress(LauncherError):
                    run.cancel()
            raise
        return runs


class SlurmExecutor(_RunExecutor[SlurmProfile]):
    """Calls functions on every rank of a multi-node torchrun group on Slurm.

    The batch script works as for any other job: it stops with a checkpoint, and is requeued by its
    outcome.
    `map_array`, `submit_array` and `batch()` make one job array.
    """

    def __init__(self, profile: str | Profile, **parameters: Any) -> None:
        """Prepare to submit.

        Args:
            profile: The site: a profile, its name, or the path of its file.
            parameters: Keys of a job file, including those of `resources` (`nnodes=2,
                nproc_per_node=8, time_limit="4h"`), or submitit's names (`nodes=2,
                timeout_min=240`), with `slurm_OPTION` for options of sbatch.

        Raises:
            ProfileError: no such profile, or one of another kind.
            SpecError: parameters that are unknown or cannot be used.
            PlanError: the parameters cannot work at the site.
        """
        site = _site(profile, SlurmProfile, "a Slurm site; toolkit.LocalExecutor needs none")
        if site.via:
            raise ProfileError(
                f"profile {site.name!r} reaches its site by {site.via!r}, and this process must "
                "see the run directory with the calls and results; start it on the login node"
            )
        super().__init__(site, site.runs_dir, parameters)

    def _internal_process_submissions(self, delayed_submissions: _Calls) -> _Jobs:
        calls = list(delayed_submissions)
        job = self._job(self.parameters, calls[0].function, len(calls))
        made = plan(job, self._profile)
        folders = [f"{point.name}/" for point in made.points] or [""]
        files = {
            f"{folder}{name}": content
            for folder, call in zip(folders, calls, strict=True)
            for name, content in files_of(job, call).items()
        }
        run = SlurmLauncher(self._profile).submit(made, files=files)
        poll = StatusPoll(run)
        return [
            FunctionJob(one, poll=poll, index=index)
            for index, one in enumerate(run.points or [run])
        ]


class KubernetesExecutor(_RunExecutor[KubernetesProfile]):
    """Calls functions on every rank of a torchrun group in pods.

    Pods and this process need not share a disk: a ConfigMap contains the function, and a helper pod
    copies results, and larger functions, through the volume of the run directories. Each call of an
    array is a separate run.
    """

    job_class = PodJob

    def __init__(self, profile: str | Profile, **parameters: Any) -> None:
        """Prepare to submit, with the arguments and errors of `SlurmExecutor`.

        `image` must hold torch, cloudpickle, and the same version of Python as here, and the
        profile a `runs_claim`.
        """
        others = "toolkit.SlurmExecutor and LocalExecutor are for the others"
        site = _site(profile, KubernetesProfile, f"a Kubernetes site; {others}")
        if site.runs_claim is None:
            raise ProfileError(
                "not set, and results of functions are read from this volume; name a "
                "PersistentVolumeClaim that all nodes can mount at the same time",
                place=f"profile {site.name!r}, runs_claim",
            )
        super().__init__(site, str(state_folder() / "calls"), parameters)

    def _internal_process_submissions(self, delayed_submissions: _Calls) -> _Jobs:
        launcher = KubernetesLauncher(self._profile)
        return [PodJob(run) for run in self._submitted(launcher.submit, delayed_submissions)]


class LocalExecutor(_RunExecutor[LocalProfile]):
    """Calls functions on every rank of a torchrun group on this machine, on simulated nodes.

    All calls of an array start immediately. Parameters that only Slurm has are ignored.
    """

    def __init__(self, profile: str | Profile = "local", **parameters: Any) -> None:
        """Prepare to submit, with the arguments and errors of `SlurmExecutor`.

        The profile only sets the folder of the run directories.
        """
        site = _site(profile, LocalProfile, _LOCAL)
        super().__init__(site, site.runs_dir, parameters)

    def _internal_process_submissions(self, delayed_submissions: _Calls) -> _Jobs:
        launcher = LocalLauncher(self._profile)
        return [FunctionJob(run) for run in self._submitted(launcher.submit, delayed_submissions)]


class DebugExecutor(submitit.DebugExecutor):
    """Calls functions in this process when results are requested, so that pdb can stop there.

    The process group has one rank, whatever the parameters.
    """

    def __init__(self, profile: str | Profile = "local", **parameters: Any) -> None:
        """Prepare to call, with the arguments and errors of `SlurmExecutor`.

        Of the parameters, only `env` and `gpus_per_node` have an effect.
        """
        super().__init__(Path(_site(profile, LocalProfile, _LOCAL).runs_dir) / "debug")
        self.update_parameters(**parameters)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        merged = updated(self.parameters, kwargs)
        job_of(merged, name=merged.get("name", "function"), source="DebugExecutor")
        self.parameters = merged

    def _internal_process_submissions(self, delayed_submissions: _Calls) -> _Jobs:
        jobs: list[core.Job[Any]] = []
        for call in delayed_submissions:
            name = self.parameters.get("name") or name_of(call.function)
            spec = job_of(self.parameters, name=name, source="DebugExecutor")
            env = {**spec.env, "TRAIN_ATTEMPT": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
            env |= dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
            env |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
            gpu = 0 if spec.resources.gpus_per_node else None
            job: core.Job[Any] = submitit.DebugJob(self.folder, _OneRankCall(call, env, gpu))
            run_dir = self.folder / job.job_id
            env["TRAIN_RUN_DIR"] = str(run_dir)
            run_dir.mkdir(parents=True, exist_ok=True)
            jobs.append(job)
        return jobs


class _OneRankCall(DelayedSubmission):
    """A call with the environment of the only rank of a job."""

    def __init__(self, call: DelayedSubmission, env: Mapping[str, str], gpu: int | None) -> None:
        super().__init__(call.function, *call.args, **call.kwargs)
        self._env = env
        self._gpu = gpu

    def result(self) -> Any:
        """Call the function, once."""
        with contextlib.ExitStack() as undo:
            undo.callback(os.environ.update, dict(os.environ))
            undo.callback(os.environ.clear)
            os.environ.update(self._env)
            undo.callback(join_group(None, rank=0, world_size=1, gpu=self._gpu))
            return super().result()
