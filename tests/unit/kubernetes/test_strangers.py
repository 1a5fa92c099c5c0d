"""Runs that were not submitted from here are opened by the cluster's word."""

from collections.abc import Mapping
from pathlib import Path

import pytest

import toolkit
from tests.fakes.kubernetes import FakeKubernetes
from tests.unit.kubernetes.site import Site, every_workload, make_job
from toolkit.errors import RunNotFound
from toolkit.kubernetes import KubernetesRun
from toolkit.kubernetes.launcher import run_in_cluster


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
