"""The fake cluster's controllers: pods made, ended and made again as on a real one."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.conftest import Until
from tests.fakes.kubernetes import FakeKubernetes
from tests.fakes.kubernetes.kubelet import condition_of
from tests.support.cluster_objects import RUNTIME, config, workload
from tests.support.rendered import KINDS, manifest


@pytest.fixture
def server() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as fake:
        yield fake


def environment(pod: Any) -> dict[str, Any]:
    return {
        one["name"]: one.get("value", one.get("valueFrom"))
        for one in pod["spec"]["containers"][0]["env"]
    }


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_makes_its_pods_with_names_labels_and_environment(
    server: FakeKubernetes, kind: str
) -> None:
    server.apply(RUNTIME)
    server.apply(manifest({"resources": {"nnodes": 2}}, {}, kind))
    first, second = server.pods("t")
    labels, env = second["metadata"]["labels"], environment(second)
    assert labels["torch-deploy-toolkit/run"] == "t"
    if kind == "PyTorchJob":
        assert second["metadata"]["name"] == "t-worker-1"
        assert labels["training.kubeflow.org/replica-index"] == "1"
        assert (env["PET_NNODES"], "PET_RDZV_ENDPOINT" in env) == ("2", False)
        return
    assert labels["batch.kubernetes.io/job-completion-index"] == "1"
    assert "JOB_COMPLETION_INDEX" in env
    host = "t-1" if kind == "Job" else "t-node-0-1"
    assert (second["spec"]["hostname"], second["spec"]["subdomain"]) == (host, "t")
    if kind != "Job":
        assert labels["jobset.sigs.k8s.io/restart-attempt"] == "0"
        server.recreate("t")
        again = server.pods("t")
        assert len(again) == 2
        assert {p["metadata"]["uid"] for p in again}.isdisjoint({first["metadata"]["uid"]})
        assert again[0]["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] == "1"
    if kind == "TrainJob":
        assert env["PET_MASTER_ADDR"] == "t-node-0-0.t"
        assert (env["PET_NNODES"], env["PET_MASTER_PORT"]) == ("2", "29500")


def test_pod_security_refuses_pods_where_only_events_say_so() -> None:
    with FakeKubernetes(restricted=True) as server:
        for kind, reason in (("PyTorchJob", "FailedCreatePod"), ("Job", "FailedCreate")):
            body = workload(kind, name=f"t-{kind.lower()}")
            template = (
                body["spec"].get("template")
                or (body["spec"]["pytorchReplicaSpecs"]["Worker"]["template"])
            )
            del template["spec"]["securityContext"]["seccompProfile"]
            server.create(body)
            (event,) = (e for e in server.objects_of("Event") if e["reason"] == reason)
            assert 'violates PodSecurity "restricted:latest"' in event["message"]
            assert not server.job(body["metadata"]["name"]).get("status")


def test_a_master_leaves_its_workers_without_pods_under_restricted() -> None:
    with FakeKubernetes(restricted=True) as server:
        body = workload("PyTorchJob")
        replicas = body["spec"]["pytorchReplicaSpecs"]
        replicas["Worker"]["replicas"] = 1
        master = json.loads(json.dumps(replicas["Worker"]))
        body["spec"]["pytorchReplicaSpecs"] = {"Master": master, "Worker": replicas["Worker"]}
        server.create(body)
        assert [pod["metadata"]["name"] for pod in server.pods("t")] == ["t-master-0"]


def test_a_queued_workload_waits_and_says_why_until_it_is_admitted_and_preempted() -> None:
    with FakeKubernetes(kueue=True) as server:
        text = manifest({}, {"queue": "nobodys"}, "Job")
        server.apply(text, manager="us")
        assert server.pods("t") == []
        (condition,) = server.workload("t")["status"]["conditions"]
        assert condition["message"] == "LocalQueue nobodys doesn't exist"
        server.admit("t")
        assert len(server.pods("t")) == 1
        server.apply(text, manager="us")  # suspend is Kueue's, and we do not say it
        server.preempt("t")
        assert server.pods("t") == []
        server.apply(manifest({}, {"queue": "nobodys"}, "PyTorchJob"))
        assert len(server.pods("t")) == 1, "PyTorchJob is not Kueue's by default"


# Controllers at work: containers are shells that end on command.


@pytest.fixture
def busy() -> Iterator[FakeKubernetes]:
    with FakeKubernetes(auto_run=True, back_off_s=0.05, clean_after_s=0.1) as fake:
        fake.apply(RUNTIME)
        yield fake


def shell(server: FakeKubernetes, kind: str, script: str, **spec: Any) -> None:
    """Create a workload of two pods whose containers are a shell."""
    body = workload(kind)
    containers: dict[str, Callable[[], Any]] = {
        "PyTorchJob": lambda: body["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"],
        "JobSet": lambda: body["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"],
        "Job": lambda: body["spec"]["template"]["spec"],
    }
    where = body["spec"]["trainer"] if kind == "TrainJob" else containers[kind]()["containers"][0]
    where |= {"command": ["sh", "-c"], "args": [script.replace("$(", "$$(")]}
    body["spec"] |= spec
    server.create(body)


def ended(server: FakeKubernetes, name: str = "t") -> tuple[str, str]:
    """Return how a workload has ended and why, once it has."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        thing = server.job(name)
        for kind in ("Succeeded", "Complete", "Completed", "Failed"):
            if (found := condition_of(thing, kind)) is not None:
                return kind, found["reason"]
        time.sleep(0.02)
    raise AssertionError(thing)


