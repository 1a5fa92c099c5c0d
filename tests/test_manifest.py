"""What is rendered for Kubernetes: a server takes it whole, and hostile text arrives as it is."""

import json
import os
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from kubeflow_trainer_api import models
from kubernetes import client

import toolkit
from tests.cluster.containers import expand
from tests.conftest import ROOT
from tests.kubernetes_schemas import VERSIONS, faults_of
from tests.rendered import JOB, KINDS, container_of, manifest, read, template_of, workload

SCHEMAS = ROOT / "tests/cluster/schemas"

BIG: dict[str, Any] = {
    "nnodes": 16,
    "nproc_per_node": 8,
    "gpus_per_node": 8,
    "cpus_per_node": 64,
    "memory": "400GiB",
    "shm": "64GiB",
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smallest": ({}, {}),
    "gpus": (
        {
            "resources": BIG,
            "time_limit": "4h",
            "stop": {"grace": "5m"},
            "retries": {"in_job": 3, "requeue": 2},
        },
        {"network_interface": "eth0", "runs_claim": "runs", "node_selector": {"pool": "no"}},
    ),
    "secrets": (
        {"secrets": {"HF_TOKEN": {"secret": "hf", "key": "token"}, "WANDB": None}},
        {"secret": "team"},
    ),
    "volumes": (
        {
            "mounts": [
                {"source": "claim:data", "target": "/data", "read_only": True},
                {"source": "/mnt/it's #1", "target": "/scratch"},
            ]
        },
        {"pod_security": "privileged", "image_pull_policy": "Always", "run_as_user": 5000},
    ),
    "words of YAML": (
        {"args": ["no", "1e3", "", "~"], "env": {"no": "y", "NULL": "null", "y": "0o7"}},
        {"env": {"on": "off"}, "namespace": "1e3"},
    ),
}

SHARP = [
    "$",
    "$(HOME)",
    "$(",
    "$$",
    "$$(A)",
    ")",
    "`",
    "'",
    '"',
    "\\",
    "\n",
    "\r\n",
    "$é",
    "\t",
    "é",
]
SHARP += ["{{", "}}", "{%", "#", " #", "%", "-", "--", ": ", "&", "*", "|", ">", "!", "@", ",", "]"]
SHARP += ["\x01", "\x1b", "\x7f", "\x85", "\x9f", "\xa0", "\u2028", "\u2029", "\ufeff", "\ufffe"]
SHARP += ["\U0001f600", "no", "null", "1e3", "0x1", " ", "\ud7ff", "\ue000", "\U0010ffff"]
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXTS = st.lists(st.sampled_from(SHARP) | CHARACTERS, max_size=8).map("".join)
ARGS = st.lists(TEXTS, max_size=5).filter(lambda words: words[:1] != ["--"])  # torchrun's
IMAGES = st.sampled_from(["no", "null", "1e3", "012", "a/b:1", f"h:5000/a_b@sha256:{'0' * 64}"])
WORDS = TEXTS.filter(lambda text: re.fullmatch(r"\S+", text) is not None)
NAMES = st.sampled_from(["no", "y", "N", "null", "NULL", "true", "on", "_", "A", "e1", "inf"])
PATHS = TEXTS.map(lambda text: f"/m{text}").filter(lambda path: ":" not in path)
LABELS = st.sampled_from(["no", "y", "a.b-c_d", "1e3", "0x1", "A", "null", "12"])
SERVERS = st.sampled_from(["h", "no", "10.0.0.1", "[fd00::1]", "files.example.com"])
BEYOND_TRAINJOB = ("image_pull_policy",)
PROFILE_KEYS = st.fixed_dictionaries(
    {},
    optional={
        "runs_claim": st.just("runs"),
        "runs_dir": st.sampled_from(["/runs", "/r u/n's", "/no", "/runs/"]),
        "network_interface": WORDS,
        "gpu_resource": st.just("amd.com/gpu"),
        "resources": st.just({"rdma/hca": 1}),
        "capabilities": st.just(["IPC_LOCK"]),
        "host_network": st.booleans(),
        "one_pod_per_node": st.booleans(),
        "network_policy": st.booleans(),
        "read_only_root": st.booleans(),
        "run_as_user": st.sampled_from([0, 1000, 2**31 - 1]),
        "gang_scheduler": st.sampled_from(["volcano", "scheduler-plugins"]),
        "queue": st.just("team"),
        "priority_class": st.just("no"),
        "service_account": st.just("null"),
        "image_pull_secrets": st.just(["on"]),
        "ttl": st.just("1h"),
        "topology": st.sampled_from([{"key": "zone"}, {"key": "a/zone", "required": True}]),
        "tolerations": st.sampled_from(
            [
                [{"operator": "Exists"}],
                [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}],
                [{"key": "x", "effect": "NoExecute", "tolerationSeconds": 60}],
            ]
        ),
        "mounts": st.sampled_from(
            [
                [{"source": f"{kind}:n", "target": "/v", "read_only": True}]
                for kind in ("claim", "configmap", "secret")
            ]
            + [[{"source": s, "target": "/v"}] for s in ("nfs:h:/p", "empty:", "empty:1GiB", "/p")]
        ),
    },
)


