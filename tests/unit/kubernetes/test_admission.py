"""k8s/base/admission: its CEL expressions, evaluated as an API server would.

Each object that a run consists of is evaluated with the account that creates it, so that a pod is
admitted only if everything above it is.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import cel
import pytest
import yaml

from tests.conftest import ROOT
from tests.fakes.kubernetes import FakeKubernetes
from tests.support.kubectl import kubectl
from tests.support.kubernetes_schemas import VERSIONS, faults_of
from tests.unit.kubernetes.site import WORKLOADS, every_workload, make_job, make_profile, runtime
from toolkit.job.kubernetes_options import Workload
from toolkit.planning import plan
from toolkit.planning.pods import RUN_LABEL, WORKLOAD_LABEL
from toolkit.rendering import render

Object = dict[str, Any]

USER = "user"
"""An account with all Roles of k8s/base."""

JOBS, JOBSETS, TRAINER, PYTORCH = "job-controller", "jobset", "trainer", "training-operator"

STATUS_RIGHTS = {
    JOBS: ("batch", "jobs/status", "update"),
    JOBSETS: ("jobset.x-k8s.io", "jobsets/status", "update"),
    TRAINER: ("trainer.kubeflow.org", "trainjobs/status", "update"),
    PYTORCH: ("kubeflow.org", "pytorchjobs/status", "update"),
}
"""What the ClusterRoles of the controllers hold (Kubernetes 1.34, JobSet 0.12, Trainer 2.3,
Training Operator 1.9), of the rights that the policies look at."""

CREATORS = {
    ("Pod", "Job"): JOBS,
    ("Pod", "PyTorchJob"): PYTORCH,
    ("Job", "JobSet"): JOBSETS,
    ("JobSet", "TrainJob"): TRAINER,
}
"""The account that creates an object, by its kind and that of its owner."""

CHANGED = (
    "the labels torch-deploy-toolkit/run and torch-deploy-toolkit/workload of a pod cannot be "
    "added, changed or removed"
)
BARE = "only the controller of a workload creates pods with the label torch-deploy-toolkit/run"
OWNER = (
    "a pod with the label torch-deploy-toolkit/run keeps its owner; a deletion with "
    "--cascade=orphan ends when the pods are gone"
)


@functools.cache
def documents(kind: str) -> tuple[Object, ...]:
    text = kubectl("kustomize", str(ROOT / "k8s/base/admission"))
    return tuple(one for one in yaml.safe_load_all(text) if one["kind"] == kind)


def policies() -> tuple[Object, ...]:
    return documents("ValidatingAdmissionPolicy")


def test_no_default_in_a_list_is_left_to_the_server() -> None:
    """`kubectl apply` of the same file would find a change each time."""
    rules = [r for p in policies() for r in p["spec"]["matchConstraints"]["resourceRules"]]
    assert {rule["scope"] for rule in rules} == {"Namespaced"}


@functools.cache
def rights_of(account: str) -> frozenset[tuple[str, str, str]]:
    """Return the rights of an account as groups, resources and verbs."""
    if account != USER:
        return frozenset({STATUS_RIGHTS[account]})
    roles = yaml.safe_load_all(kubectl("kustomize", str(ROOT / "k8s/base")))
    rules = [rule for role in roles if role["kind"] == "Role" for rule in role["rules"]]
    assert len(rules) > 10
    return frozenset(
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


def authorizer(account: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of Kubernetes' CEL library `authorizer`, for one account."""

    def check(resource: Object, verb: str) -> bool:
        return (resource["group"], f"{resource['name']}/{resource['sub']}", verb) in rights_of(
            account
        )

    return {
        "group": lambda _, group: {"group": group},
        "resource": lambda group, name: {**group, "name": name},
        "subresource": lambda resource, sub: {**resource, "sub": sub},
        "namespace": lambda resource, name: {**resource, "namespace": name},
        "check": check,
        "allowed": lambda decision: decision,
    }


