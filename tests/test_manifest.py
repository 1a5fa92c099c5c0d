"""The PyTorchJob that is rendered: a server takes it whole, and hostile text arrives as it is."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from kubernetes import client

import toolkit
from tests.fake_kubelet import container_argv, container_env, expand
from toolkit.planning import plan
from toolkit.profile import KubernetesProfile
from toolkit.rendering import render
from toolkit.spec import JobSpec

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "pytorchjob.schema.json").read_text())

JOB: dict[str, Any] = {"name": "t", "module": "train", "image": "registry.io/train:1"}
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
WORDS = TEXTS.filter(lambda text: re.fullmatch(r"\S+", text) is not None)
NAMES = st.sampled_from(["no", "y", "N", "null", "NULL", "true", "on", "_", "A", "e1", "inf"])
PATHS = TEXTS.map(lambda text: f"/m{text}").filter(lambda path: ":" not in path)


def manifest(job: dict[str, Any], profile: dict[str, Any]) -> str:
    site = KubernetesProfile(name="k8s", **profile)
    return render(plan(JobSpec.model_validate(JOB | job), site))


def template_of(document: Any) -> Any:
    return document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]


def read(text: str) -> Any:
    """Return the document; both of PyYAML's readers must take it for the same."""
    document = yaml.load(text, Loader=yaml.SafeLoader)
    assert document == yaml.load(text, Loader=yaml.CSafeLoader)
    return document


def faults(document: Any) -> list[str]:
    """Return what a server under strict validation would say against a PyTorchJob."""
    found = [
        f"{e.json_path}: {e.message}" for e in Draft202012Validator(SCHEMA).iter_errors(document)
    ]
    template = template_of(document)
    if hasattr(client.V1PodTemplateSpec, "model_validate"):  # from client 37 on
        client.V1PodTemplateSpec.model_validate(template)  # refuses what it does not know
    container = template["spec"]["containers"][0]
    for what, entries, key in (
        ("env", container["env"], "name"),
        ("volumeMounts", container["volumeMounts"], "mountPath"),
        ("volumes", template["spec"]["volumes"], "name"),
    ):
        keys = [entry[key] for entry in entries]
        found += [
            f"{what}: duplicate {name!r}" for name in sorted(set(keys)) if keys.count(name) > 1
        ]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    found += [] if mounted == {v["name"] for v in template["spec"]["volumes"]} else ["volumes"]
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_server_takes_every_field(case: str) -> None:
    document = read(manifest(*CASES[case]))
    assert faults(document) == []


def test_the_pod_passes_pod_security_restricted() -> None:
    spec = template_of(read(manifest(*CASES["gpus"])))["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
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


def test_requests_and_limits_are_the_same_whole_quantities() -> None:
    resources = template_of(read(manifest(*CASES["gpus"])))["spec"]["containers"][0]["resources"]
    wanted = {"cpu": "64", "memory": "400Gi", "nvidia.com/gpu": "8"}
    assert resources == {"requests": wanted, "limits": wanted}


def test_the_kubelet_waits_longer_than_torchrun_and_torchrun_as_long_as_a_checkpoint() -> None:
    spec = template_of(read(manifest(*CASES["gpus"])))["spec"]
    env = container_env(spec["containers"][0], {})
    assert (env["PET_SHUTDOWN_TIMEOUT"], spec["terminationGracePeriodSeconds"]) == ("300", 315)


def test_a_secret_is_named_and_its_value_is_nowhere() -> None:
    (container,) = template_of(read(manifest(*CASES["secrets"])))["spec"]["containers"]
    secrets = {"hf": {"token": "s3cr3t"}, "team": {"WANDB": "k3y"}}
    env = container_env(container, secrets)
    assert (env["HF_TOKEN"], env["WANDB"]) == ("s3cr3t", "k3y")


def test_a_range_of_nodes_is_the_operators_elasticity() -> None:
    job = {"resources": {"nnodes": {"min": 2, "max": 4}}, "retries": {"in_job": 3}}
    spec = read(manifest(job, {}))["spec"]
    policy = spec["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"], policy["maxRestarts"]) == (2, 4, 3)
    assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == 4


