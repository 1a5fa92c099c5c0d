"""The fake cluster behaves as a real one was observed to behave; other tests rely on that."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.dynamic import DynamicClient

from tests.fakes.kubernetes import FakeKubernetes, Fault, cluster_under_test
from tests.fakes.kubernetes.patching import patched
from tests.fakes.kubernetes.real import RealCluster
from tests.fakes.kubernetes.selecting import labels_match
from tests.support.cluster_objects import RUNTIME, config, workload
from tests.support.rendered import KINDS, manifest

CUSTOM = {
    "PyTorchJob": ("kubeflow.org", "v1", "default", "pytorchjobs"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "default", "trainjobs"),
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "default", "jobsets"),
    "Job": ("batch", "v1", "default", "jobs"),
}


@pytest.fixture
def server() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as fake:
        yield fake


@pytest.fixture
def api(server: FakeKubernetes) -> Any:
    return client.CustomObjectsApi(server.api_client())


def create(api: Any, body: Any, **options: Any) -> Any:
    options = {"field_validation": "Strict"} | options
    return api.create_namespaced_custom_object(*CUSTOM[body["kind"]], body, **options)


def refusal(call: Callable[[], Any]) -> tuple[int, str, str]:
    """Return the status, reason and words of a refusal."""
    with pytest.raises(client.ApiException) as error:
        call()
    said = json.loads(str(error.value.body))
    return int(error.value.status or 0), said["reason"], said["message"]


# The API server.


def test_lists_come_in_parts_by_labels_and_a_part_that_comes_too_late_is_410(
    server: FakeKubernetes,
) -> None:
    core: Any = client.CoreV1Api(server.api_client())
    for index in range(5):
        server.create(config(f"c{index}", odd=str(index % 2)))
    found = core.list_namespaced_config_map("default", label_selector="odd in (0)", limit=2)
    assert [one.metadata.name for one in found.items] == ["c0", "c2"]
    token = found.metadata._continue
    rest = core.list_namespaced_config_map(
        "default", label_selector="odd in (0)", limit=2, _continue=token
    )
    assert [one.metadata.name for one in rest.items] == ["c4"]
    by_field = core.list_namespaced_config_map("default", field_selector="metadata.name!=c0")
    assert len(by_field.items) == 4
    server.expire()
    late = refusal(lambda: core.list_namespaced_config_map("default", limit=2, _continue=token))
    assert late[:2] == (410, "Expired")


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("a=1,b!=2", True),
        ("a in (1, 2),!c", True),
        ("a notin (1)", False),
        ("c", False),
        ("a==1,b", True),
    ],
)
def test_label_selectors(selector: str, expected: bool) -> None:
    assert labels_match({"a": "1", "b": "3"}, selector) is expected


def test_a_watch_tells_what_comes_into_and_leaves_its_selector(server: FakeKubernetes) -> None:
    core: Any = client.CoreV1Api(server.api_client())
    before = core.list_namespaced_config_map("default").metadata.resource_version
    server.create(config("c", mine="yes"))
    server.patch("ConfigMap", "c", {"metadata": {"labels": {"mine": "no"}}})
    server.patch("ConfigMap", "c", {"metadata": {"labels": {"mine": "yes"}}})
    server.patch("ConfigMap", "c", {"data": {"a": "2"}})
    server.patch("ConfigMap", "c", {"data": {"a": "2"}})  # changes nothing
    server.delete("c", kind="ConfigMap")
    response: Any = core.list_namespaced_config_map(
        "default",
        watch=True,
        resource_version=before,
        label_selector="mine=yes",
        timeout_seconds=0,
        _preload_content=False,
    )
    events = [json.loads(line)["type"] for line in response.data.splitlines()]
    assert events == ["ADDED", "DELETED", "ADDED", "MODIFIED", "DELETED"]


def test_a_watch_gets_bookmarks_and_then_410_in_an_answer_of_200(server: FakeKubernetes) -> None:
    core: Any = client.CoreV1Api(server.api_client())
    version = core.list_namespaced_pod("default").metadata.resource_version
    response: Any = core.list_namespaced_pod(
        "default",
        watch=True,
        resource_version=version,
        allow_watch_bookmarks=True,
        _preload_content=False,
    )
    lines = iter(response)
    server.create(config("c"))  # moves the version on
    server.bookmark()
    bookmark = json.loads(next(lines))
    assert bookmark["type"] == "BOOKMARK"
    assert int(bookmark["object"]["metadata"]["resourceVersion"]) > int(version)
    server.expire()
    event = json.loads(next(lines))
    assert (response.status, event["type"]) == (200, "ERROR")
    assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")


def test_two_writers_are_told_and_the_first_stays(server: FakeKubernetes, api: Any) -> None:
    create(api, workload("JobSet"))
    assert refusal(lambda: create(api, workload("JobSet")))[:2] == (409, "AlreadyExists")
    stale = server.job("t")
    server.patch("JobSet", "t", {"metadata": {"annotations": {"a": "b"}}})
    late = refusal(lambda: api.replace_namespaced_custom_object(*CUSTOM["JobSet"], "t", stale))
    assert late[:2] == (409, "Conflict")
    wrong = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="another"))
    late = refusal(lambda: api.delete_namespaced_custom_object(*CUSTOM["JobSet"], "t", body=wrong))
    assert late[:2] == (409, "Conflict")


@pytest.mark.parametrize("kind", KINDS)
def test_an_apply_that_is_repeated_changes_nothing(server: FakeKubernetes, kind: str) -> None:
    server.apply(RUNTIME)
    text = manifest({}, {}, kind)
    first = server.apply(text, manager="us")[-1]
    server.condition("t", "Anything")
    again = server.apply(text, manager="us")[-1]
    assert again["metadata"]["generation"] == first["metadata"]["generation"] == 1
    assert again["spec"] == first["spec"]


def test_an_apply_takes_back_what_it_no_longer_says_and_conflicts_with_other_managers(
    server: FakeKubernetes,
) -> None:
    dynamic = DynamicClient(server.api_client())
    maps: Any = dynamic.resources.get(api_version="v1", kind="ConfigMap")

    def apply(manager: str, data: dict[str, str], force: bool = False) -> Any:
        body = config("c") | {"data": data}
        made = maps.server_side_apply(
            body=body, namespace="default", field_manager=manager, force_conflicts=force
        )
        return made.to_dict()["data"]

    apply("us", {"a": "1", "b": "2"})
    assert apply("them", {"c": "3"}) == {"a": "1", "b": "2", "c": "3"}
    assert apply("us", {"a": "1"}) == {"a": "1", "c": "3"}
    conflict = refusal(lambda: apply("us", {"a": "1", "c": "4"}))
    assert conflict[:2] == (409, "Conflict")
    assert 'conflict with "them"' in conflict[2].replace("conflicts", "conflict")
    assert apply("us", {"a": "1", "c": "4"}, force=True) == {"a": "1", "c": "4"}


def test_patches_of_three_kinds() -> None:
    found = {"metadata": {"name": "x"}, "list": [{"name": "a", "v": 1}], "env": [{"name": "a"}]}
    merge = patched(found, {"list": None, "new": 1}, "application/merge-patch+json")
    assert merge == {"metadata": {"name": "x"}, "env": [{"name": "a"}], "new": 1}
    steps = [{"op": "add", "path": "/list/-", "value": 2}, {"op": "remove", "path": "/list/0"}]
    assert patched(found, steps, "application/json-patch+json")["list"] == [2]
    over = patched(
        found,
        {"env": [{"name": "b"}, {"name": "a", "value": "1"}]},
        "application/strategic-merge-patch+json",
    )
    assert over["env"] == [{"name": "a", "value": "1"}, {"name": "b"}]


def test_what_is_owned_goes_with_its_owner_and_in_the_foreground_before_it(
    server: FakeKubernetes, api: Any
) -> None:
    create(api, workload("JobSet"))
    server.hold_deletes = True
    server.run("t")
    api.delete_namespaced_custom_object(
        *CUSTOM["JobSet"], "t", body=client.V1DeleteOptions(propagation_policy="Foreground")
    )
    assert server.job("t")["metadata"]["finalizers"] == ["foregroundDeletion"]
    server.stopped("t")
    for kind in ("JobSet", "Job", "Pod", "Service"):
        assert server.objects_of(kind) == []


def test_a_dry_run_and_a_delete_by_selector(server: FakeKubernetes, api: Any) -> None:
    create(api, workload("Job"), dry_run="All")
    assert server.jobs("Job") == []
    server.create(config("a", mine="yes"))
    server.create(config("b"))
    core: Any = client.CoreV1Api(server.api_client())
    core.delete_collection_namespaced_config_map("default", label_selector="mine=yes")
    assert [one["metadata"]["name"] for one in server.objects_of("ConfigMap")] == ["b"]


def test_what_goes_wrong_on_demand(server: FakeKubernetes, api: Any) -> None:
    core: Any = client.CoreV1Api(server.api_client())
    server.forbid("pods", "list")
    denied = refusal(lambda: core.list_namespaced_pod("default"))
    assert denied[:2] == (403, "Forbidden") and 'cannot list resource "pods"' in denied[2]
    server.tokens = {"good"}
    assert refusal(lambda: core.list_namespaced_config_map("default"))[0] == 401
    server.tokens = None
    server.deny["Job"] = 'admission webhook "policy" denied the request: no GPUs on Fridays'
    assert refusal(lambda: create(api, workload("Job")))[2].endswith("no GPUs on Fridays")
    server.faults = [Fault(method="GET", query="labelSelector", status=500)]
    core.list_namespaced_config_map("default")
    assert refusal(lambda: core.list_namespaced_config_map("default", label_selector="a"))[0] == 500
    with server.away(), pytest.raises(Exception, match="refused"):
        core.list_namespaced_config_map("default", _request_timeout=1)
    core.list_namespaced_config_map("default")


def test_a_group_that_is_not_installed_is_a_plain_404() -> None:
    with FakeKubernetes(without=("jobset.x-k8s.io",)) as server:
        api: Any = client.CustomObjectsApi(server.api_client())
        with pytest.raises(client.ApiException) as error:
            api.list_namespaced_custom_object(*CUSTOM["JobSet"])
        assert (error.value.status, error.value.body) == (404, "404 page not found\n")
        assert api.list_namespaced_custom_object(*CUSTOM["PyTorchJob"])["items"] == []


def test_the_adapter_of_a_real_cluster_asks_as_the_fake_answers(
    server: FakeKubernetes, tmp_path: Path
) -> None:
    file = server.kubeconfig(tmp_path / "config")
    environ = {"KUBECONFIG": str(file), "TOOLKIT_TEST_CLUSTER": "1"}
    environ["TOOLKIT_TEST_NAMESPACE"] = "default"
    with cluster_under_test(environ=environ) as cluster:
        assert isinstance(cluster, RealCluster)
        cluster.apply(manifest({"resources": {"nnodes": 2}}, {}, "JobSet"))
        assert cluster.job("t") == server.job("t")
        assert cluster.pods("t") == server.pods("t")
        cluster.evict(cluster.pods("t")[0]["metadata"]["name"])
        cluster.kill(cluster.pods("t")[1]["metadata"]["name"])
    assert server.jobs("JobSet") == []
    with cluster_under_test(environ={}) as other:
        assert isinstance(other, FakeKubernetes)


# Refused objects, and broken objects that are accepted.


def test_unknown_fields_are_refused_or_dropped(server: FakeKubernetes, api: Any) -> None:
    for kind in ("PyTorchJob", "JobSet", "Job"):
        body = workload(kind)
        body["spec"]["nonsense"] = 1
        status, _, words = refusal(lambda body=body: create(api, body))  # type: ignore[misc]
        assert (status, "spec.nonsense" in words) == (400, True), words
        create(api, body, field_validation="Warn")
        assert "nonsense" not in server.job("t", kind=kind)["spec"]


def changed(body: Any, path: str, value: Any) -> Any:
    """Return a manifest with another value somewhere."""
    *parents, last = path.split(".")
    place = body
    for step in parents:
        place = place[int(step)] if step.isdecimal() else place.setdefault(step, {})
    place[last] = value
    return body


TEMPLATE = "spec.pytorchReplicaSpecs.Worker.template.spec"


@pytest.mark.parametrize(
    ("kind", "path", "value", "status", "words"),
    [
        ("PyTorchJob", "metadata.name", "9t", 403, "DNS-1035"),
        ("PyTorchJob", f"{TEMPLATE}.containers.0.name", "node", 403, "name pytorch"),
        ("PyTorchJob", "spec.nprocPerNode", 1, 422, "must be of type string"),
        ("TrainJob", "metadata.name", "a.b", 422, "RFC 1035"),
        ("TrainJob", "spec.runtimeRef.name", "other", 403, "not found"),
        ("TrainJob", "spec.trainer.env", [{"name": "PET_NNODES", "value": "1"}], 403, "reserved"),
        ("TrainJob", "spec.trainer.numNodes", "2", 422, "must be of type integer"),
        ("Job", "spec.template.spec.restartPolicy", "Sometimes", 422, '"OnFailure", "Never"'),
        ("Job", "spec.template.spec.containers.0.imagePullPolicy", "No", 422, "Unsupported"),
        ("Job", "spec.template.spec.volumes", [], 422, "Not found"),
        ("Job", "spec.parallelism", "two", 400, "parallelism"),
        ("JobSet", "metadata.name", "n" * 50, 403, "exceed"),
    ],
)
def test_what_real_clusters_refuse_is_refused(
    server: FakeKubernetes, api: Any, kind: str, path: str, value: Any, status: int, words: str
) -> None:
    server.apply(RUNTIME)
    found = refusal(lambda: create(api, changed(workload(kind), path, value)))
    assert found[0] == status and words in found[2], found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.pytorchReplicaSpecs.Worker.restartPolicy", "Sometimes"),
        ("spec.runPolicy.cleanPodPolicy", "Never"),
    ],
)
def test_what_the_training_operator_takes_although_it_is_broken_is_taken(
    server: FakeKubernetes, api: Any, path: str, value: str
) -> None:
    create(api, changed(workload("PyTorchJob"), path, value))


def test_two_masters_are_refused(api: Any) -> None:
    body = workload("PyTorchJob")
    replicas = body["spec"]["pytorchReplicaSpecs"]
    replicas["Master"] = json.loads(json.dumps(replicas["Worker"]))
    found = refusal(lambda: create(api, body))
    assert found[0] == 403 and "Master" in found[2]


def test_a_trainjobs_patches_may_not_bring_an_image_or_an_environment(
    server: FakeKubernetes, api: Any
) -> None:
    server.apply(RUNTIME)
    # The CRD has no place for an image; a webhook refuses variables of the trainer's container.
    for key, value, code in (("image", "i", 400), ("env", [{"name": "A", "value": "b"}], 403)):
        body = workload("TrainJob")
        (patch,) = body["spec"]["runtimePatches"]
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        node["template"]["spec"]["template"]["spec"]["containers"][0][key] = value
        status, _, words = refusal(lambda body=body: create(api, body))  # type: ignore[misc]
        assert (status, key in words) == (code, True), words


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("TrainJob", {"spec": {"trainer": {"numNodes": 3}}}),
        ("JobSet", {"spec": {"failurePolicy": {"maxRestarts": 9}}}),
        ("Job", {"spec": {"template": {"spec": {"subdomain": "other"}}}}),
    ],
)
def test_what_cannot_be_changed_later(
    server: FakeKubernetes, api: Any, kind: str, change: Any
) -> None:
    server.apply(RUNTIME)
    create(api, workload(kind))
    found = refusal(lambda: api.patch_namespaced_custom_object(*CUSTOM[kind], "t", change))
    assert found[0] == 422 and "immutable" in found[2], found
