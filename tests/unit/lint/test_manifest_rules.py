"""Rules for Kubernetes manifests: every planted fault once, with its line, and no false alarm.

A fault is planted in a line that ends with `#! RULE`; tests/data/manifests holds manifests as
people write them.
"""

import collections
import contextlib
import copy
import functools
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes import client

import toolkit
from tests.conftest import ROOT
from tests.support import packaged_schemas
from toolkit.checks import Finding, check, unchecked_kinds
from toolkit.cli import cli
from toolkit.errors import InputError
from toolkit.lint.check import CLUSTER_RULES, MANIFEST_RULES, check_manifests
from toolkit.lint.manifests.rules.schema import Schemas, read_schemas
from toolkit.text.manifests import is_manifest, read_manifests

FOLDER = ROOT / "tests/data/manifests"
SCHEMAS = FOLDER / "schemas"
FILES = [*sorted(FOLDER.glob("*.yaml")), SCHEMAS / "bakes.yaml"]
OURS = [*sorted((ROOT / "k8s").rglob("*.yaml"))]


def planted(text: str) -> list[tuple[int, str]]:
    return sorted(
        (number, rule.strip())
        for number, row in enumerate(text.splitlines(), start=1)
        for rule in row.partition("#!")[2].split(",")
        if rule.strip()
    )


def found(text: str, **more: Any) -> list[tuple[int, str]]:
    problems = check_manifests(text, "m.yaml", **more)
    return [(int((p.place or "").rpartition(":")[2] or 0), str(p.rule)) for p in problems]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_planted_faults_are_found_once_and_nothing_else(path: Path) -> None:
    text = path.read_text()
    schemas = read_crds() if path.parent == SCHEMAS else None
    assert sorted(found(text, schemas=schemas)) == planted(text)


def test_every_rule_is_planted() -> None:
    rules = {rule for path in FILES for _, rule in planted(path.read_text())}
    assert rules | {"config-map-size"} == {rule.id for rule in MANIFEST_RULES}


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_our_own_manifests_are_fine(path: Path) -> None:
    text = path.read_text()
    if is_manifest(text):
        assert check_manifests(text, path.name) == []


@pytest.mark.parametrize(
    ("size", "word"), [(262_144, ""), (262_145, "kubectl apply"), (1_048_577, "holds 1048576")]
)
def test_a_config_map_may_be_so_large(size: int, word: str) -> None:
    text = json.dumps(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "payload"},
            "data": {"a": "x" * (size - 1)},
        }
    )
    problems = check_manifests(text, "m.json")
    assert [problem.rule for problem in problems] == (["config-map-size"] if word else [])
    assert all(word in problem.message for problem in problems)


# ---- Reading


def test_words_are_read_as_kubectl_reads_them() -> None:
    text = "apiVersion: v1\nkind: Pod\nmode: 0440\non_: off\ntext: 4:00:00\nnumber: 1e-3\n"
    (manifest,) = read_manifests(text, "m.yaml").manifests
    assert [manifest.data[key] for key in ("mode", "on_", "text", "number")] == [
        0o440,
        False,
        "4:00:00",
        0.001,
    ]


def test_lines_are_right_in_every_document_of_a_stream() -> None:
    text = "# a\n%YAML 1.2\n---\napiVersion: v1\nkind: A\n---\n\n# b\n---  # c\napiVersion: v1\n"
    text += "kind: List\nitems:\n- apiVersion: v1\n  kind: B\n- apiVersion: v1\n  kind: C\n...\n"
    stream = read_manifests(text, "m")
    assert [(m.kind, m.index, m.place(("kind",))) for m in stream.manifests] == [
        ("A", 0, "m:5"),
        ("B", 1, "m:14"),
        ("C", 2, "m:16"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("apiVersion: v1\nkind: [\n", "m.yaml:3: not YAML: "),
        ("apiVersion: v1\n", "m.yaml:1: an object without kind; every manifest needs both"),
        ("apiVersion: v1\nkind: A\n---\n- b\n", "m.yaml:4: not an object; write apiVersion, "),
        ("apiVersion: v1\nkind: A\nkind: B\n", "m.yaml:3: duplicate key 'kind'; "),
        ("---\n# nothing\n", "m.yaml: the file holds no object"),
    ],
)
def test_what_is_no_manifest_is_said_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_manifests(text, "m.yaml")
    assert str(caught.value).startswith(message)