@pytest.mark.parametrize("requeue", [0, 1, 4])
def test_the_backoff_limit_allows_one_restart_of_every_pod_per_incident(requeue: int) -> None:
    job = {"resources": {"nnodes": 3}, "retries": {"requeue": requeue}}
    spec = read(manifest(job, {}))["spec"]
    limit = spec["runPolicy"].get("backoffLimit")
    assert limit == (requeue * 3 + 1 if requeue else None)
    assert spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == (
        "OnFailure" if requeue else "Never"
    )


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


@settings(max_examples=100, deadline=None)
@given(
    args=st.lists(TEXTS, max_size=5),
    env=st.dictionaries(NAMES, TEXTS, max_size=4),
    site_env=st.dictionaries(NAMES, TEXTS, max_size=2),
    selector=st.dictionaries(TEXTS, TEXTS, max_size=2),
    image=WORDS,
    paths=st.lists(PATHS, max_size=3, unique=True),
)
def test_hostile_text_arrives_byte_for_byte(
    args: list[str],
    env: dict[str, str],
    site_env: dict[str, str],
    selector: dict[str, str],
    image: str,
    paths: list[str],
) -> None:
    mounts = [{"source": path, "target": path} for path in paths]
    job = {"args": args, "env": env, "image": image, "mounts": mounts}
    profile = {"env": site_env, "node_selector": selector, "pod_security": "privileged"}
    text = manifest(job, profile)
    document = read(text)
    assert faults(document) == []
    spec = template_of(document)["spec"]
    (container,) = spec["containers"]
    arrived = container_env(container, {})
    expected = site_env | env
    assert {name: os.fsencode(arrived[name]) for name in expected} == {
        name: value.encode() for name, value in expected.items()
    }
    assert container_argv(container, arrived) == [
        word.encode() for word in ("torchrun", "--nproc-per-node=1", "-m", "train", *args)
    ]
    assert container["image"] == image
    assert spec.get("nodeSelector", {}) == selector
    assert [m["mountPath"] for m in container["volumeMounts"][3:]] == paths
    assert [v["hostPath"]["path"] for v in spec["volumes"][3:]] == paths


@settings(max_examples=100, deadline=None)
@given(args=st.lists(TEXTS, min_size=1, max_size=5), env=st.dictionaries(NAMES, TEXTS, min_size=1))
def test_every_text_is_json_on_one_line_so_that_yaml_1_2_reads_the_same(
    args: list[str], env: dict[str, str]
) -> None:
    text = manifest({"args": args, "env": env}, {})
    (container,) = template_of(read(text))["spec"]["containers"]
    words = re.findall(r"^ {16}- (\".*)$", text, re.MULTILINE)
    assert [json.loads(word) for word in words] == container["args"]
    pairs = re.findall(r"^ {16}- \{name: (\".*?\"), value: (\".*\")\}$", text, re.MULTILINE)
    assert [(json.loads(name), json.loads(value)) for name, value in pairs] == [
        (variable["name"], variable["value"]) for variable in container["env"]
    ]


@settings(max_examples=100, deadline=None)
@given(
    nnodes=st.integers(1, 64),
    nproc=st.integers(1, 16),
    gpus=st.sampled_from([0, 16]),
    memory=st.integers(1, 2**50) | st.none(),
    limit=st.integers(100, 10**7) | st.none(),
    requeue=st.integers(0, 9),
    profile=st.fixed_dictionaries(
        {},
        optional={
            "runs_claim": st.just("runs"),
            "runs_dir": st.sampled_from(["/runs", "/r u/n's", "/no"]),
            "network_interface": WORDS,
            "gpu_resource": st.just("amd.com/gpu"),
        },
    ),
)
def test_no_valid_job_makes_an_invalid_manifest(
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
    text = manifest(job, profile)
    assert text == manifest(job, profile)
    assert faults(read(text)) == []


@pytest.mark.parametrize("taken", ["/tmp", "/dev/shm", "/runs"])
def test_a_mount_where_the_pod_has_its_own_volume_is_refused(taken: str) -> None:
    with pytest.raises(toolkit.PlanError) as error:
        manifest({"mounts": [{"source": "claim:data", "target": taken}]}, {})
    assert taken in str(error.value)


def test_a_secret_wins_over_a_variable_of_the_profile_of_the_same_name() -> None:
    document = read(
        manifest({"secrets": {"LOGIN": {"secret": "s", "key": "k"}}}, {"env": {"LOGIN": "x"}})
    )
    assert faults(document) == []
