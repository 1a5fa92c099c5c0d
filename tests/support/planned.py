"""Jobs and sites for tests of plans, and the message when a job does not fit."""

from collections.abc import Callable
from typing import Any

import pytest

from toolkit.errors import PlanError
from toolkit.job.spec import JobSpec
from toolkit.planning import plan
from toolkit.profile import KubernetesProfile, LocalProfile, Profile, SlurmProfile

KINDS: dict[str, Callable[..., Profile]] = {
    "local": LocalProfile,
    "slurm": SlurmProfile,
    "kubernetes": KubernetesProfile,
}
JOB: dict[str, Any] = {"name": "digits", "module": "train", "image": "localhost/train:latest"}
EVERYWHERE = pytest.mark.parametrize("kind", KINDS)


def job(**keys: Any) -> JobSpec:
    return JobSpec.model_validate(JOB | keys)


def site(kind: str, **keys: Any) -> Profile:
    return KINDS[kind](**{"name": "a100", **keys})


def refusal(spec: JobSpec, profile: Profile, run_name: str | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        plan(spec, profile, run_name=run_name)
    return str(caught.value)


FULL = job(
    args=["--lr", "1e-3"],
    resources={"nnodes": 2, "nproc_per_node": 4, "gpus_per_node": 4, "cpus_per_node": 30},
    time_limit="1h",
    env={"A": "b"},
    secrets=["TOKEN"],
    retries={"in_job": 3, "requeue": 2},
)
