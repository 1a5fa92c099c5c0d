"""k8s/base and its overlays: what kustomize makes of them, and no more than is needed."""

import copy
import functools
import json
import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes import client

import toolkit
from tests.conftest import ROOT
from tests.fakes.kubernetes import FakeKubernetes, Fault
from tests.fakes.kubernetes.patching import laid_over
from tests.support.kubectl import kubectl
from tests.support.kubernetes_schemas import VERSIONS, faults_of
from toolkit.job.kubernetes_options import Workload
from toolkit.kubernetes import KubernetesLauncher, volume, watch_states
from toolkit.kubernetes.client.connection import Connection
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.workloads import KINDS
from toolkit.planning.pods import MANAGER, WORKLOAD_LABEL

Object = dict[str, Any]

FOLDERS = ("base", "base/kueue", "base/trainer", "overlays/team-a", "overlays/baseline")
MODELS = {
    "Namespace": client.V1Namespace,
    "ServiceAccount": client.V1ServiceAccount,
    "PersistentVolumeClaim": client.V1PersistentVolumeClaim,
    "NetworkPolicy": client.V1NetworkPolicy,
    "Service": client.V1Service,
    "Role": client.V1Role,
    "RoleBinding": client.V1RoleBinding,
}


@functools.cache
def built(folder: str) -> str:
    return kubectl("kustomize", str(ROOT / "k8s" / folder))


def things(folder: str) -> dict[str, Object]:
    """Return what kustomize makes of a folder, as `KIND/NAME`."""
    found = {f"{o['kind']}/{o['metadata']['name']}": o for o in yaml.safe_load_all(built(folder))}
    return copy.deepcopy(found)


def runtime() -> Object:
    """Return the TrainingRuntime."""
    return things("base/trainer")["TrainingRuntime/torch-deploy-toolkit"]


