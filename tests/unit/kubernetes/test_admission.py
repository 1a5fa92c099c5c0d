"""k8s/base/admission: its CEL expressions, evaluated as an API server would."""

import copy
from typing import Any

import cel
import pytest
import yaml

from tests.conftest import ROOT
from tests.fakes.kubernetes import FakeKubernetes
from tests.support.kubectl import kubectl
from tests.support.kubernetes_schemas import VERSIONS, faults_of
from tests.unit.kubernetes.site import every_workload, make_job, make_profile, runtime
from toolkit.job.kubernetes_options import Workload
from toolkit.planning import plan
from toolkit.planning.pods import RUN_LABEL
from toolkit.rendering import render

Object = dict[str, Any]

CHANGED = "the label torch-deploy-toolkit/run of a pod cannot be added, changed or taken away"


def documents() -> list[Object]:
    text = kubectl("kustomize", str(ROOT / "k8s/base/admission"))
    return list(yaml.safe_load_all(text))


def refusals(after: Object | None, before: Object | None = None) -> list[str]:
    """Return the messages with which the policy refuses a request about a pod."""
    (policy, _) = documents()
    spec = policy["spec"]
    (selector,) = spec["matchConstraints"]["objectSelector"]["matchExpressions"]
    assert selector == {"key": RUN_LABEL, "operator": "Exists"}
    pods = [pod for pod in (after, before) if pod is not None]
    if not any(RUN_LABEL in (pod["metadata"].get("labels") or {}) for pod in pods):
        return []
    known: Object = {
        "object": after,
        "oldObject": before,
        "request": {"operation": "UPDATE" if before else "CREATE"},
        "variables": {},
    }
    for variable in spec["variables"]:
        known["variables"][variable["name"]] = cel.evaluate(variable["expression"], known)
    refused = []
    for rule in spec["validations"]:
        allowed = cel.evaluate(rule["expression"], known)
        assert isinstance(allowed, bool)
        if not allowed:
            message = rule.get("messageExpression")
            refused.append(str(cel.evaluate(message, known)) if message else rule["message"])
    return refused


def pod(workload: Workload = "Job") -> Object:
    """Return a pod of the run `t`, as the controllers make it."""
    with FakeKubernetes() as server:
        server.apply(runtime())
        server.apply(render(plan(make_job(), make_profile(workload), run_name="t")))
        return dict(server.pods("t")[0])


def test_every_version_takes_both_objects() -> None:
    policy, binding = documents()
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    for document in (policy, binding):
        for version in VERSIONS:
            assert faults_of(document, version) == []


@every_workload
def test_pods_of_every_workload_have_the_label_of_their_run(workload: Workload) -> None:
    made = pod(workload)
    assert made["metadata"]["labels"][RUN_LABEL] == "t"
    assert refusals(made) == []
    running = copy.deepcopy(made)
    del running["metadata"]["ownerReferences"]  # as `kubectl delete --cascade=orphan` leaves it
    assert refusals(running, made) == []


@every_workload
def test_a_pod_of_another_workload_does_not_get_the_label(workload: Workload) -> None:
    made = pod(workload)
    made["metadata"]["labels"][RUN_LABEL] = "u"
    said = "the label torch-deploy-toolkit/run is for the pods of the workload called u, and"
    assert refusals(made) == [f"{said} this pod is not one of them"]


@pytest.mark.parametrize(
    "owners",
    [
        None,
        [],
        [{"apiVersion": "batch/v1", "kind": "Job", "name": "t"}],
        [{"apiVersion": "batch/v1", "kind": "Job", "name": "t", "controller": False}],
        [{"apiVersion": "batch/v1", "kind": "Job", "name": "t-node-01", "controller": True}],
        [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "t", "controller": True}],
        [{"apiVersion": "mine/v1", "kind": "Job", "name": "t", "controller": True}],
    ],
)
def test_a_pod_that_no_workload_controls_does_not_get_the_label(owners: Any) -> None:
    made = pod()
    made["metadata"]["ownerReferences"] = owners
    if owners is None:
        del made["metadata"]["ownerReferences"]
    assert len(refusals(made)) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [("t", "u"), ("t", None), (None, "t")],
)
def test_the_label_of_a_pod_stays(before: str | None, after: str | None) -> None:
    old, new = pod(), pod()
    for one, value in [(old, before), (new, after)]:
        del one["metadata"]["labels"]
        if value:
            one["metadata"]["labels"] = {RUN_LABEL: value}
    assert refusals(new, old) == [CHANGED]


def test_pods_without_the_label_are_let_be() -> None:
    bare = {"metadata": {"name": "editor"}, "spec": {}}
    assert refusals(bare) == []
    assert refusals(bare, bare) == []