RANK = "${JOB_COMPLETION_INDEX:-${HOSTNAME##*-}}"


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        ("PyTorchJob", 0, ("Succeeded", "PyTorchJobSucceeded")),
        ("TrainJob", 0, ("Complete", "AllJobsCompleted")),
        ("JobSet", 0, ("Completed", "AllJobsCompleted")),
        ("Job", 0, ("Complete", "CompletionsReached")),
        ("PyTorchJob", 42, ("Failed", "PyTorchJobFailed")),
        ("TrainJob", 42, ("Failed", "FailedJobs")),
        ("JobSet", 42, ("Failed", "FailedJobs")),
        ("Job", 42, ("Failed", "PodFailurePolicy")),
    ],
)
def test_exit_statuses_end_each_kind_as_it_says(
    busy: FakeKubernetes, kind: str, code: int, expected: tuple[str, str]
) -> None:
    waits = "trap 'exit 1' TERM; while :; do sleep 0.05; done"
    shell(busy, kind, f"[ {code} = 0 ] || [ {RANK} = 0 ] || {{ {waits}; }}; exit {code}")
    assert ended(busy) == expected


def test_a_jobset_restarts_all_pods_and_gives_up_after_its_most(busy: FakeKubernetes) -> None:
    policy = {"maxRestarts": 1}
    shell(busy, "JobSet", f"[ {RANK} = 0 ] && exit 1; exec sleep 60", failurePolicy=policy)
    assert ended(busy) == ("Failed", "ReachedMaxRestarts")
    assert busy.job("t")["status"]["restarts"] == 1
    assert {e["reason"] for e in busy.objects_of("Event")} == {"RestartingJobSet"}


def test_a_job_counts_failures_by_index_and_none_of_an_eviction(
    busy: FakeKubernetes, until: Until
) -> None:
    shell(busy, "Job", "exec sleep 60", backoffLimitPerIndex=0, maxFailedIndexes=0)

    def running() -> list[str]:
        pods = busy.pods("t")
        return [p["metadata"]["name"] for p in pods if p["status"]["phase"] == "Running"]

    until(lambda: len(running()) == 2, "both run")
    first = running()
    busy.evict(first[1])
    until(lambda: len(running()) == 2 and running()[1] != first[1], "it is replaced")
    assert busy.job("t")["status"]["failed"] == 0
    busy.kill(first[0])
    assert ended(busy) == ("Failed", "MaxFailedIndexesExceeded")


def nodes_of(server: FakeKubernetes) -> list[tuple[str, bool]]:
    """Return the nodes of a workload's pods that have not ended, and whether they are deleted."""
    return sorted(
        (pod["spec"]["nodeName"], "deletionTimestamp" in pod["metadata"])
        for pod in server.pods("t")
        if pod["status"]["phase"] == "Running"
    )


EARLY: dict[str, Any] = {"podReplacementPolicy": "TerminatingOrFailed", "podFailurePolicy": None}


