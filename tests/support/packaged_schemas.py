"""The schemas of manifests that the linter carries, made from what the projects publish.

`make golden` writes `toolkit/lint/manifests/schemas.json` from the schemas of kubernetes-validate
(Kubernetes' own kinds, and what stands in pods) and from the CustomResourceDefinitions of the
operators in `tests/fakes/kubernetes/schemas`. They give fields, types and required fields. This
module adds the facts that no schema holds: the words and the least numbers that Go code checks, the
fields that an operator fills in, and the parts that the linter leaves alone, because another rule
checks them, or training does not use them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kubernetes_validate.utils import schema_contents

from tests.conftest import ROOT
from tests.support.kubernetes_schemas import VERSIONS, folder_of

__all__ = ["PATH", "text"]

PATH = ROOT / "toolkit/lint/manifests/schemas.json"
_CUSTOM = ROOT / "tests/fakes/kubernetes/schemas"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CORE = {
    "batch/v1": "Job",
    "networking.k8s.io/v1": "NetworkPolicy",
    "/v1": "ConfigMap Namespace PersistentVolumeClaim Pod Secret Service ServiceAccount",
}
_OPERATORS = {
    "jobset.x-k8s.io/v1alpha2/JobSet": "jobsets",
    "kubeflow.org/v1/PyTorchJob": "pytorchjobs",
    "trainer.kubeflow.org/v1alpha1/ClusterTrainingRuntime": "trainingruntimes",
    "trainer.kubeflow.org/v1alpha1/TrainJob": "trainjobs",
    "trainer.kubeflow.org/v1alpha1/TrainingRuntime": "trainingruntimes",
}

_MARKS = {
    "JobSetSpec": {"replicatedJobs", "successPolicy"},
    "JobSpec": {"completionMode", "parallelism"},
    "PodSpec": {"containers", "hostNetwork"},
    "EnvVar": {"value", "valueFrom"},
    "ResourceRequirements": {"limits", "requests"},
    "VolumeMount": {"mountPath", "subPath"},
    "Volume": {"emptyDir", "hostPath"},
    "Affinity": {"nodeAffinity", "podAffinity"},
    "Toleration": {"effect", "tolerationSeconds"},
    "PodSecurityContext": {"fsGroup", "sysctls"},
    "SecurityContext": {"capabilities", "privileged"},
}
"""Fields by which a definition is known where an operator's schema repeats it."""

_LEFT_ALONE = _names("""
    AWSElasticBlockStoreVolumeSource AzureDiskVolumeSource AzureFileVolumeSource
    CephFSVolumeSource CinderVolumeSource ContainerResizePolicy ContainerRestartRule
    DownwardAPIVolumeSource EphemeralContainer EphemeralVolumeSource EvictionResponder
    FCVolumeSource FileKeySelector FlexVolumeSource FlockerVolumeSource
    GCEPersistentDiskVolumeSource GitRepoVolumeSource GlusterfsVolumeSource ISCSIVolumeSource
    JobSchedulingConfiguration Lifecycle ManagedFieldsEntry ObjectReference OwnerReference
    PhotonPersistentDiskVolumeSource PodReadinessGate PodResourceClaim PodSchedulingGroup
    PortworxVolumeSource Probe ProjectedVolumeSource QuobyteVolumeSource RBDVolumeSource
    ResourceClaim SELinuxOptions ScaleIOVolumeSource SessionAffinityConfig StorageOSVolumeSource
    SuccessPolicy Time TypedLocalObjectReference TypedObjectReference
    VsphereVirtualDiskVolumeSource WindowsSecurityContextOptions ContainerPort.containerPort
    ContainerPort.hostPort ContainerPort.name JobSetSpec.volumeClaimPolicies
    PyTorchJob.spec.elasticPolicy.metrics PyTorchJob.spec.nprocPerNode ServicePort.name
    ServicePort.nodePort ServicePort.port ServicePort.targetPort TrainJob.spec.initializer
    TrainingRuntime.spec.mlPolicy.flux TrainingRuntime.spec.mlPolicy.jax
    TrainingRuntime.spec.mlPolicy.mpi TrainingRuntime.spec.mlPolicy.torch.envInjection
    TrainingRuntime.spec.mlPolicy.xgboost TrainingRuntime.spec.podGroupPolicy
""")
"""Definitions and fields that may hold anything."""

