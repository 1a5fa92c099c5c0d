"""submitit's executor for debuggers: the function runs in this process, as a group of one rank."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import submitit
from submitit.core import core
from submitit.core.utils import DelayedSubmission

from toolkit.errors import ProfileError
from toolkit.functions.parameters import job_of, name_of, updated
from toolkit.functions.worker import join_group
from toolkit.profile import LocalProfile, Profile, load_profile

__all__ = ["DebugExecutor"]


class _OnOneRank(DelayedSubmission):
    """A call with the environment of the only rank of a job."""

    def __init__(self, call: DelayedSubmission, env: Mapping[str, str], gpu: int | None) -> None:
        super().__init__(call.function, *call.args, **call.kwargs)
        self._env = env
        self._gpu = gpu

    def result(self) -> Any:
        """Call it, once."""
        with _environment(self._env):
            leave_group = join_group(None, rank=0, world_size=1, gpu=self._gpu)
            try:
                return super().result()
            finally:
                leave_group()


@contextlib.contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class DebugExecutor(submitit.DebugExecutor):
    """Calls functions in this process when results are requested, so that pdb can stop there.

    The process group has one rank for any parameters.
    """

    def __init__(self, profile: str | Profile = "local", **parameters: Any) -> None:
        """Prepare to call.

        Args:
            profile: Where run directories are made: a profile, its name, or the path of its file.
            parameters: As those of `SlurmExecutor`; of them, `env` and `gpus_per_node` count.

        Raises:
            ProfileError: no such profile, or one of another kind.
            SpecError: parameters that are not known or cannot be used.
        """
        site = load_profile(profile) if isinstance(profile, str) else profile
        if not isinstance(site, LocalProfile):
            raise ProfileError(f"profile {site.name!r} is not for this machine; leave it out")
        super().__init__(Path(site.runs_dir) / "debug")
        self.update_parameters(**parameters)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        merged = updated(self.parameters, kwargs)
        job_of(merged, name=merged.get("name", "function"), source="DebugExecutor")
        self.parameters = merged

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[core.Job[Any]]:
        return [self._job(call) for call in delayed_submissions]

    def _job(self, call: DelayedSubmission) -> core.Job[Any]:
        name = self.parameters.get("name") or name_of(call.function)
        spec = job_of(self.parameters, name=name, source="DebugExecutor")
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "TRAIN_ATTEMPT", "TORCHELASTIC_RESTART_COUNT")
        env = {**spec.env, **dict.fromkeys(names, "0")}
        env |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
        one = _OnOneRank(call, env, 0 if spec.resources.gpus_per_node else None)
        job: core.Job[Any] = submitit.DebugJob(self.folder, one)
        env["TRAIN_RUN_DIR"] = str(self.folder / job.job_id)
        (self.folder / job.job_id).mkdir(parents=True, exist_ok=True)
        return job
