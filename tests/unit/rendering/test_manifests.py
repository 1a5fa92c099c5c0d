"""Rendered manifests: a server accepts them whole, and the pods are as the job demands."""

from typing import Any

import pytest

import toolkit
from tests.support.kubernetes_schemas import VERSIONS
from tests.support.rendered import JOB, KINDS, container_of, manifest, read, template_of, workload
from tests.support.strict_server import CUSTOM, arrives, entry_of, faults

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
BEYOND_TRAINJOB = ("image_pull_policy",)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_server_takes_every_field(case: str, kind: str) -> None:
    job, profile = CASES[case]
    if kind == "TrainJob":  # it has no fields for these, which planning reports
        profile = {key: of for key, of in profile.items() if key not in BEYOND_TRAINJOB}
    assert faults(manifest(job, profile, kind), versions=VERSIONS) == []


@pytest.mark.parametrize("kind", ["JobSet", "Job"])
def test_on_the_nodes_network_runs_are_kept_apart_by_their_port(kind: str) -> None:
    """The operator declares a port of a PyTorchJob by itself; a TrainJob cannot have this."""
    profile = {"host_network": True, "pod_security": "privileged"}
    ports = [{"containerPort": 29500, "hostPort": 29500, "protocol": "TCP"}]
    assert container_of(workload(manifest({}, profile, kind)))["ports"] == ports
    assert "ports" not in container_of(workload(manifest({}, {}, kind)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "TrainJob"])
def test_a_folder_of_several_lines_stays_one_value(kind: str) -> None:
    folder = "/work\n  hostPID: true\n"
    document = workload(manifest({"workdir": folder}, {}, kind))
    assert container_of(document)["workingDir"] == folder
    assert "hostPID" not in template_of(document)["spec"]


@pytest.mark.parametrize("kind", KINDS)
def test_everything_of_a_run_carries_its_label(kind: str) -> None:
    documents = read(manifest({}, {"gang_scheduler": None}, kind))
    label = {"torch-deploy-toolkit/run": "t"}
    for metadata in (*(d["metadata"] for d in documents), template_of(documents[-1])["metadata"]):
        assert label.items() <= metadata["labels"].items()
    assert documents[-1]["kind"] == kind
    label |= {"torch-deploy-toolkit/workload": kind}  # a workload of another kind may be called t
    assert label.items() <= template_of(documents[-1])["metadata"]["labels"].items()
    assert documents[0]["metadata"]["name"] == f"t-{kind.lower()}"
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
        assert "--env=PET_SHUTDOWN_TIMEOUT=300" in spec["containers"][0]["args"]
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


