"""A launcher at a fake cluster, and a fixture that makes one for each kind of workload."""

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.fakes.kubernetes import FakeKubernetes
from tests.support.costs import others_slow
from toolkit.job.kubernetes_options import Workload
from toolkit.job.spec import JobSpec
from toolkit.kubernetes import KubernetesLauncher, KubernetesRun
from toolkit.planning import plan
from toolkit.profile import KubernetesProfile
from toolkit.rendering import render
from toolkit.runs.state import RunState, RunStatus

PENDING, RUNNING, UNKNOWN = RunState.PENDING, RunState.RUNNING, RunState.UNKNOWN
FAILED, PREEMPTED, SUCCEEDED = RunState.FAILED, RunState.PREEMPTED, RunState.SUCCEEDED
CANCELLED = RunState.CANCELLED

WORKLOADS: list[Workload] = ["PyTorchJob", "TrainJob", "JobSet", "Job"]
GROUPS = {
    "PyTorchJob": "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs",
    "TrainJob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs",
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets",
    "Job": "/apis/batch/v1/namespaces/default/jobs",
}

every_workload = pytest.mark.parametrize("workload", WORKLOADS)
a_jobset_and_slowly_others = pytest.mark.parametrize("workload", others_slow(WORKLOADS, "JobSet"))
a_job = pytest.mark.parametrize("workload", ["Job"])


def make_job(**job: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "t", "module": "train", "image": "i:1"} | job)


def status(state: RunState, reason: str = "") -> RunStatus:
    return RunStatus(state=state, reason=reason)


def make_profile(workload: Workload, **profile: Any) -> KubernetesProfile:
    known = {"name": "k8s", "runs_claim": "runs", "workload": workload}
    return KubernetesProfile.model_validate(known | profile)


class Site:
    """A launcher at a fake cluster, and its pauses."""

    def __init__(
        self,
        server: FakeKubernetes,
        environ: Mapping[str, str],
        workload: Workload,
        **profile: Any,
    ) -> None:
        self.server = server
        self.environ = environ
        self.workload = workload
        self.slept: list[float] = []
        self.profile = make_profile(workload, **profile)
        self.launcher = self.open_launcher()

    def open_launcher(self) -> KubernetesLauncher:
        """Return the launcher of another process."""
        return KubernetesLauncher(
            self.profile,
            api_client=self.server.api_client(),
            sleep=self.slept.append,
            environ=self.environ,
        )

    def submit(self, **job: Any) -> KubernetesRun:
        return self.launcher.submit(plan(make_job(**job), self.profile))

    def shown(self, name: str, **job: Any) -> list[dict[str, Any]]:
        """Return what `render` shows of a job."""
        text = render(plan(make_job(**job), self.profile, run_name=name))
        return [one for one in yaml.safe_load_all(text) if one]

    def jobs(self) -> list[str]:
        """Return the names of the workloads that there are."""
        return self.server.jobs(self.workload)

    def pod(self, run: KubernetesRun, index: int = 0) -> str:
        """Return the name of a pod."""
        pods = self.server.pods(run.object_name)
        return next(str(pod["metadata"]["name"]) for pod in pods if index_of(pod) == index)

    @property
    def path(self) -> str:
        """The path of the workloads."""
        return GROUPS[self.workload]

    def asked(self, method: str, path: str = "") -> list[Mapping[str, str]]:
        """Return the queries of requests so far whose path ends so."""
        return [q for m, p, q in self.server.requests if m == method and p.endswith(path)]


def index_of(pod: Mapping[str, Any]) -> int:
    labels = pod["metadata"]["labels"]
    for key in ("training.kubeflow.org/replica-index", "batch.kubernetes.io/job-completion-index"):
        if key in labels:
            return int(labels[key])
    raise AssertionError(labels)


def short(workload: str, index: int = 0) -> str:
    """Return how messages call a pod."""
    return f"{'worker' if workload == 'PyTorchJob' else 'node'}-{index}"


def runtime() -> str:
    """Return the TrainingRuntime that TrainJobs refer to."""
    return (ROOT / "k8s/base/trainer/runtime.yaml").read_text()