@pytest.mark.parametrize(
    ("policy", "replaced"),
    [
        (EARLY, True),
        ({"podReplacementPolicy": "Failed", "podFailurePolicy": None}, False),
        ({}, False),
    ],
)
def test_a_pod_of_a_lost_node_stays_and_its_job_replaces_it_or_not(
    busy: FakeKubernetes, until: Until, policy: dict[str, Any], replaced: bool
) -> None:
    """Seen on 1.35: a podFailurePolicy forces the policy Failed, and a lost pod never fails."""
    limits = {"backoffLimitPerIndex": 2, "maxFailedIndexes": 0}
    shell(busy, "Job", "exec sleep 60", **limits, **policy)
    until(lambda: len(nodes_of(busy)) == 2, "both run")
    lost = busy.pods("t")[0]["metadata"]["name"]
    node = busy.cut_power(lost)
    busy.delete_by_force(lost)  # the finalizer of the Job controller keeps it
    gone = (node, True)
    if replaced:
        until(lambda: len(nodes_of(busy)) == 3, "another pod runs")
        assert gone in nodes_of(busy)
        assert busy.job("t")["status"]["failed"] == 1, "it counts"
        assert [n for n, deleted in nodes_of(busy) if not deleted].count(node) == 0
    else:
        until(lambda: busy.job("t")["status"]["terminating"] == 1, "it is being deleted")
        assert gone in nodes_of(busy) and len(nodes_of(busy)) == 2
        assert busy.job("t")["status"].get("failed", 0) == 0


def test_a_deadline_ends_a_job_to_the_second(busy: FakeKubernetes) -> None:
    shell(busy, "Job", "exec sleep 60", activeDeadlineSeconds=1)
    assert ended(busy) == ("Failed", "DeadlineExceeded")


def test_the_first_elastic_worker_that_ends_well_ends_the_job_and_its_peers(
    busy: FakeKubernetes, until: Until
) -> None:
    policy = {"minReplicas": 2, "maxReplicas": 2}
    shell(busy, "PyTorchJob", f"[ {RANK} = 0 ] || exec sleep 60", elasticPolicy=policy)
    assert ended(busy)[0] == "Succeeded"
    until(lambda: len(busy.pods("t")) == 1, "the peer is deleted")


def test_without_an_elastic_policy_all_workers_must_succeed(
    busy: FakeKubernetes, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    shell(busy, "PyTorchJob", f"[ {RANK} = 0 ] || until [ -e {end} ]; do sleep 0.05; done")

    def succeeded() -> int:
        return sum(pod["status"]["phase"] == "Succeeded" for pod in busy.pods("t"))

    limit = time.monotonic() + 60
    while succeeded() != 1:
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert condition_of(busy.job("t"), "Succeeded") is None
    end.touch()
    assert (ended(busy)[0], len(busy.pods("t")), succeeded()) == ("Succeeded", 2, 2)


def test_a_container_whose_rank_is_killed_for_memory_says_so(
    busy: FakeKubernetes, until: Until
) -> None:
    script = "sh -c 'sh -c \"echo rank; sleep 60\"; exit 1' || exit 42"
    shell(busy, "Job", script)
    until(lambda: len([p for p in busy.pods("t") if p["status"]["phase"] == "Running"]) == 2, "run")
    pod = busy.pods("t")[0]["metadata"]["name"]
    printed = client.CoreV1Api(busy.api_client()).read_namespaced_pod_log
    until(lambda: "rank" in printed(pod, "default"), "its rank runs")
    busy.oom(pod)
    assert ended(busy) == ("Failed", "PodFailurePolicy")
    state = busy.pods("t")[0]["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (state["reason"], state["exitCode"]) == ("OOMKilled", 42)


def test_volumes_texts_and_fields_reach_the_container(busy: FakeKubernetes, tmp_path: Path) -> None:
    busy.create(config("texts"))
    body = workload("Job")
    pod = body["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "texts", "configMap": {"name": "texts"}})
    container = pod["containers"][0]
    container["volumeMounts"].append({"name": "texts", "mountPath": "/texts"})
    uid = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    key = {"configMapKeyRef": {"name": "texts", "key": "a"}}
    container["env"] += [
        {"name": "FILE", "value": "/texts/a"},
        {"name": "UID_", "valueFrom": uid},
        {"name": "A", "valueFrom": key},
    ]
    words = 'test "`cat $FILE`$A" = 11 && test -n "$UID_"'
    container |= {"command": ["sh", "-c"], "args": [words]}
    busy.create(body)
    assert ended(busy) == ("Complete", "CompletionsReached")