def test_a_folder_without_schemas_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        read_schemas(tmp_path / "none")
    with pytest.raises(InputError, match="holds no CustomResourceDefinition"):
        read_schemas(tmp_path)
    (tmp_path / "crd.yaml").write_text("a: [")
    with pytest.raises(InputError, match=r"crd\.yaml: not YAML"):
        read_schemas(tmp_path)


BASES = [
    one
    for path in sorted(FOLDER.glob("*.yaml"))
    for one in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader)
]
JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, True, 0, -1, 0.5, "", "x", "$(A)", [], {}, [None], ["a", 1], [[]], [{}]),
        *({"a": None}, {"name": 1}, {"": {}}),
    ]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    below: Any = ()
    if isinstance(value, dict):
        below = value.items()
    elif isinstance(value, list):
        below = enumerate(value)
    for key, entry in below:
        yield (*path, key)
        yield from places(entry, (*path, key))


PLACES = [(index, path) for index, base in enumerate(BASES) for path in places(base)]


@settings(deadline=None, max_examples=150)
@given(place=st.sampled_from(PLACES), junk=JUNK)
def test_nothing_that_may_stand_anywhere_brings_a_rule_down(
    place: tuple[int, tuple[Any, ...]], junk: Any
) -> None:
    index, (*path, last) = place
    document = copy.deepcopy(BASES[index])
    inner = functools.reduce(lambda value, key: value[key], path, document)
    inner[last] = junk
    with contextlib.suppress(InputError):
        check_manifests(json.dumps(document), "m.json", schemas=read_crds())


@functools.cache
def read_crds() -> Schemas:
    return read_schemas(SCHEMAS)


# ---- What job files become

IMAGE = "registry.example.com/train:1.2"
SHARP = ["$", "$(HOME)", "$$", "$(date)", "'", '"', "\n", "é", "#", ": ", "latest", "\u2028", "no"]
TEXTS = st.lists(st.sampled_from(SHARP), max_size=4).map("".join)
RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "nnodes": st.integers(1, 20) | st.just({"min": 2, "max": 4}),
        "nproc_per_node": st.integers(1, 9),
        "gpus_per_node": st.sampled_from([0, 8]),
        "memory": st.sampled_from(["16GiB", "500MB"]),
        "shm": st.sampled_from(["64MiB", "1GiB"]),
    },
)
MOUNTS = st.lists(
    st.sampled_from(["claim:data", "configmap:c", "secret:s", "empty:1GiB"]),
    max_size=2,
    unique=True,
).map(lambda sources: [{"source": s, "target": f"/m{i}"} for i, s in enumerate(sources)])
JOBS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["a", "digits-2"]),
        "module": st.just("train"),
        "image": st.just(IMAGE),
    },
    optional={
        "resources": RESOURCES,
        "args": st.lists(TEXTS, max_size=3),
        "env": st.dictionaries(st.sampled_from(["A", "B"]), TEXTS),
        "stop": st.fixed_dictionaries({"grace": st.sampled_from(["1s", "30s", "10m"])}),
        "time_limit": st.sampled_from(["1h", "2d"]),
        "retries": st.fixed_dictionaries(
            {"in_job": st.integers(0, 3), "requeue": st.integers(0, 3)}
        ),
        "mounts": MOUNTS,
        "sweep": st.just({"list": [{"env.LR": "1"}, {"env.LR": "2"}]}),
        "secrets": st.just({"HF_TOKEN": {"secret": "hub", "key": "token"}}),
    },
)
SITES = st.fixed_dictionaries(
    {"workload": st.sampled_from(["PyTorchJob", "TrainJob", "JobSet", "Job"])},
    optional={
        "runs_claim": st.just("runs"),
        "queue": st.just("team-a"),
        "gang_scheduler": st.sampled_from(["volcano", "scheduler-plugins"]),
        "one_pod_per_node": st.booleans(),
        "network_policy": st.booleans(),
        "network_interface": st.just("eth0"),
        "tolerations": st.just([{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]),
        "resources": st.just({"rdma/hca": 1}),
        "service_account": st.just("trainer"),
        "ttl": st.just("1h"),
    },
)
LOOSE = {
    "pod_security": "privileged",
    "host_network": True,
    "capabilities": ["IPC_LOCK"],
    "run_as_user": 0,
    "read_only_root": False,
}


@settings(deadline=None, max_examples=60)
@given(job=JOBS, site=SITES, loose=st.booleans())
def test_nothing_is_found_in_what_a_valid_job_becomes(
    job: dict[str, Any], site: dict[str, Any], loose: bool
) -> None:
    profile = toolkit.KubernetesProfile.model_validate(
        {"name": "k", **site, **(LOOSE if loose else {})}
        | {"master": loose and site["workload"] == "PyTorchJob"}
    )
    try:
        plan = toolkit.plan(toolkit.JobSpec.model_validate(job), profile)
    except toolkit.PlanError:
        return  # what cannot work there is refused before
    level = profile.pod_security
    assert check_manifests(toolkit.render(plan), "m.yaml", pod_security=level) == []


JOB = f"name: probe\nmodule: train\nimage: {IMAGE}\n"


def of_job(folder: Path, job: str, site: str, **more: Any) -> list[Finding]:
    path, profile = folder / "job.yaml", folder / "site.yaml"
    path.write_text(JOB + job)
    profile.write_text(f"kind: kubernetes\n{site}")
    return check(path, to=[str(profile)], **more)


def test_what_a_job_becomes_is_told_by_the_jobs_keys(tmp_path: Path) -> None:
    job = JOB.replace(":1.2", ":latest") + "env:\n  A: a\n"
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "site.yaml").write_text("kind: kubernetes\n")
    (one,) = check(tmp_path / "job.yaml", to=[str(tmp_path / "site.yaml")])
    assert (one.line, one.rule) == (3, "image-tag")
    assert one.message.endswith(
        "(in the PyTorchJob rendered for 'site': "
        "spec.pytorchReplicaSpecs.Worker.template.spec.containers[0].image)"
    )