def test_a_range_of_nodes_is_torchruns_and_all_workers_must_succeed() -> None:
    """With an elasticPolicy the operator deletes the others when the first one has succeeded."""
    job = {"resources": {"nnodes": {"min": 2, "max": 4}}, "retries": {"in_job": 3}}
    thing = workload(manifest(job, {"runs_claim": "runs"}))
    name, spec = thing["metadata"]["name"], thing["spec"]
    assert (spec.keys(), spec["pytorchReplicaSpecs"]["Worker"]["replicas"]) == (
        {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"},
        4,
    )
    options = ("--nnodes=2:4", "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-id={name}")
    endpoint = f"--rdzv-endpoint={name}-worker-0:23456"
    assert {*options, endpoint} <= {*container_of(thing)["args"]}
    without_volume = workload(manifest(job, {}))["spec"]
    policy = without_volume["elasticPolicy"]  # a worker that starts late cannot see the others' end
    assert (policy["minReplicas"], policy["maxReplicas"], policy["maxRestarts"]) == (2, 4, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_of_a_lost_node_are_replaced_within_seconds(kind: str) -> None:
    own = {"key": "gpu", "operator": "Exists"}
    site = {"tolerations": [own], "lost_node_toleration": "45s"}
    text = manifest({}, site, kind)
    first, *lost = template_of(workload(text))["spec"]["tolerations"]
    assert first == own
    common = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 45}
    keys = ("not-ready", "unreachable")
    assert lost == [{"key": f"node.kubernetes.io/{key}", **common} for key in keys]


def test_a_master_is_one_of_the_pods() -> None:
    site = {"master": True, "pod_security": "baseline"}
    for nodes, roles in ((1, {"Master": 1}), (3, {"Master": 1, "Worker": 2})):
        text = manifest({"resources": {"nnodes": nodes}}, site)
        spec = workload(text)["spec"]
        found = {role: of["replicas"] for role, of in spec["pytorchReplicaSpecs"].items()}
        assert found == roles
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


@pytest.mark.parametrize("kind", ["JobSet", "Job"])
def test_pods_are_replaced_as_often_as_they_may_fail_and_be_lost(kind: str) -> None:
    def spec(retries: dict[str, Any], profile: dict[str, Any]) -> Any:
        found = workload(manifest({"retries": retries}, profile, kind))["spec"]
        return found if kind == "Job" else found["replicatedJobs"][0]["template"]["spec"]

    claim = {"runs_claim": "runs"}
    for retries, limit in (
        ({}, 4),
        ({"requeue": 2}, 6),
        ({"requeue": 2, "preemptions": 9}, 11),
        ({"preemptions": 0}, 0),
    ):
        found = spec(retries, claim)
        assert (found["backoffLimitPerIndex"], found["maxFailedIndexes"]) == (limit, 0)
        # The API refuses this policy beside a podFailurePolicy.
        assert found["podReplacementPolicy"] == "TerminatingOrFailed"
        assert "podFailurePolicy" not in found
    for retries, limit in (({}, 0), ({"requeue": 2}, 2)):
        found = spec(retries, {})
        assert (found["backoffLimitPerIndex"], found["podReplacementPolicy"]) == (limit, "Failed")
        actions = [rule["action"] for rule in found["podFailurePolicy"]["rules"]]
        assert actions == ["FailJob", "Ignore"], "without a folder in common there is no mark"


def test_the_first_pod_has_the_name_that_the_others_are_told() -> None:
    for kind, first in (("Job", "t-0.t"), ("JobSet", "t-node-0-0.t"), ("TrainJob", "t-node-0-0.t")):
        _, arguments = arrives(container_of(workload(manifest({}, {}, kind))))
        assert f"--rdzv-endpoint={first}:29500".encode() in arguments
    *_, service, job = read(manifest({}, {}, "Job"))
    assert service["metadata"]["name"] == template_of(job)["spec"]["subdomain"] == "t"
    assert service["spec"]["publishNotReadyAddresses"] is True


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
        end = f"-{kind.lower()}" if document["kind"] == "NetworkPolicy" else ""
        assert document["metadata"]["name"] == name + end


def test_how_many_points_run_at_a_time_is_for_a_queue_to_say() -> None:
    job = SWEEP | {"sweep": SWEEP["sweep"] | {"max_running": 2}}
    with pytest.raises(toolkit.PlanError, match="only the quota of a Kueue queue limits"):
        manifest(job, {})
    assert faults(manifest(job, {"queue": "team"})) == []


def test_pods_with_their_nodes_host_name_know_it() -> None:
    site = {"host_network": True, "pod_security": "privileged"}
    for kind in ("PyTorchJob", "JobSet", "Job"):
        assert "--host-network" in manifest({}, site, kind)
        assert "--host-network" not in manifest({}, {}, kind)


def test_torchrun_starts_ranks_again_beside_a_master_too() -> None:
    site = {"master": True, "pod_security": "baseline"}
    retries = {"retries": {"in_job": 3}}
    spec = workload(manifest(retries, site, "PyTorchJob"))["spec"]["pytorchReplicaSpecs"]
    (container,) = spec["Master"]["template"]["spec"]["containers"]
    assert "--max-restarts=3" in container["args"]
    with pytest.raises(toolkit.PlanError, match="leave out `master`"):
        manifest({**retries, "resources": {"nnodes": 2}}, site, "PyTorchJob")