_ALSO = {
    "TrainJob.spec": ("podTemplateOverrides",),
    "TrainJob.spec.runtimePatches.trainingRuntimeSpec.template.spec.replicatedJobs.template.spec"
    ".template.spec.containers": ("image",),
}
"""Fields that no schema has any more, or a webhook refuses; a rule of its own reports them."""

_REQUIRED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Job", "JobSet", "PersistentVolumeClaim", "Pod", "PyTorchJob"), ("spec",)),
    **dict.fromkeys(("Service", "TrainJob", "TrainingRuntime"), ("spec",)),
    "TrainingRuntime.spec": ("template",),
}
"""What servers and webhooks require beyond the schemas."""

_FILLED_IN = frozenset(
    {
        "JobSetSpec.failurePolicy.rules.name",
        "JobSetSpec.replicatedJobs.dependsOn.status",
        "LocalObjectReference.name",
        "TrainJob.spec.runtimePatches.trainingRuntimeSpec.template.spec.replicatedJobs.template"
        ".spec.template.spec.imagePullSecrets.name",
    }
)
"""What schemas require and a webhook, or the server, fills in before."""

_LEAST = {
    **dict.fromkeys(
        _names("""
        backoffLimit backoffLimitPerIndex completions defaultMode deletionGracePeriodSeconds
        fsGroup generation healthCheckNodePort jobIndex maxFailedIndexes maxRestarts
        minAvailable mode parallelism podIndex replicas runAsGroup runAsUser
        scheduleTimeoutSeconds terminationGracePeriodSeconds ttlSecondsAfterFinished
        """),
        0,
    ),
    **dict.fromkeys(
        _names("""
        activeDeadlineSeconds endPort maxReplicas maxSkew minDomains minReplicas
        nProcPerNode numNodes numProcPerNode rdzvPort weight
        """),
        1,
    ),
}
"""The least number of a field, wherever it stands (the validation of each API, in Go)."""

_EXPRESSION = "In NotIn Exists DoesNotExist"
_PULL = "Always IfNotPresent Never"
_PROTOCOL = "TCP UDP SCTP"
_RESTART = "Always OnFailure Never"
_WORDS = {
    "AppArmorProfile.type": "RuntimeDefault Localhost Unconfined",
    "Container.imagePullPolicy": _PULL,
    "Container.restartPolicy": _RESTART,
    "Container.terminationMessagePolicy": "File FallbackToLogsOnError",
    "ContainerPort.protocol": _PROTOCOL,
    "EmptyDirVolumeSource.medium": "Memory HugePages HugePages-2Mi HugePages-1Gi ~",
    "HostPathVolumeSource.type": "DirectoryOrCreate Directory FileOrCreate File Socket CharDevice "
    "BlockDevice ~",
    "ImageVolumeSource.pullPolicy": _PULL,
    "JobSetSpec.failurePolicy.rules.onJobFailureReasons": "BackoffLimitExceeded DeadlineExceeded "
    "FailedIndexes MaxFailedIndexesExceeded PodFailurePolicy",
    "JobSpec.completionMode": "Indexed NonIndexed",
    "JobSpec.podReplacementPolicy": "Failed TerminatingOrFailed",
    "LabelSelectorRequirement.operator": _EXPRESSION,
    "NetworkPolicyPort.protocol": _PROTOCOL,
    "NetworkPolicySpec.policyTypes": "Ingress Egress",
    "NodeSelectorRequirement.operator": f"{_EXPRESSION} Gt Lt",
    "PersistentVolumeClaimSpec.accessModes": "ReadWriteOnce ReadOnlyMany ReadWriteMany "
    "ReadWriteOncePod",
    "PersistentVolumeClaimSpec.volumeMode": "Filesystem Block",
    "PodFailurePolicyOnExitCodesRequirement.operator": "In NotIn",
    "PodFailurePolicyOnPodConditionsPattern.status": "True False Unknown",
    "PodFailurePolicyRule.action": "FailJob FailIndex Ignore Count",
    "PodOS.name": "linux windows",
    "PodSecurityContext.fsGroupChangePolicy": "OnRootMismatch Always",
    "PodSecurityContext.seLinuxChangePolicy": "MountOption Recursive",
    "PodSecurityContext.supplementalGroupsPolicy": "Merge Strict",
    "PodSpec.dnsPolicy": "ClusterFirst ClusterFirstWithHostNet Default None",
    "PodSpec.preemptionPolicy": "Never PreemptLowerPriority",
    "PodSpec.restartPolicy": _RESTART,
    "PyTorchJob.spec.elasticPolicy.rdzvBackend": "c10d etcd etcd-v2",
    "PyTorchJob.spec.pytorchReplicaSpecs.restartPolicy": f"{_RESTART} ExitCode",
    "PyTorchJob.spec.runPolicy.cleanPodPolicy": "Running All None",
    "SeccompProfile.type": "RuntimeDefault Localhost Unconfined",
    "SecurityContext.procMount": "Default Unmasked",
    "ServicePort.protocol": _PROTOCOL,
    "ServiceSpec.externalTrafficPolicy": "Cluster Local",
    "ServiceSpec.internalTrafficPolicy": "Cluster Local",
    "ServiceSpec.ipFamilies": "IPv4 IPv6",
    "ServiceSpec.ipFamilyPolicy": "SingleStack PreferDualStack RequireDualStack",
    "ServiceSpec.sessionAffinity": "ClientIP None",
    "ServiceSpec.type": "ClusterIP NodePort LoadBalancer ExternalName",
    "Toleration.effect": "NoSchedule PreferNoSchedule NoExecute ~",
    "Toleration.operator": "Exists Equal ~",
    "TopologySpreadConstraint.nodeAffinityPolicy": "Honor Ignore",
    "TopologySpreadConstraint.nodeTaintsPolicy": "Honor Ignore",
    "TopologySpreadConstraint.whenUnsatisfiable": "DoNotSchedule ScheduleAnyway",
    "TrainJob.spec.runtimeRef.kind": "TrainingRuntime ClusterTrainingRuntime",
    "VolumeMount.mountPropagation": "None HostToContainer Bidirectional",
    "VolumeMount.recursiveReadOnly": "Disabled IfPossible Enabled",
}
"""The words that a field knows; `~` is the empty one."""