def test_what_a_patch_breaks_is_told_by_the_patches_key(tmp_path: Path) -> None:
    patch = "{spec: {runPolicy: {cleanPodPolicy: Never}}}"
    job = f"kubernetes:\n  patches:\n    - merge: {patch}\n"
    (one,) = of_job(tmp_path, job, "")
    assert (one.file, one.line, one.rule) == (str(tmp_path / "job.yaml"), 5, "field-word")
    assert "patched for 'site': spec.runPolicy.cleanPodPolicy" in one.message
    (one,) = of_job(tmp_path, "", f"patches:\n  - merge: {patch}\n")
    assert one.rule == "field-word"


def test_what_a_job_becomes_is_held_to_schemas_too(tmp_path: Path) -> None:
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    names = ("nprocPerNode", "elasticPolicy", "pytorchReplicaSpecs")
    known = {name: {"type": "string"} if name == "nprocPerNode" else free for name in names}
    spec = {"type": "object", "properties": known}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    crd = {
        "kind": "CustomResourceDefinition",
        "spec": {
            "group": "kubeflow.org",
            "names": {"kind": "PyTorchJob"},
            "versions": [{"name": "v1", "schema": schema}],
        },
    }
    (tmp_path / "crd.json").write_text(json.dumps(crd))
    (one,) = of_job(tmp_path, "", "", schemas=tmp_path)
    assert (one.rule, one.message.partition(";")[0]) == (
        "crd-schema",
        "spec.runPolicy: the schema has no such field",
    )


# ---- The cluster


def test_a_cluster_says_what_it_would_refuse(tmp_path: Path) -> None:
    from tests.fakes.kubernetes import FakeKubernetes

    with FakeKubernetes() as server:
        path, api = tmp_path / "m.yaml", server.api_client()
        text = (FOLDER / "careful.yaml").read_text()
        path.write_text(text)

        def line_of(name: str) -> int:
            return text[: text.index(f"metadata: {{name: {name}}}")].count("\n") + 1

        (one,) = check(path, server=True, api_client=api)  # it has no runtime yet
        assert (one.line, one.rule) == (line_of("simple"), CLUSTER_RULES[0].id)
        assert "TrainJob 'simple'" in one.message and '"torch-distributed" not found' in one.message
        server.deny["JobSet"] = "not on Sundays"
        one, other = check(path, server=True, api_client=api)
        assert (one.line, other.line) == (line_of("gang"), line_of("simple"))
        assert "not on Sundays" in one.message
        site = "workload: JobSet\nruns_claim: runs\n"
        (one,) = of_job(tmp_path, "", site, server=True, api_client=api)
        assert (one.rule, "not on Sundays" in one.message) == ("server-refuses", True)
        assert not server.jobs()


