"""Python functions on every rank of a group of pods, whose disks this process does not see."""

import os
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit
import yaml
from submitit.core.utils import DelayedSubmission

import toolkit
from tests.conftest import ROOT, Until
from tests.fakes.kubernetes import FakeKubernetes, Fault
from tests.support import calls
from tests.unit.kubernetes.site import runtime
from toolkit.functions.payload import files_of
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.workloads import PAYLOAD_LIMIT, too_large


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeKubernetes]:
    # The Training Operator deletes pods of ended jobs at once, which it is free to do.
    with FakeKubernetes(auto_run=True, clean_after_s=0) as found:
        found.apply(runtime())
        config = found.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(config))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.chdir(ROOT)  # where the ranks find tests.support.calls
        yield found


def executor(
    workload: str = "Job", *, claim: str | None = "runs", **more: Any
) -> toolkit.KubernetesExecutor:
    profile = toolkit.KubernetesProfile(name="k8s", workload=workload, runs_claim=claim)
    parameters = {"nodes": 2, "image": "train:1", "env": {"OMP_NUM_THREADS": "1"}, **more}
    return toolkit.KubernetesExecutor(profile, **parameters)


@pytest.mark.parametrize("workload", ["Job", "PyTorchJob"])
def test_every_rank_calls_the_function_and_what_it_returns_comes_back(
    server: FakeKubernetes, workload: str
) -> None:
    mine = 10  # travels with the function
    job = executor(workload).submit(lambda scale: (mine * scale, calls.gather(scale)["sum"]), 2)
    assert job.results() == [(20, 6.0), (20, 6.0)]
    assert (job.state, job.result(), job.task(1).result()) == ("COMPLETED", (20, 6.0), (20, 6.0))
    server.requests.clear()
    assert toolkit.attach(job.uri).results() == job.results()
    assert not any("exec" in path for _, path, _ in server.requests)
    for made in server.objects_of("ConfigMap"):  # the function, and the supervisor
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == (workload, job.run.name)


def end_apart(wait_s: float) -> int:
    """Return the rank; the last one ends later."""
    from torch import distributed

    rank = distributed.get_rank()
    time.sleep(wait_s * rank)
    print("leaves")
    return rank


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["PyTorchJob", "TrainJob", "JobSet", "Job"])
def test_results_and_logs_are_there_after_each_success(
    server: FakeKubernetes, workload: str
) -> None:
    for wait_s in (30, *[0] * 20):
        job = executor(workload).submit(end_apart, wait_s)
        assert job.results() == [0, 1]
        for rank in (0, 1):
            assert [line[-6:] for line in job.run.logs(ranks=[rank]) if "leaves" in line]


def test_what_is_run_is_what_was_submitted(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Cluster.create
    evil = b64encode(f"open({str(tmp_path / 'came-in')!r}, 'w')".encode()).decode()

    def come_first(self: Cluster, place: Any, body: Any) -> None:
        if body["kind"] != "ConfigMap":
            return create(self, place, body)
        assert body["immutable"] is True
        known = {key: body["metadata"][key] for key in ("name", "namespace", "labels")}
        data = {**body["binaryData"], "worker.py": evil}
        server.apply(yaml.safe_dump({**body, "metadata": known, "binaryData": data}))
        return create(self, place, body)

    monkeypatch.setattr(Cluster, "create", come_first)
    job = executor(nodes=1).submit(len, b"abc")
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="not hold what"):
        job.result()
    assert job.state == "FAILED"
    assert "does not hold what was submitted" in "".join(job.run.logs())
    assert not (tmp_path / "came-in").exists()


@pytest.mark.slow
def test_a_call_that_is_cut_short_before_its_configmap_is_completed_by_whoever_looks(
    server: FakeKubernetes,
) -> None:
    server.faults = [Fault(method="POST", path=".*/configmaps", status=503, times=99)]
    with pytest.raises(toolkit.LauncherError, match="toolkit status"):
        executor(nodes=1).submit(len, b"abc")
    assert server.objects_of("ConfigMap") == []
    server.faults.clear()
    (run,) = toolkit.list_runs()
    assert toolkit.attach(run).result() == 3


def test_a_call_whose_configmap_is_refused_leaves_nothing(server: FakeKubernetes) -> None:
    server.forbid("configmaps", "create")
    with pytest.raises(toolkit.LauncherError, match="configmaps"):
        executor().submit(len, b"abc")
    assert [kind for kind in ("Job", "Pod", "Service") if server.objects_of(kind)] == []
    assert list(toolkit.list_runs()) == []