_AMOUNTS = {"additionalProperties": {"format": "quantity"}, "type": "object"}
_NUMBER, _STRING = {"minimum": 0, "type": "integer"}, {"type": "string"}
_GROUPS: dict[str, dict[str, Any]] = {
    "scheduling.x-k8s.io/v1alpha1/PodGroup": {"scheduleTimeoutSeconds": _NUMBER},
    "scheduling.volcano.sh/v1beta1/PodGroup": {
        "minTaskMember": {"additionalProperties": _NUMBER, "type": "object"},
        "networkTopology": {},
        "priorityClassName": _STRING,
        "queue": _STRING,
        "subGroupPolicy": {},
    },
}
"""Fields of gangs beside the two that all have (scheduler-plugins 0.31, Volcano 1.12)."""


def text() -> str:
    """Return what the file must hold: a definition on each line."""
    schemas = _Schemas()
    kinds = {f"{version}/{kind}": kind for version, row in _CORE.items() for kind in row.split()}
    for kind in kinds.values():
        schemas.define(kind)
    for name, file in _OPERATORS.items():
        schema = json.loads((_CUSTOM / f"{file}.json").read_text())
        kind = schema_kind = name.rpartition("/")[2]
        if kind == "JobSet":
            schemas.definitions["JobSetSpec"] = {}
            spec = schema["properties"]["spec"]
            schemas.definitions["JobSetSpec"] = schemas.trimmed(spec, "JobSetSpec", schema["$defs"])
        if kind != "ClusterTrainingRuntime":
            schemas.definitions[kind] = schemas.trimmed(schema, kind, schema["$defs"])
        else:
            schema_kind = "TrainingRuntime"
        kinds[name] = schema_kind
    for name, fields in _GROUPS.items():
        kinds[name] = "VolcanoPodGroup" if "volcano" in name else "PodGroup"
        spec = {"minMember": _NUMBER, "minResources": _AMOUNTS, **fields}
        schemas.definitions[kinds[name]] = {
            "properties": {
                "apiVersion": _STRING,
                "kind": _STRING,
                "metadata": schemas.define("ObjectMeta"),
                "spec": {"properties": spec, "type": "object"},
            },
            "type": "object",
        }
    for kind in set(kinds.values()):
        top = schemas.definitions[kind]
        top["required"] = sorted({"apiVersion", "kind", "metadata", *top.get("required", ())})
        if "spec" in top["properties"]:
            top["properties"]["status"] = {}
    unused = {*_WORDS, *_FILLED_IN, *_ALSO, *_REQUIRED, *_LEFT_ALONE} - schemas.visited
    assert not unused, f"no such definitions or fields: {sorted(unused)}"
    return "".join(_lines(kinds, schemas.definitions))