def test_what_the_file_itself_makes_is_not_missed(tmp_path: Path) -> None:
    from tests.fakes.kubernetes import FakeKubernetes

    text = (FOLDER / "careful.yaml").read_text().rpartition("---\n")[2]
    runtime = (ROOT / "k8s/base/trainer/runtime.yaml").read_text()
    path = tmp_path / "m.yaml"
    ref = "{kind: TrainingRuntime, name: torch-deploy-toolkit}"
    path.write_text(f"{runtime}\n---\n{text.replace('{name: torch-distributed}', ref)}")
    with FakeKubernetes() as server:
        assert check(path, server=True, api_client=server.api_client()) == []


class Definitions(BaseHTTPRequestHandler):
    """A server with one definition, which accepts every object."""

    allowed = True

    def do_GET(self) -> None:
        place = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/bakes.example.com"
        there = self.path == place
        found = yaml.safe_load((SCHEMAS / "bakes.crd.yaml").read_text())["items"][0]
        status = 403 if not self.allowed else 200 if there else 404
        self.answer(status, found if status == 200 else {"kind": "Status", "message": "no"})

    def do_PATCH(self) -> None:
        size = int(self.headers["Content-Length"])
        self.answer(200, json.loads(self.rfile.read(size)))

    def answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def test_definitions_are_read_from_the_cluster_where_it_lets_us() -> None:
    path = SCHEMAS / "bakes.yaml"
    with ThreadingHTTPServer(("127.0.0.1", 0), Definitions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{server.server_port}"))
        asked = check(path, server=True, api_client=api)
        assert asked == check(path, schemas=SCHEMAS) != []
        Definitions.allowed = False
        assert check(path, server=True, api_client=api) == []
        server.shutdown()


# ---- The command


def test_the_command_tells_by_lines_objects_and_status(tmp_path: Path) -> None:
    def run(*argv: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["check", *argv])
        return done.exit_code, done.stdout or done.stderr

    path = tmp_path / "m.yaml"
    path.write_text((SCHEMAS / "bakes.yaml").read_text())
    assert run(str(path)) == (0, f"{path}: fine\n")
    status, output = run(str(path), "--schemas", str(SCHEMAS), "--json")
    rules = collections.Counter(one["rule"] for one in json.loads(output))
    assert (status, rules) == (1, {"crd-schema": len(planted(path.read_text()))})
    assert run(str(path), "--set", "a=b")[0] == 2
    path.write_text("apiVersion: v1\nkind: Service\nmetadata: {name: 1st}\nspec: {}\n")
    status, output = run(str(path))
    assert (status, output.partition(" ")[0]) == (1, f"{path}:3:")
    path.write_text("apiVersion: v1\nkind:\n")
    assert run(str(path)) == (2, f"{path}:1: an object without kind; every manifest needs both\n")
    (tmp_path / "slurm.yaml").write_text("kind: slurm\n")
    assert run(str(path), "--to", str(tmp_path / "slurm.yaml"))[0] == 2


def test_the_kinds_that_are_not_checked_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    odd = "apiVersion: example.com/v1\nkind: Oddity\nmetadata: {name: a}\nspec: {nonsense: 1}\n"
    path.write_text(odd)
    done = CliRunner().invoke(cli, ["check", str(path)])
    assert (done.exit_code, done.stdout) == (0, f"{path}: fine\n")
    assert "the fields of Oddity (example.com) are not checked; add --schemas" in done.stderr
    done = CliRunner().invoke(cli, ["check", str(path), str(path), "--json"])
    assert (json.loads(done.stdout), "Oddity" in done.stderr) == ([], True)
    assert "Bake (example.com)" in unchecked_kinds(SCHEMAS / "bakes.yaml")
    there = unchecked_kinds(SCHEMAS / "bakes.yaml", schemas=SCHEMAS)
    assert there == ["Bake (unknown.example.com)"]


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {{ .Release.Name }}\n",
        "{{- if .Values.on }}\napiVersion: v1\nkind: Pod\n{{- end }}\n",
        "apiVersion: v1\nkind: Pod\nmetadata:\n  {%- if a %}\n  name: a\n  {%- endif %}\n",
    ],
)
def test_a_template_of_helm_is_one_finding(text: str) -> None:
    (problem,) = check_manifests(text, "m.yaml")
    assert (problem.rule, "helm template" in problem.message) == ("manifest-template", True)


