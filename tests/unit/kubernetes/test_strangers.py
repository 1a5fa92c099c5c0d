"""Runs that were not submitted from here are opened by the cluster's word."""

from collections.abc import Mapping
from pathlib import Path

import pytest

import toolkit
from tests.fakes.kubernetes import FakeKubernetes
from tests.unit.kubernetes.site import Site, every_workload, make_job, make_profile
from toolkit.errors import RunNotFound
from toolkit.kubernetes import KubernetesRun
from toolkit.kubernetes.launcher import run_in_cluster
from toolkit.planning.pods import WORKLOAD_LABEL


@every_workload
def test_what_kubectl_has_applied_is_asked_followed_and_cancelled(
    site: Site, server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = toolkit.plan(make_job(), site.profile)
    server.apply(toolkit.render(made))
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    run = toolkit.open_run("k8s://default/t")
    assert (run.name, run.record.job) == ("t", "t")
    assert isinstance(run, KubernetesRun)
    server.run("t")
    server.log(site.pod(run), "[rank 0] hello")
    assert run.status().state is toolkit.RunState.RUNNING
    assert list(run.logs()) == ["[rank 0] hello"]
    run.cancel()
    assert run.status().state is toolkit.RunState.CANCELLED
    assert site.jobs() == []


@every_workload
def test_pods_of_another_kind_with_the_same_name_are_no_pods_of_the_run(
    site: Site, server: FakeKubernetes, environ: Mapping[str, str]
) -> None:
    """Names are unique only within a kind. Pods of earlier versions have no label of a kind."""
    server.apply(toolkit.render(toolkit.plan(make_job(), site.profile)))
    run = run_in_cluster("k8s://default/t", api_client=server.api_client(), environ=environ)
    other = make_profile("Job" if site.workload == "PyTorchJob" else "PyTorchJob")
    server.apply(toolkit.render(toolkit.plan(make_job(), other)))
    assert len(server.objects_of("NetworkPolicy")) == 2  # neither run takes that of the other
    pods = server.objects_of("Pod")
    own = [pod for pod in pods if pod["metadata"]["labels"][WORKLOAD_LABEL] == site.workload]
    assert 0 < len(own) < len(pods)
    assert run.cluster.pods(run.pod_selector) == own
    for pod in own:
        del pod["metadata"]["labels"][WORKLOAD_LABEL]
        server.patch(
            "Pod", pod["metadata"]["name"], {"metadata": {"labels": {WORKLOAD_LABEL: None}}}
        )
    names = [pod["metadata"]["name"] for pod in run.cluster.pods(run.pod_selector)]
    assert names == [pod["metadata"]["name"] for pod in own]


@pytest.mark.parametrize("workload", ["Job"])
def test_what_is_not_ours_or_not_there_is_told(
    site: Site, server: FakeKubernetes, environ: Mapping[str, str]
) -> None:
    text = toolkit.render(toolkit.plan(make_job(), site.profile))
    server.apply(text.replace("torch-deploy-toolkit/run: t", "someone/else: t"))
    for name, said in [
        ("t", "this Job has no label torch-deploy-toolkit/run"),
        ("u", "namespace 'default' has no PyTorchJob, TrainJob, JobSet, Job called 'u'"),
    ]:
        with pytest.raises(RunNotFound, match=said):
            run_in_cluster(f"k8s://default/{name}", api_client=server.api_client(), environ=environ)
    with pytest.raises(RunNotFound, match="nothing was submitted from here yet"):
        toolkit.open_run("k8s://default/a/b")