@pytest.mark.slow
def test_the_first_rank_to_fail_is_told_with_its_trace(server: FakeKubernetes) -> None:
    job = executor(retries={"requeue": 0}).submit(calls.fail_on, 1)
    with pytest.raises(submitit.core.utils.FailedJobError) as error:
        job.results()
    assert "rank 1" in str(error.value)
    assert "ArithmeticError" in str(error.value)
    assert job.state == "FAILED"
    assert "rank 1: ArithmeticError: rank 1 cannot do this" in job.run.status().reason


def test_functions_are_refused_where_no_claim_brings_results_back(server: FakeKubernetes) -> None:
    with pytest.raises(toolkit.ProfileError) as error:
        executor(claim=None)
    assert error.value.exit_status == 2
    assert str(error.value) == (
        "profile 'k8s', runs_claim: not set, and results of functions are read from this volume; "
        "name a PersistentVolumeClaim that all nodes can mount at the same time"
    )
    assert server.requests == []


def pods(server: FakeKubernetes) -> list[str]:
    return [str(pod["metadata"]["name"]) for pod in server.objects_of("Pod")]


@pytest.mark.parametrize("more", [0, 1])
def test_a_call_of_just_the_limit_is_in_the_configmap_and_a_larger_one_on_the_claim(
    server: FakeKubernetes, until: Until, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = executor()
    monkeypatch.setattr(secrets, "token_hex", lambda count: "ab" * count)

    def files(size: int) -> dict[str, bytes]:
        job = ours._job(ours.parameters, len)
        return files_of(job, DelayedSubmission(len, b"x" * size))

    size = PAYLOAD_LIMIT - sum(map(len, files(2**19).values())) + 2**19 + more
    wanted = files(size)
    assert sum(map(len, wanted.values())) == PAYLOAD_LIMIT + more
    server.refuse_pods = "only those that somebody makes"
    job = ours.submit(len, b"x" * size)
    found = server.objects_of("ConfigMap")
    (payload,) = (one for one in found if "supervisor.pyz" not in one["binaryData"])
    mounted = {f"function/{k}": b64decode(v) for k, v in payload["binaryData"].items()}
    claim = server.root / "claims/runs" / job.run.name
    placed = {str(f.relative_to(claim)): f.read_bytes() for f in claim.rglob("*") if f.is_file()}
    assert mounted | placed == wanted
    assert placed == too_large(wanted)
    assert list(placed) == ["function/call.pkl"] * more
    assert job.submission().args == (b"x" * size,)
    until(lambda: not pods(server), "no pod is left")


@pytest.mark.slow
def test_large_arguments_and_results_travel_by_the_claim(
    server: FakeKubernetes, until: Until
) -> None:
    data, extra = os.urandom(5 * 2**20), 2**20

    def twice(data: bytes) -> tuple[int, bytes]:
        from torch import distributed

        return distributed.get_rank(), data + data[:extra]

    server.faults = [Fault(path=".*/exec", cut=9)]  # then it is sent again
    job = executor().submit(twice, data)
    until(lambda: len(pods(server)) == 2, "the transfer's pod is gone")
    job.wait()
    server.forbid("pods/exec", "get")
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="Role training-transfer"):
        job.results()
    server._forbidden.clear()
    server.requests.clear()
    assert job.results() == [(rank, data + data[:extra]) for rank in (0, 1)]
    assert job.task(1).result() == (1, data + data[:extra])
    made = [path for method, path, _ in server.requests if method == "POST"]
    assert len(made) == 1  # for both ranks
    until(lambda: len(pods(server)) == 2, "the transfers' pods are gone")
    assert not any("transfer" in name for name in pods(server))


def test_a_call_whose_arguments_cannot_be_brought_to_the_claim_leaves_nothing(
    server: FakeKubernetes, until: Until
) -> None:
    server.forbid("pods/exec", "create")
    with pytest.raises(toolkit.LauncherError, match="Role training-transfer"):
        executor().submit(len, b"x" * 2**20)
    until(lambda: not pods(server), "no pod is left")
    assert [kind for kind in ("Job", "ConfigMap", "Service") if server.objects_of(kind)] == []
    assert list(toolkit.list_runs()) == []