@pytest.mark.parametrize(
    ("volume", "way_out"),
    [
        ("/dev/shm", "emptyDir of medium: Memory"),
        ("/dev/infiniband", "device plugin"),
        ("/data", "PersistentVolumeClaim"),
    ],
)
def test_a_folder_of_the_node_has_its_own_way_out(volume: str, way_out: str) -> None:
    pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n"
    pod += "  - {name: a, image: a/b:1, volumeMounts: [{name: v, mountPath: /v}]}\n"
    pod += f"  volumes: [{{name: v, hostPath: {{path: {volume}}}}}]\n"
    messages = {problem.rule: problem.message for problem in check_manifests(pod, "m")}
    assert way_out in messages["host-path"]
    assert "checked against Pod Security 'restricted'" in messages["pod-security"]


def test_a_message_names_the_version_and_the_length(tmp_path: Path) -> None:
    text = (
        "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\nmetadata: {name: a}\n"
        "spec: {runtimeRef: {name: a}, numProcPerNode: 2}\n"
    )
    (problem,) = check_manifests(text, "m")
    assert "spec.numProcPerNode: TrainJob of Trainer 2.3 has no such field" in problem.message
    pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n"
    pod += "  - {name: a, image: a/b:1, ports: [{name: etcd-client-port, containerPort: 1}]}\n"
    messages = {problem.rule: problem.message for problem in check_manifests(pod, "m")}
    assert "it has 16 characters, and the limit is 15; shorten it" in messages["port-invalid"]


def test_a_level_of_pod_security_comes_from_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text((FOLDER / "tutorial.yaml").read_text())
    profile = toolkit.KubernetesProfile(name="k", pod_security="privileged")
    rules = {one.rule for one in check(path, to=[profile])}
    assert not rules & {"pod-security", "host-path"}
    assert {"pod-security", "host-path"} <= {one.rule for one in check(path)}


# ---- The schemas of the package


def packaged() -> Any:
    return json.loads(packaged_schemas.PATH.read_text())


def test_the_packaged_schemas_are_those_of_their_sources() -> None:
    assert packaged_schemas.PATH.read_text() == packaged_schemas.text()


def test_every_definition_that_a_packaged_schema_refers_to_is_there() -> None:
    names = set(packaged()["$defs"])
    assert set(packaged()["kinds"].values()) <= names
    references = re.findall(r'"\$ref": "#/\$defs/(\w+)"', packaged_schemas.PATH.read_text())
    assert names == {*references, *packaged()["kinds"].values()}


MODELS = (
    "CSIVolumeSource",
    "ConfigMap",
    "ConfigMapVolumeSource",
    "Container",
    "ContainerPort",
    "EmptyDirVolumeSource",
    "EnvVar",
    "EnvVarSource",
    "JobSpec",
    "NetworkPolicySpec",
    "ObjectMeta",
    "PersistentVolumeClaim",
    "PersistentVolumeClaimSpec",
    "PodAffinityTerm",
    "PodFailurePolicyOnExitCodesRequirement",
    "PodFailurePolicyRule",
    "PodSecurityContext",
    "PodSpec",
    "Secret",
    "SecretVolumeSource",
    "SecurityContext",
    "ServicePort",
    "ServiceSpec",
    "Toleration",
    "TopologySpreadConstraint",
    "Volume",
    "VolumeMount",
)


@pytest.mark.parametrize("name", MODELS)
def test_no_field_of_kubernetes_is_unknown(name: str) -> None:
    model = getattr(client, f"V1{name}")
    assert set(model.attribute_map.values()) <= packaged()["$defs"][name]["properties"].keys()