def node(found: Object) -> Object:
    """Return the Job's template of a TrainingRuntime."""
    (job,) = found["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    return dict(job["template"])


def workload(kind: str, **changes: Any) -> Object:
    """Render the main job for the namespace of k8s/base, with other facts of the site."""
    text = (ROOT / "k8s/profiles/k8s.yaml").read_text()
    keys = {"supervisor": "installed", **yaml.safe_load(text), **changes}
    site = toolkit.KubernetesProfile.model_validate(keys)
    job = toolkit.load(ROOT / "jobs/digits.yaml").replace(**{"kubernetes.workload": kind})
    found = list(yaml.safe_load_all(toolkit.render(toolkit.plan(job, site))))
    return next(thing for thing in found if thing["kind"] == kind)


def closed(schema: Any) -> Any:
    """Return a CRD's schema in which unknown fields are errors, as with strict validation."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault("additionalProperties", False)
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
    return made


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_object_is_valid_down_to_the_last_field(folder: str) -> None:
    for name, thing in things(folder).items():
        if model := MODELS.get(thing["kind"]):
            model.model_validate(thing)
            for version in VERSIONS:
                assert faults_of(thing, version) == []
        elif thing["kind"] == "TrainingRuntime":
            schema = json.loads(
                (ROOT / "tests/fakes/kubernetes/schemas/trainingruntimes.json").read_text()
            )
            schema["properties"]["metadata"] = {}
            jsonschema.validate(thing, closed(schema))
        else:
            # Kueue's schema is not here; these two fields are all there is.
            assert (name, thing["apiVersion"]) == ("LocalQueue/training", "kueue.x-k8s.io/v1beta2")
            assert list(thing["spec"]) == ["clusterQueue"]


def apply(server: FakeKubernetes, folder: str, config: Path) -> int:
    """Apply a folder twice with the real kubectl; return how many objects that are."""
    server.kubeconfig(config)
    # The fake has no OpenAPI documents for kubectl to look into first; it looks itself.
    argv = ["apply", "--server-side", "--validate=false", "-k", str(ROOT / "k8s" / folder)]
    said = kubectl(*argv, config=config)
    assert kubectl(*argv, config=config) == said
    return len(said.splitlines())


def test_kubectl_applies_the_base_where_there_are_no_operators(tmp_path: Path) -> None:
    with FakeKubernetes(operator=False) as server:
        assert apply(server, "base", tmp_path / "config") == len(things("base"))
        assert server.object("Role", "training-watch")["metadata"]["namespace"] == "training"


def test_kubectl_applies_an_overlay_and_a_trainjob_finds_its_runtime_there(tmp_path: Path) -> None:
    site = toolkit.load_profile(str(ROOT / "k8s/profiles/team-a.yaml"))
    text = toolkit.render(toolkit.plan(toolkit.load(ROOT / "jobs/digits.yaml"), site))
    with FakeKubernetes() as server:
        assert apply(server, "overlays/team-a", tmp_path / "config") == len(
            things("overlays/team-a")
        )
        server.apply(text)
        jobset = server.object("JobSet", "digits")
    assert jobset["metadata"]["namespace"] == "team-a"
    assert jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] == 2


def test_the_base_needs_no_operator_and_is_all_in_one_namespace() -> None:
    found = things("base")
    assert {thing["kind"] for thing in found.values()} == set(MODELS)
    assert found["Namespace/training"]["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/warn": "restricted",
    }
    others = [thing for thing in found.values() if thing["kind"] != "Namespace"]
    assert {thing["metadata"]["namespace"] for thing in others} == {"training"}
    assert found["ServiceAccount/training"]["automountServiceAccountToken"] is False
    assert found["PersistentVolumeClaim/runs"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_an_overlay_moves_everything_and_changes_what_teams_differ_in() -> None:
    found, base = things("overlays/team-a"), things("base")
    namespaces = {thing["metadata"].get("namespace") for thing in found.values()}
    assert namespaces == {None, "team-a"}
    assert "Namespace/team-a" in found
    base["Namespace/team-a"] = base.pop("Namespace/training")
    own = {"LocalQueue/training", "TrainingRuntime/torch-deploy-toolkit"}
    assert {*base, *own, "NetworkPolicy/training-egress"} == set(found)
    assert found["LocalQueue/training"]["spec"]["clusterQueue"] == "research"
    assert found["PersistentVolumeClaim/runs"]["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "2Ti"}},
        "storageClassName": "shared-files",
    }
    subjects = {
        name: [subject["name"] for subject in thing["subjects"]]
        for name, thing in found.items()
        if thing["kind"] == "RoleBinding"
    }
    assert subjects == {
        "RoleBinding/training-logs": ["team-a"],
        "RoleBinding/training-submit": ["team-a", "nightly"],
        "RoleBinding/training-transfer": ["team-a"],
        "RoleBinding/training-watch": ["team-a", "on-call", "nightly"],
    }
    labels = things("overlays/baseline")["Namespace/training"]["metadata"]["labels"]
    assert set(labels.values()) == {"baseline"}


def values_of(thing: Any, key: str) -> set[str]:
    """Return what stands under a key, however deep."""
    inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list) else ()
    own = {thing[key]} if isinstance(thing, dict) and key in thing else set()
    return own.union(*(values_of(one, key) for one in inner))


@pytest.mark.parametrize(
    ("profile", "folder"), [("k8s", "base"), ("team-a", "overlays/team-a"), ("bare", None)]
)
@pytest.mark.parametrize("workload", ["PyTorchJob", "TrainJob", "JobSet", "Job"])
def test_a_profile_names_what_its_folder_makes(
    profile: str, folder: str | None, workload: str
) -> None:
    site = toolkit.load_profile(str(ROOT / f"k8s/profiles/{profile}.yaml"))
    assert isinstance(site, toolkit.KubernetesProfile)
    job = toolkit.load(ROOT / "jobs/digits.yaml").replace(**{"kubernetes.workload": workload})
    *_, last = yaml.safe_load_all(toolkit.render(toolkit.plan(job, site)))
    names = {
        "PersistentVolumeClaim": values_of(last, "claimName"),
        "ServiceAccount": values_of(last, "serviceAccountName"),
        "LocalQueue": values_of(last, "kueue.x-k8s.io/queue-name"),
        "TrainingRuntime": {site.training_runtime} if workload == "TrainJob" else set(),
    }
    if folder is None:
        names.pop("TrainingRuntime")
        assert not any(names.values())
        return
    found = things(folder) | things("base/trainer")
    assert (
        last["metadata"]["namespace"]
        == things(folder)["ServiceAccount/training"]["metadata"]["namespace"]
    )
    assert names["PersistentVolumeClaim"] and names["ServiceAccount"]
    for kind, used in names.items():
        for name in used:
            assert f"{kind}/{name}" in found


DNS = {(53, "UDP"), (53, "TCP"), (5353, "UDP"), (5353, "TCP")}
OURS = {"podSelector": {"matchLabels": {"app.kubernetes.io/managed-by": MANAGER}}}


def test_training_pods_reach_each_other_and_dns_and_nobody_else_reaches_them() -> None:
    found = things("base")
    closed = found["NetworkPolicy/training-default-deny"]["spec"]
    assert closed == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    opened = found["NetworkPolicy/training-pods"]["spec"]
    assert opened["podSelector"] == OURS["podSelector"]
    assert opened["ingress"] == [{"from": [OURS]}]
    each_other, names = opened["egress"]
    assert each_other == {"to": [OURS]}
    assert {(port["port"], port["protocol"]) for port in names["ports"]} == DNS
    job = toolkit.load(ROOT / "jobs/digits.yaml")
    for name in ("k8s", "team-a"):
        site = toolkit.load_profile(str(ROOT / f"k8s/profiles/{name}.yaml"))
        assert isinstance(site, toolkit.KubernetesProfile)
        for kind in ("PyTorchJob", "TrainJob", "JobSet", "Job"):
            one = site.model_copy(update={"workload": kind})
            *_, made = yaml.safe_load_all(toolkit.render(toolkit.plan(job, one)))
            labels = values_of(made, "app.kubernetes.io/managed-by")
            assert labels == {MANAGER}
            if kind == "Job":
                service = found["Service/training"]
                assert made["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
                assert service["spec"]["selector"] == OURS["podSelector"]["matchLabels"]
                assert service["spec"]["clusterIP"] == "None"


def reached(policy: Object, address: str) -> bool:
    """Whether a policy lets pods reach an address, by any port but those of DNS."""
    blocks = [
        peer["ipBlock"]
        for rule in policy["spec"].get("egress") or ()
        if {(port["port"], port["protocol"]) for port in rule.get("ports") or ()} != DNS
        for peer in rule["to"]
        if "ipBlock" in peer
    ]
    return any(
        ip_address(address) in ip_network(block["cidr"])
        and not any(ip_address(address) in ip_network(out) for out in block.get("except") or ())
        for block in blocks
    )


def test_no_policy_lets_pods_reach_where_clouds_give_out_credentials() -> None:
    policies = [
        thing
        for folder in FOLDERS
        for thing in things(folder).values()
        if thing["kind"] == "NetworkPolicy"
    ]
    for networks in (["0.0.0.0/0", "::/0"], ["128.0.0.0/1", "fd00::/8"], ["10.0.0.0/8"], []):
        text = toolkit.render(
            toolkit.plan(
                toolkit.load(ROOT / "jobs/digits.yaml"),
                toolkit.KubernetesProfile(supervisor="installed", egress=tuple(networks)),
            )
        )
        policy, *_ = yaml.safe_load_all(text)
        assert reached(policy, "10.1.2.3") == bool({"0.0.0.0/0", "10.0.0.0/8"} & set(networks))
        assert reached(policy, "203.0.113.9") == bool({"0.0.0.0/0", "128.0.0.0/1"} & set(networks))
        for version in VERSIONS:
            assert faults_of(policy, version) == []
        policies.append(policy)
    assert len(policies) > 8
    for policy in policies:
        assert not any(reached(policy, one) for one in ("169.254.169.254", "fd00:ec2::254"))


@pytest.mark.parametrize("network", ["169.254.169.254/32", "fd00:ec2::254/128", "10.0.0.1/8", "x"])
def test_a_network_that_pods_must_not_reach_or_that_is_none_is_refused(network: str) -> None:
    with pytest.raises(ValueError, match=r"credentials|write a network like"):
        toolkit.KubernetesProfile.model_validate({"egress": [network]})


def test_who_submits_has_no_right_to_services_policies_and_foreign_configmaps() -> None:
    rights = granted("submit")
    resources = {resource for _, resource, _ in rights}
    assert not resources & {"services", "networkpolicies", "pods", "secrets", "endpoints"}
    assert {verb for _, resource, verb in rights if resource == "configmaps"} == {"create"}


def test_the_runtime_replaces_pods_as_a_rendered_jobset_does() -> None:
    found = runtime()
    assert found["metadata"]["labels"] == {"trainer.kubeflow.org/framework": "torch"}
    assert found["spec"]["mlPolicy"] == {"numNodes": 1, "torch": {}}
    jobset, template = found["spec"]["template"]["spec"], node(found)
    assert jobset["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert template["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    (rendered,) = workload("JobSet")["spec"]["replicatedJobs"]
    own = {"parallelism", "completions", "activeDeadlineSeconds", "template"}
    mine, theirs = (
        {key: value for key, value in spec.items() if key not in own}
        for spec in (template["spec"], rendered["template"]["spec"])
    )
    assert (
        mine
        == theirs
        == {
            "completionMode": "Indexed",
            "backoffLimitPerIndex": 6,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "TerminatingOrFailed",
        }
    )
    assert "failurePolicy" not in jobset, "its Job has then replaced pods as often as it may"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"runs_claim": None, "service_account": None},
        {"runs_dir": "/data/runs", "mounts": [{"source": "claim:data", "target": "/data/in"}]},
        {"run_as_user": 0, "pod_security": "baseline", "read_only_root": False},
    ],
)
def test_a_trainjob_laid_over_the_runtime_is_the_pod_of_the_other_workloads(
    changes: Object,
) -> None:
    train, jobset = (workload(kind, **changes)["spec"] for kind in ("TrainJob", "JobSet"))
    (patch,) = train["runtimePatches"]
    (change,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    # As Trainer does it: a strategic merge of the Job's template (mergeRuntimePatches).
    made = laid_over(node(runtime()), change["template"])["spec"]["template"]
    wanted = jobset["replicatedJobs"][0]["template"]["spec"]["template"]
    kinds = [pod["metadata"]["labels"].pop(WORKLOAD_LABEL) for pod in (made, wanted)]
    assert kinds == ["TrainJob", "JobSet"]
    (container,), (other,) = made["spec"].pop("containers"), wanted["spec"].pop("containers")
    # What Trainer takes from the TrainJob itself. Its names differ, and so do those of the hosts.
    brought = {"image", "command", "args", "env", "resources"}
    assert set(other) - brought <= set(container)
    assert {k: v for k, v in container.items() if k not in brought} == {
        k: v for k, v in other.items() if k not in brought
    }
    assert made == wanted


Right = tuple[str, str, str]
"""A group of the API, a resource, a verb."""

VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def asked(server: FakeKubernetes) -> set[Right]:
    """Return the rights that requests need (Kubernetes, RBAC: request verbs), and forget them."""
    found = set()
    for method, path, query in server.requests:
        place = re.fullmatch(
            r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)/namespaces/[^/]+/"
            r"(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?",
            path,
        )
        if place is None:  # discovery, which every user may read
            assert method == "GET" and path.startswith("/api"), path
            continue
        verb = VERBS[method]
        if place["name"] is None and verb in ("get", "delete"):
            verb = {"get": "list", "delete": "deletecollection"}[verb]
            verb = "watch" if query.get("watch") in ("true", "1", "True") else verb
        resource = "/".join(filter(None, (place["plural"], place["sub"])))
        found.add((place["group"] or "", resource, verb))
        if place["sub"] == "exec":
            found.add(("", resource, "create"))  # since 1.35, for a GET as well
        if verb == "patch" and "fieldManager" in query:
            found.add((place["group"] or "", resource, "create"))  # the object did not exist
    server.requests.clear()
    return found


def granted(*roles: str) -> set[Right]:
    """Return the rights that Roles of k8s/base grant."""
    rules = [rule for role in roles for rule in things("base")[f"Role/training-{role}"]["rules"]]
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(rights: set[Right]) -> set[Right]:
    """Return rights with list, get and watch as one: each of them shows the same objects."""
    read = {"get", "list", "watch"}
    return {(group, what, "read" if verb in read else verb) for group, what, verb in rights}


def test_each_role_grants_what_its_commands_ask_for_and_no_more(tmp_path: Path) -> None:
    submitting, watching, logging = set[Right](), set[Right](), set[Right]()
    job, files = toolkit.load(ROOT / "jobs/digits.yaml"), {"payload.pkl": b"a function's code"}
    path = ".*/(podgroups)/.*"
    gangs: dict[Workload, str | None] = {
        "PyTorchJob": "volcano",
        "TrainJob": None,
        "JobSet": "scheduler-plugins",
        "Job": None,
    }
    with FakeKubernetes(kueue=True) as server:
        server.apply((ROOT / "k8s/base/trainer/runtime.yaml").read_text())
        for kind, gang in gangs.items():
            site = toolkit.KubernetesProfile.model_validate(
                {"workload": kind, "runs_claim": "runs", "queue": "q", "gang_scheduler": gang}
                | {"service": "training", "network_policy": False}
            )
            api, environ = server.api_client(), {"HOME": str(tmp_path)}
            launcher = KubernetesLauncher(site, api_client=api, environ=environ)
            plan = toolkit.plan(job, site)
            server.requests.clear()
            # After a refusal, the objects that were created for the run are deleted.
            server.deny[kind] = "not here"
            with pytest.raises(toolkit.ToolkitError, match="not here"):
                launcher.submit(plan, files=files)
            del server.deny[kind]
            launcher.submit(plan).cancel()
            # After a conflict, it reads whether the existing object is its own.
            server.faults = [Fault(method="PATCH", path=path, status=409, times=9, arrives=True)]
            run = launcher.submit(plan, files=files)
            server.faults.clear()
            submitting |= asked(server)

            run.status()
            toolkit.statuses([run])
            changes = watch_states(site, kind, api_client=api, environ=environ)
            next(changes)
            if kind != "PyTorchJob":  # Kueue ignores PyTorchJobs unless configured otherwise
                server.admit(run.object_name)
            server.run(run.object_name)
            assert len(server.pods(run.object_name)) == 2
            next(changes)
            changes.close()  # type: ignore[attr-defined]  # it is a generator
            run.status()
            watching |= asked(server)
            list(run.logs())
            logging |= asked(server)
            server.finish(run.object_name, succeeded=False)
            run.status()
            watching |= asked(server)
    for role, rights in {"submit": submitting, "watch": watching, "logs": logging}.items():
        also = granted("watch") if role == "logs" else set()
        assert rights <= granted(role) | also
        assert used(granted(role)) <= used(rights)


def test_the_role_for_transfers_grants_what_they_ask_for_and_no_more(tmp_path: Path) -> None:
    site = toolkit.load_profile(str(ROOT / "k8s/profiles/k8s.yaml"))
    job = toolkit.load(ROOT / "jobs/digits.yaml")
    *_, workload = yaml.safe_load_all(toolkit.render(toolkit.plan(job, site, run_name="t")))
    assert isinstance(site, toolkit.KubernetesProfile)
    with FakeKubernetes(namespaces=("training",), auto_run=True, restricted=True) as server:
        cluster = Cluster(Connection(site, api_client=server.api_client()))
        with volume.placed(cluster, KINDS["PyTorchJob"], workload, {"call.pkl": b"x" * 2**20}):
            pass
        rights = asked(server)
    assert rights == granted("transfer")


def test_the_profiles_of_the_how_to_page_are_valid() -> None:
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    blocks = re.findall(r"^```yaml\n(kind: kubernetes\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        toolkit.KubernetesProfile.model_validate(yaml.safe_load(block))


def test_the_how_to_page_names_every_role_and_folder() -> None:
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    names = [name.partition("/")[2] for name in things("base") if name.startswith("Role/")]
    assert names and all(f"`{name}`" in page for name in names)
    assert all(Path(folder).name in page for folder in FOLDERS)