def applies(spec: Object, resource: str, objects: list[Object], operation: str) -> bool:
    """Whether a policy has to do with a request."""
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert rule["operations"] == ["CREATE", "UPDATE"]
    assert operation in rule["operations"]
    selector = spec["matchConstraints"].get("objectSelector")
    if selector is not None:
        assert selector == {"matchExpressions": [{"key": RUN_LABEL, "operator": "Exists"}]}
        if not any(RUN_LABEL in (one["metadata"].get("labels") or {}) for one in objects):
            return False
    return resource in rule["resources"]


def refusals(
    after: Object, before: Object | None = None, *, by: str = USER, resource: str = ""
) -> list[str]:
    """Return the messages with which the policies refuse a request of an account."""
    operation = "UPDATE" if before else "CREATE"
    resource = resource or f"{after['kind'].lower()}s"
    objects = [one for one in (after, before) if one is not None]
    refused = []
    for policy in policies():
        spec = policy["spec"]
        if not applies(spec, resource, objects, operation):
            continue
        variables: Object = {}
        context = cel.Context()
        for name, function in authorizer(by).items():
            context.add_function(name, function)
        request = {"operation": operation, "namespace": "default"}
        known = {"object": after, "oldObject": before, "request": request, "authorizer": {}}
        for name, value in known.items():
            context.add_variable(name, value)
        for variable in spec["variables"]:
            context.add_variable("variables", variables)
            variables[variable["name"]] = cel.evaluate(variable["expression"], context)
        context.add_variable("variables", variables)
        for rule in spec["validations"]:
            allowed = cel.evaluate(rule["expression"], context)
            assert isinstance(allowed, bool)
            if not allowed:
                message = rule.get("messageExpression")
                refused.append(str(cel.evaluate(message, context)) if message else rule["message"])
    return refused