def strict(schema: Any) -> Any:
    """Return a CustomResourceDefinition's schema that takes no unknown field, as a server does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        found["additionalProperties"] = False
    return found


def schema_of(plural: str) -> Draft202012Validator:
    schema = strict(json.loads((SCHEMAS / f"{plural}.json").read_text()))
    return Draft202012Validator(schema)


CUSTOM = {kind: schema_of(f"{kind.lower()}s") for kind in ("PyTorchJob", "TrainJob", "JobSet")}
MODELS: dict[str, Any] = {
    "Job": client.V1Job,
    "NetworkPolicy": client.V1NetworkPolicy,
    "Service": client.V1Service,
}
ROUND_TRIPS = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "JobSet": models.JobsetV1alpha2JobSet,
}


def faults(text: str, *, versions: tuple[str, ...] = ("1.34",)) -> list[str]:
    """Return what a server under strict validation would say against a manifest."""
    found: list[str] = []
    for document in read(text):
        kind = document["kind"]
        if kind in CUSTOM:
            found += (f"{e.json_path}: {e.message}" for e in CUSTOM[kind].iter_errors(document))
            metadata = {**document["metadata"], "name": "pod"}
            template = template_of(document) if kind != "TrainJob" else None
            if template:
                client.V1PodTemplateSpec.model_validate(template)
                spec = {"restartPolicy": "Never", **template["spec"]}
                job = {"template": {**template, "spec": spec}}
                core = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job}
                found += [fault for version in versions for fault in faults_of(core, version)]
        elif kind in MODELS:
            MODELS[kind].model_validate(document)  # refuses what it does not know
            found += [fault for version in versions for fault in faults_of(document, version)]
        if kind in ROUND_TRIPS:
            again = ROUND_TRIPS[kind].from_dict(document).to_dict()
            found += [] if again == document else [f"{kind}: fields got lost"]
        assert not any(key == "suspend" for key in document.get("spec", {}))
    return [*found, *_twice(workload(text))]


def _twice(document: Any) -> list[str]:
    spec = template_of(document)["spec"]
    (container,) = spec["containers"]
    found = []
    for what, entries, key in (
        ("env", container["env"], "name"),
        ("volumeMounts", container["volumeMounts"], "mountPath"),
        ("volumes", spec["volumes"], "name"),
    ):
        keys = [entry[key] for entry in entries]
        found += [f"{what}: duplicate {name!r}" for name in set(keys) if keys.count(name) > 1]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    return found + ([] if mounted == {v["name"] for v in spec["volumes"]} else ["volumes"])


def arrives(container: Any) -> tuple[dict[str, bytes], list[bytes]]:
    """Return the environment and the arguments as the kubelet expands them."""
    env: dict[str, bytes] = {}
    values: dict[str, str] = {}
    for entry in container["env"]:
        if "value" in entry:
            env[entry["name"]] = expand(entry["value"], values)
            values[entry["name"]] = os.fsdecode(env[entry["name"]])
    return env, [expand(word, values) for word in container["args"]]


def entry_of(arguments: list[bytes]) -> list[bytes]:
    """Return what torchrun starts, without its own options."""
    return arguments[arguments.index(b"-m") :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_server_takes_every_field(case: str, kind: str) -> None:
    job, profile = CASES[case]
    if kind == "TrainJob":  # it has no fields for these, which planning says
        profile = {key: of for key, of in profile.items() if key not in BEYOND_TRAINJOB}
    assert faults(manifest(job, profile, kind), versions=VERSIONS) == []


@pytest.mark.parametrize("kind", ["JobSet", "Job"])
def test_on_the_nodes_network_runs_are_kept_apart_by_their_port(kind: str) -> None:
    """The operator declares a port of a PyTorchJob by itself; a TrainJob cannot have this."""
    profile = {"host_network": True, "pod_security": "privileged"}
    ports = [{"containerPort": 29500, "hostPort": 29500, "protocol": "TCP"}]
    assert container_of(workload(manifest({}, profile, kind)))["ports"] == ports
    assert "ports" not in container_of(workload(manifest({}, {}, kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_everything_of_a_run_carries_its_label(kind: str) -> None:
    documents = read(manifest({}, {"gang_scheduler": None}, kind))
    label = {"torch-deploy-toolkit/run": "t"}
    for metadata in (*(d["metadata"] for d in documents), template_of(documents[-1])["metadata"]):
        assert label.items() <= metadata["labels"].items()
    assert documents[-1]["kind"] == kind
    policy = documents[0]["spec"]
    assert policy["podSelector"] == {"matchLabels": label}
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": label}}]}]


@pytest.mark.parametrize("kind", KINDS)
def test_the_pod_passes_pod_security_restricted(kind: str) -> None:
    job = {"mounts": [{"source": "claim:data", "target": "/data"}], **CASES["gpus"][0]}
    spec = template_of(workload(manifest(job, CASES["gpus"][1], kind)))["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {key for volume in spec["volumes"] for key in volume} - {"name"} == {
        "emptyDir",
        "persistentVolumeClaim",
    }
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_and_limits_are_the_same_whole_quantities(kind: str) -> None:
    resources = container_of(workload(manifest(*CASES["gpus"], kind)))["resources"]
    wanted = {"cpu": "64", "memory": "400Gi", "nvidia.com/gpu": "8"}
    assert resources == {"requests": wanted, "limits": wanted}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kubelet_waits_longer_than_torchrun_and_torchrun_as_long_as_a_checkpoint(
    kind: str,
) -> None:
    spec = template_of(workload(manifest(*CASES["gpus"], kind)))["spec"]
    env, _ = arrives(spec["containers"][0])
    if kind == "TrainJob":  # whose operator takes such variables for its own
        assert "\nexport PET_SHUTDOWN_TIMEOUT=300\n" in spec["containers"][0]["command"][2]
        assert not any(name.startswith("PET_") for name in env)
    else:
        assert env["PET_SHUTDOWN_TIMEOUT"] == b"300"
    assert spec["terminationGracePeriodSeconds"] == 315


@pytest.mark.parametrize("kind", KINDS)
def test_a_secret_is_named_and_its_value_is_nowhere(kind: str) -> None:
    entries = container_of(workload(manifest(*CASES["secrets"], kind)))["env"]
    places = {
        e["name"]: e["valueFrom"]["secretKeyRef"] for e in entries if "secretKeyRef" in str(e)
    }
    assert places == {
        "HF_TOKEN": {"name": "hf", "key": "token"},
        "WANDB": {"name": "team", "key": "WANDB"},
    }


def test_a_secret_wins_over_a_variable_of_the_profile_of_the_same_name() -> None:
    text = manifest({"secrets": {"LOGIN": {"secret": "s", "key": "k"}}}, {"env": {"LOGIN": "x"}})
    assert faults(text) == []


def test_a_range_of_nodes_is_the_operators_elasticity() -> None:
    job = {"resources": {"nnodes": {"min": 2, "max": 4}}, "retries": {"in_job": 3}}
    spec = workload(manifest(job, {}))["spec"]
    policy = spec["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"], policy["maxRestarts"]) == (2, 4, 3)
    assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == 4


def test_a_master_is_one_of_the_pods() -> None:
    site = {"master": True, "pod_security": "baseline"}
    for nodes, roles in ((1, {"Master": 1}), (3, {"Master": 1, "Worker": 2})):
        text = manifest({"resources": {"nnodes": nodes}}, site)
        spec = workload(text)["spec"]
        found = {role: of["replicas"] for role, of in spec["pytorchReplicaSpecs"].items()}
        assert (found, "elasticPolicy" in spec) == (roles, False)
        errors = CUSTOM["PyTorchJob"].iter_errors(workload(text))
        assert not list(errors)


@pytest.mark.parametrize("requeue", [0, 1, 4])
@pytest.mark.parametrize("claim", [None, "runs"])
def test_what_counts_failures_is_the_run_directory_where_there_is_one(
    claim: str | None, requeue: int
) -> None:
    """The operator adds up the restarts of all pods; one incident restarts each of them."""
    job = {"resources": {"nnodes": 3}, "retries": {"requeue": requeue}}
    spec = workload(manifest(job, {"runs_claim": claim} if claim else {}))["spec"]
    limit = spec["runPolicy"].get("backoffLimit")
    policy = spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"]
    if not requeue:
        assert (limit, policy) == (None, "Never")
    elif claim:
        assert (limit, policy) == (None, "ExitCode")
    else:
        assert (limit, policy) == (requeue * 3 + 1, "OnFailure")


@pytest.mark.parametrize(("kind", "key"), [("JobSet", "maxRestarts"), ("Job", None)])
def test_the_cluster_leaves_room_for_restarts_that_are_no_failures(
    kind: str, key: str | None
) -> None:
    def limit(job: dict[str, Any], profile: dict[str, Any]) -> int:
        spec = workload(manifest(job, profile, kind))["spec"]
        found: int = spec["failurePolicy"][key] if key else spec["backoffLimitPerIndex"]
        return found

    assert limit({}, {}) == limit({}, {"runs_claim": "runs"}) == 0
    assert limit({"retries": {"requeue": 2}}, {}) == 2
    assert limit({"retries": {"requeue": 2}}, {"runs_claim": "runs"}) == 102


def test_the_first_pod_has_the_name_that_the_others_are_told() -> None:
    for kind, first in (("Job", "t-0.t"), ("JobSet", "t-node-0-0.t"), ("TrainJob", "t-node-0-0.t")):
        _, arguments = arrives(container_of(workload(manifest({}, {}, kind))))
        assert f"--rdzv-endpoint={first}:29500".encode() in arguments
    *_, service, job = read(manifest({}, {}, "Job"))
    assert service["metadata"]["name"] == template_of(job)["spec"]["subdomain"] == "t"
    assert service["spec"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize(
    ("text", "values", "arrives"),
    [
        ("$(A) $(B)", {"A": "1"}, b"1 $(B)"),
        ("$$(A) $$$(A) $$$$", {"A": "1"}, b"$(A) $1 $$"),
        ("$x $( $", {}, b"$x $( $"),
        ("$\xe9", {}, b"$\xc3\x83\xa9"),
    ],
)
def test_the_expansion_of_these_tests_is_that_of_kubernetes(
    text: str, values: dict[str, str], arrives: bytes
) -> None:
    assert expand(text, values) == arrives


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    args=ARGS,
    env=st.dictionaries(NAMES, TEXTS, max_size=4),
    site_env=st.dictionaries(NAMES, TEXTS, max_size=2),
    selector=st.dictionaries(LABELS, LABELS, max_size=2),
    image=IMAGES,
    paths=st.lists(PATHS, max_size=3, unique=True),
    server=SERVERS,
)
def test_hostile_text_arrives_byte_for_byte(
    kind: str,
    args: list[str],
    env: dict[str, str],
    site_env: dict[str, str],
    selector: dict[str, str],
    image: str,
    paths: list[str],
    server: str,
) -> None:
    mounts = [{"source": path, "target": path} for path in paths]
    mounts.append({"source": f"nfs:{server}:/x", "target": "/from/nfs"})
    job = {"args": args, "env": env, "image": image, "mounts": mounts}
    profile = {"env": site_env, "node_selector": selector, "pod_security": "privileged"}
    text = manifest(job, profile, kind)
    assert faults(text) == []
    spec = template_of(workload(text))["spec"]
    (container,) = spec["containers"]
    environ, arguments = arrives(container)
    expected = site_env | env
    assert {name: environ[name] for name in expected} == {
        name: value.encode() for name, value in expected.items()
    }
    assert entry_of(arguments) == [word.encode() for word in ("-m", "train", *args)]
    assert container["image"] == image
    assert spec.get("nodeSelector", {}) == selector
    assert [m["mountPath"] for m in container["volumeMounts"][3:-1]] == paths
    assert [v["hostPath"]["path"] for v in spec["volumes"][3:-1]] == paths
    assert spec["volumes"][-1]["nfs"]["server"] == server


@settings(max_examples=50, deadline=None)
@given(args=ARGS.filter(bool), env=st.dictionaries(NAMES, TEXTS, min_size=1))
def test_every_text_is_one_line_and_json_where_it_is_no_plain_word(
    args: list[str], env: dict[str, str]
) -> None:
    """So that YAML 1.2 reads the same."""
    text = manifest({"args": args, "env": env}, {})
    container = container_of(workload(text))
    words = re.findall(r"^ {16}- (.*)$", text.partition("args:")[2], re.MULTILINE)
    found = words[: len(container["args"])]
    assert [unquoted(word) for word in found] == container["args"]
    pairs = re.findall(r"^ {16}- \{name: (\S+), value: (.*)\}$", text, re.MULTILINE)
    assert [(unquoted(name), unquoted(value)) for name, value in pairs] == [
        (variable["name"], variable["value"]) for variable in container["env"]
    ]


def unquoted(text: str) -> object:
    if text.startswith('"'):
        return json.loads(text)
    assert re.fullmatch(r"-{0,2}[A-Za-z/][-A-Za-z0-9_./=]*", text)
    assert text.lower() not in ["y", "n", "yes", "no", "on", "off", "true", "false", "null"]
    return text


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    nnodes=st.integers(1, 64),
    nproc=st.integers(1, 16),
    gpus=st.sampled_from([0, 16]),
    memory=st.integers(1, 2**50) | st.none(),
    limit=st.integers(100, 10**7) | st.none(),
    requeue=st.integers(0, 9),
    profile=PROFILE_KEYS,
)
def test_no_valid_job_makes_an_invalid_manifest(
    kind: str,
    nnodes: int,
    nproc: int,
    gpus: int,
    memory: int | None,
    limit: int | None,
    requeue: int,
    profile: dict[str, Any],
) -> None:
    resources = {
        "nnodes": nnodes,
        "nproc_per_node": nproc,
        "gpus_per_node": gpus,
        **({"memory": f"{memory}B"} if memory else {}),
    }
    job = {
        "resources": resources,
        "retries": {"requeue": requeue},
        **({"time_limit": f"{limit}s"} if limit else {}),
    }
    try:
        text = manifest(job, {"pod_security": "privileged", **profile}, kind)
    except toolkit.PlanError as error:
        assert kind == "TrainJob"
        assert {problem.rule for problem in error.problems} == {"trainjob-cannot-say"}
        return
    assert text == manifest(job, {"pod_security": "privileged", **profile}, kind)
    assert faults(text) == []


@pytest.mark.parametrize("taken", ["/tmp", "/dev/shm", "/runs"])
def test_a_mount_where_the_pod_has_its_own_volume_is_refused(taken: str) -> None:
    for own, site in (({"mounts": [at(taken)]}, {}), ({}, {"mounts": [at(taken)]})):
        with pytest.raises(toolkit.PlanError, match=taken):
            manifest(own, site)


def at(target: str) -> dict[str, str]:
    return {"source": "claim:data", "target": target}


# ---- Sweeps


SWEEP: dict[str, Any] = {
    "args": ["--x"],
    "sweep": {"grid": {"--lr": ["0.1", "no"], "env.S": [1, 2]}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_points_of_a_sweep_are_runs_with_what_belongs_to_them(kind: str) -> None:
    job = toolkit.JobSpec.model_validate(JOB | SWEEP)
    text = manifest(SWEEP, {"runs_claim": "runs"}, kind)
    assert faults(text) == []
    documents = read(text)
    points = [document for document in documents if document["kind"] == kind]
    assert [point["metadata"]["name"] for point in points] == ["t-0", "t-1", "t-2", "t-3"]
    assert len(documents) == len(points) * (3 if kind == "Job" else 2)
    assert documents[-1] is points[-1]
    for point, of in zip(points, job.points, strict=True):
        name = f"t-{of.index}"
        labels = {"torch-deploy-toolkit/run": name, "torch-deploy-toolkit/sweep": "t"}
        template = template_of(point)
        for metadata in (point["metadata"], template["metadata"]):
            assert labels.items() <= metadata["labels"].items()
        environ, arguments = arrives(template["spec"]["containers"][0])
        assert entry_of(arguments)[2:] == [word.encode() for word in of.args]
        assert environ["S"].decode() == of.env["S"]
        assert environ["TRAIN_RUN_DIR"].decode() == f"/runs/t-{job.digest}/{of.name}"
    for document in documents:
        name = document["metadata"]["labels"]["torch-deploy-toolkit/run"]
        assert document["metadata"]["name"] == name


def test_how_many_points_run_at_a_time_is_for_a_queue_to_say() -> None:
    job = SWEEP | {"sweep": SWEEP["sweep"] | {"max_running": 2}}
    with pytest.raises(toolkit.PlanError, match="a queue of Kueue, by its quota"):
        manifest(job, {})
    assert faults(manifest(job, {"queue": "team"})) == []