def _lines(kinds: Mapping[str, str], definitions: Mapping[str, Any]) -> Iterator[str]:
    parts = {"kinds": kinds, "$defs": definitions}
    for index, (part, entries) in enumerate(parts.items()):
        yield f'{"," if index else "{"}\n"{part}": {{'
        for row, name in enumerate(sorted(entries)):
            schema = json.dumps(entries[name], sort_keys=True)
            yield f'{"," if row else ""}\n  "{name}": {schema}'
        yield "\n}"
    yield "\n}\n"


class _Schemas:
    """Definitions by the last part of their names, each trimmed when it is first used."""

    def __init__(self) -> None:
        contents = schema_contents(f"{folder_of(VERSIONS[-1])}/_definitions.json", "")
        apps = ("core.v1", "batch.v1", "networking.v1", "meta.v1", "resource", "intstr")
        self.source = {
            name.rpartition(".")[2]: schema
            for name, schema in contents["$defs"].items()
            if any(f".{app}." in name for app in apps)
        }
        self.definitions: dict[str, Any] = {}
        self.visited: set[str] = set()

    def define(self, name: str) -> dict[str, str]:
        """Take a definition over; return the reference to it."""
        if name not in self.definitions:
            self.definitions[name] = {}  # a definition may refer to itself
            self.definitions[name] = self.trimmed(self.source[name], name, {})
        return {"$ref": f"#/$defs/{name}"}

    def trimmed(self, schema: Any, path: str, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the linter looks at; `parts` are the `$defs` of an operator's schema."""
        self.visited.add(path)
        if path in _LEFT_ALONE:
            return {}
        if reference := schema.get("$ref"):
            name = reference.rpartition("/")[2]
            if name in parts:
                return self.trimmed(parts[name], path, parts)
            return self.shared(name.rpartition(".")[2])
        fields = schema.get("properties", {})
        if "spec" in fields:
            fields = {key: entry for key, entry in fields.items() if key != "status"}
        for name, marks in _MARKS.items():
            if parts and path != name and marks <= fields.keys():
                return self.shared(name)
        if schema.get("x-kubernetes-int-or-string"):
            return {"format": "quantity"} if "pattern" in schema else {**_INT_OR_STRING}
        kinds = schema.get("type")
        (kind,) = {*([kinds] if isinstance(kinds, str) else kinds)} - {"null"}
        made: dict[str, Any] = {"type": kind}
        last = path.rpartition(".")[2]
        if words := _WORDS.get(path):
            made["enum"] = [word.replace("~", "") for word in words.split()]
        elif "enum" in schema and last not in ("apiVersion", "kind"):
            made["enum"] = [word for word in schema["enum"] if word is not None]
        if kind == "integer" and last in _LEAST:
            made["minimum"] = _LEAST[last]
        if kind == "array":
            items = self.trimmed(schema["items"], path, parts)
            return {"items": items, "type": "array"}
        if "enum" not in made and isinstance(schema.get("additionalProperties"), dict):
            below = self.trimmed(schema["additionalProperties"], path, parts)
            return {"additionalProperties": below, "type": "object"}
        if kind == "object":
            made["properties"] = {
                key: self.field(key, entry, f"{path}.{key}", parts) for key, entry in fields.items()
            } | {name: {} for name in _ALSO.get(path, ())}
            required = {*schema.get("required", ()), *_REQUIRED.get(path, ())}
            required -= {name for name in required if f"{path}.{name}" in _FILLED_IN}
            self.visited |= {f"{path}.{name}" for name in schema.get("required", ())}
            if required:
                made["required"] = sorted(required)
        return made

    def field(self, key: str, schema: Any, path: str, parts: Mapping[str, Any]) -> Any:
        """Return the schema of a field."""
        return self.define("ObjectMeta") if key == "metadata" else self.trimmed(schema, path, parts)

    def shared(self, name: str) -> dict[str, Any]:
        """Return the schema of a definition that Kubernetes shares among kinds."""
        self.visited.add(name)
        if name == "Quantity":
            return {"format": "quantity"}
        if name == "IntOrString":
            return {**_INT_OR_STRING}
        return {} if name in _LEFT_ALONE else self.define(name)


_INT_OR_STRING = {"x-kubernetes-int-or-string": True}