def controller_of(thing: Object) -> Object | None:
    owners = thing["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def creator_of(thing: Object) -> str:
    owner = controller_of(thing)
    return CREATORS[thing["kind"], owner["kind"]] if owner else USER


def created(text: str) -> list[Object]:
    """Return what a cluster makes of a manifest: the workload, what is below it, and the pods."""
    with FakeKubernetes() as server:
        server.apply(runtime())
        server.apply(text)
        kinds = (*WORKLOADS, "Pod")
        things = [{"kind": kind, **one} for kind in kinds for one in server.objects_of(kind)]
        return sorted(things, key=lambda one: kinds.index(one["kind"]))


def admitted(things: list[Object]) -> Iterator[Object]:
    """Yield the objects that a server admits; without an owner an object does not come to be."""
    uids = set()
    for thing in things:
        owner = controller_of(thing)
        there = owner is None or owner["uid"] in uids
        if there and not refusals(thing, by=creator_of(thing)):
            uids.add(thing["metadata"]["uid"])
            yield thing


def manifest(workload: Workload, name: str = "t") -> str:
    return render(plan(make_job(), make_profile(workload), run_name=name))


@functools.cache
def parts_of(workload: Workload) -> tuple[Object, ...]:
    return tuple(created(manifest(workload)))


def part(workload: Workload, kind: str) -> Object:
    """Return an object of the run `t`."""
    return copy.deepcopy(next(one for one in parts_of(workload) if one["kind"] == kind))


def pod(workload: Workload = "Job") -> Object:
    """Return a pod of the run `t`, as the controllers make it."""
    return part(workload, "Pod")


def identity_of(thing: Object) -> tuple[str | None, str | None]:
    labels = thing["metadata"].get("labels") or {}
    return labels.get(WORKLOAD_LABEL), labels.get(RUN_LABEL)


def test_every_version_takes_every_object() -> None:
    bindings = documents("ValidatingAdmissionPolicyBinding")
    names = [policy["metadata"]["name"] for policy in policies()]
    assert [binding["spec"]["policyName"] for binding in bindings] == names
    assert [binding["spec"]["validationActions"] for binding in bindings] == [["Deny"]] * 3
    for document in (*policies(), *bindings):
        for version in VERSIONS:
            assert faults_of(document, version) == []


@every_workload
def test_pods_of_every_workload_have_the_labels_of_their_run(workload: Workload) -> None:
    things = list(parts_of(workload))
    pods = [thing for thing in things if thing["kind"] == "Pod"]
    assert pods
    assert {identity_of(one) for one in pods} == {(workload, "t")}
    assert list(admitted(things)) == things
    for thing in things:  # a later change of something else, by whoever may do it
        assert refusals(thing, thing) == []


FOREIGN_NAMES = ("t", "t-node-0", "t-node", "t-worker-0", "u")


@pytest.mark.parametrize("name", FOREIGN_NAMES)
@every_workload
def test_no_pod_of_a_foreign_workload_gets_the_labels_of_a_run(
    workload: Workload, name: str
) -> None:
    """A stranger writes any labels into the template of a workload of any kind and name."""
    text = manifest(workload, name)
    for claimed in WORKLOADS:
        labels = f"{RUN_LABEL}: {name}\n", f"{WORKLOAD_LABEL}: {workload}\n"
        assert all(label in text for label in labels)
        foreign = text.replace(labels[0], f"{RUN_LABEL}: t\n")
        things = created(foreign.replace(labels[1], f"{WORKLOAD_LABEL}: {claimed}\n"))
        pods = [thing for thing in things if thing["kind"] == "Pod"]
        assert {identity_of(one) for one in pods} == {(claimed, "t")}
        if (claimed, "t") in {(one["kind"], one["metadata"]["name"]) for one in things}:
            continue  # this is the run, and nothing else has its name at the same time
        assert [one for one in admitted(things) if one["kind"] == "Pod"] == []


@every_workload
def test_a_pod_without_its_kind_does_not_get_the_label(workload: Workload) -> None:
    made = pod(workload)
    del made["metadata"]["labels"][WORKLOAD_LABEL]
    (said, *_) = refusals(made, by=creator_of(made))
    assert said == (
        "the label torch-deploy-toolkit/run needs the label torch-deploy-toolkit/workload beside "
        "it; render the manifest again if it is of an earlier version"
    )


@every_workload
def test_a_pod_of_another_run_is_refused_with_the_name_of_the_run(workload: Workload) -> None:
    made = pod(workload)
    made["metadata"]["labels"][RUN_LABEL] = "u"
    said = f"the label torch-deploy-toolkit/run is for the pods of the {workload} u, and"
    assert refusals(made, by=creator_of(made)) == [f"{said} this pod is not one of them"]


def test_a_jobset_whose_job_has_the_name_of_another_runs_job_gets_no_pods() -> None:
    """JobSet `a` with the replicated Job `b-node` has a Job `a-b-node-0`, as JobSet `a-b` has."""
    text = manifest("JobSet", "a").replace(f"{RUN_LABEL}: a\n", f"{RUN_LABEL}: a-b\n")
    things = created(text.replace("- name: node\n      replicas", "- name: b-node\n      replicas"))
    assert [thing["metadata"]["name"] for thing in things[:2]] == ["a", "a-b-node-0"]
    assert [thing["kind"] for thing in admitted(things)] == ["JobSet"]
    (said,) = refusals(things[1], by=JOBSETS)
    assert said == (
        "only the controller of the JobSet a-b creates a Job whose pods have its label "
        "torch-deploy-toolkit/run"
    )


@every_workload
def test_an_owner_reference_that_a_user_writes_is_worth_nothing(workload: Workload) -> None:
    """Everything between the workload and its pods, the references included, copied by a user."""
    copies = [thing for thing in parts_of(workload) if controller_of(thing)]
    assert [thing["kind"] for thing in copies][-1] == "Pod"
    for thing in copies:
        assert len(refusals(thing, by=USER)) == 1
    assert refusals(pod(workload), by=USER) == [BARE]


@every_workload
def test_another_controller_does_not_stand_in_for_the_own(workload: Workload) -> None:
    for thing in parts_of(workload):
        if controller_of(thing):
            for account in STATUS_RIGHTS.keys() - {creator_of(thing)}:
                assert len(refusals(thing, by=account)) == 1


@pytest.mark.parametrize(
    "owners",
    [
        None,
        [],
        [{"apiVersion": "batch/v1", "kind": "Job", "name": "t"}],
        [{"apiVersion": "batch/v1", "kind": "Job", "name": "t", "controller": False}],
        [{"apiVersion": "batch/v1", "kind": "Job", "name": "t-node-0", "controller": True}],
        [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "t", "controller": True}],
        [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "t", "controller": True}],
        [{"apiVersion": "mine/v1", "kind": "Job", "name": "t", "controller": True}],
    ],
)
def test_a_pod_that_its_workload_does_not_control_is_refused(owners: Any) -> None:
    made = pod()
    made["metadata"]["ownerReferences"] = owners
    if owners is None:
        del made["metadata"]["ownerReferences"]
    assert len(refusals(made, by=JOBS)) == 1


@pytest.mark.parametrize("resource", ["pods", "pods/status"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("Job", "t"), ("Job", "u")),
        (("Job", "t"), ("JobSet", "t")),
        (("Job", "t"), (None, None)),
        ((None, None), ("Job", "t")),
        ((None, "t"), ("Job", "t")),
        (("Job", None), ("Job", "t")),
    ],
)
def test_the_labels_of_a_pod_stay(before: Any, after: Any, resource: str) -> None:
    old, new = pod(), pod()
    for one, values in [(old, before), (new, after)]:
        marks = zip((WORKLOAD_LABEL, RUN_LABEL), values, strict=True)
        one["metadata"]["labels"] = {key: value for key, value in marks if value}
    for account in (USER, JOBS):
        assert refusals(new, old, by=account, resource=resource) == [CHANGED]


@every_workload
def test_a_pod_keeps_its_owner(workload: Workload) -> None:
    """Else `kubectl delete --cascade=orphan` would free the name while the pods run."""
    before, after = pod(workload), pod(workload)
    del after["metadata"]["ownerReferences"]
    assert refusals(after, before) == [OWNER]
    assert refusals(before, after) == [OWNER]
    assert refusals(after, after) == []


@pytest.mark.parametrize("resource", ["pods/binding", "bindings"])
def test_a_binding_gives_no_labels(resource: str) -> None:
    """Kubernetes copies the labels of a Binding to the pod."""
    made: Object = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "editor", "namespace": "default"},
        "target": {"kind": "Node", "name": "n1"},
    }
    assert refusals(made, resource=resource) == []
    made["metadata"]["labels"] = {RUN_LABEL: "t", WORKLOAD_LABEL: "Job"}
    assert len(refusals(made, resource=resource)) == 2


@pytest.mark.parametrize("workload", ["JobSet", "TrainJob"])
def test_no_template_gets_the_labels_later(workload: Workload) -> None:
    """The labels in the template of a suspended Job or JobSet can be changed."""
    kind = "Job" if workload == "JobSet" else "JobSet"
    after = part(workload, kind)
    before = copy.deepcopy(after)
    spec = before["spec"]
    for part_of in spec.get("replicatedJobs") or [{"template": before}]:
        del part_of["template"]["spec"]["template"]["metadata"]["labels"][WORKLOAD_LABEL]
    assert refusals(before) == []
    (said,) = refusals(after, before)
    assert said == (
        f"only the controller of the {workload} t creates a {kind} whose pods have its label "
        "torch-deploy-toolkit/run"
    )
    assert refusals(before, after) == []
    assert refusals(after, before, by=creator_of(after)) == []


def test_what_has_no_label_of_a_run_is_let_be() -> None:
    template: Object = {"spec": {}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": {"template": template}}
    bare: Object = {"kind": "Pod", "metadata": {"name": "editor"}, "spec": {}}
    jobset: Object = {"kind": "JobSet", "metadata": {}, "spec": {}}
    empty: Object = {
        "kind": "JobSet",
        "metadata": {},
        "spec": {"replicatedJobs": [{"template": {}}]},
    }
    for thing in (bare, job, jobset, empty):
        assert refusals(thing) == []
        assert refusals(thing, thing) == []
    template["metadata"] = {}
    assert refusals(job) == []
