"""Rules about TrainJobs and their runtimes, and about queues and gangs."""

from collections.abc import Iterator

from toolkit.lint.manifests.pods import WORKLOADS, pods_of
from toolkit.lint.rulebook import MANIFESTS, Violation
from toolkit.text.manifests import Manifest, Stream, View

_JOBS = ("node", "dataset-initializer", "model-initializer", "launcher")
"""Jobs of Trainer's built-in runtimes, each with a container of the same name."""

_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_GROUP_NOTES = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
_QUEUE = ("kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class")
_QUEUED = (
    *WORKLOADS,
    *("RayJob", "RayCluster", "MPIJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob"),
    *("Deployment", "StatefulSet", "LeaderWorkerSet", "AppWrapper"),
)


def _runtimes(stream: Stream) -> dict[tuple[str, str], Manifest]:
    return {
        (manifest.kind, manifest.name): manifest
        for manifest in stream.of("TrainingRuntime", "ClusterTrainingRuntime")
    }


@MANIFESTS.rule(
    "pod-template-overrides",
    finds="podTemplateOverrides in a TrainJob",
    reason="Trainer 2.3 has no such field: the server drops it, or refuses the TrainJob.",
    fix="write runtimePatches: [{manager: NAME, trainingRuntimeSpec: {template: {spec: "
    "{replicatedJobs: [{name: node, …}]}}}}]",
)
def _overrides(stream: Stream) -> Iterator[Violation[View]]:
    for manifest in stream.of("TrainJob"):
        if overrides := manifest.view.at("spec", "podTemplateOverrides"):
            yield Violation(overrides, "podTemplateOverrides is gone")


@MANIFESTS.rule(
    "patch-target",
    finds="a patch of a TrainJob for a job or container that the runtime does not have",
    reason="The patch is accepted, no pod is created, and status stays empty: only events report "
    "it (Trainer 2.3).",
    fix="name the runtime's own: job `node`, container `node`",
)
def _targets(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        if pods.kind != "TrainJob":
            continue
        ref = pods.owner.view.at("spec", "runtimeRef")
        kind = ref.text("kind", default="ClusterTrainingRuntime")
        runtime = _runtimes(stream).get((kind, ref.text("name")))
        runtime_pods = [one for one in pods_of(stream) if one.owner is runtime]
        jobs = [one.role for one in runtime_pods] or list(_JOBS)
        names = [c.name for one in runtime_pods if one.role == pods.role for c in one.containers]
        name = pods.owner.view.at(*pods.job.path[:-2]).at("name")
        if pods.role not in jobs:
            yield Violation(name, f"no job {pods.role!r}; the runtime has {', '.join(jobs)}")
            continue
        for container in pods.containers:
            if runtime_pods and container.name not in names:
                what = f"no container {container.name!r}; the runtime has {', '.join(names)}"
                yield Violation(container.view.at("name"), what)


@MANIFESTS.rule(
    "patch-refused",
    finds="a patch of a TrainJob that sets an image, or variables of the trainer's container",
    reason="The webhook refuses it (Trainer 2.3).",
    fix="write spec.trainer.image and spec.trainer.env",
)
def _refused(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        for container in pods.containers if pods.kind == "TrainJob" else ():
            if image := container.view.at("image"):
                yield Violation(image, "a patch cannot set the image")
            if (env := container.view.at("env")) and container.name == "node":
                yield Violation(env, "a patch cannot set the trainer's variables")


@MANIFESTS.rule(
    "runtime-label",
    finds="a TrainingRuntime without the labels that Trainer needs",
    reason="Without trainer.kubeflow.org/framework the SDK does not list it; without "
    f"{_STEP}: trainer no TrainJob's command and image reach its pods (Trainer 2.3).",
    fix="write both labels: framework on the runtime, the step on the template of the job `node`",
)
def _labels(stream: Stream) -> Iterator[Violation[View]]:
    for manifest in _runtimes(stream).values():
        metadata = manifest.view.at("metadata", "labels")
        if "trainer.kubeflow.org/framework" not in metadata.labels():
            policy = manifest.view.at("spec", "mlPolicy")
            others = any(key not in ("numNodes", "torch") for key, _ in policy.entries())
            value = "" if others else ": torch"
            yield Violation(metadata, f"no label trainer.kubeflow.org/framework{value}")
        jobs = list(manifest.view.at("spec", "template", "spec", "replicatedJobs").items())
        steps = [job.labels("template", "metadata", "labels").get(_STEP) for job in jobs]
        if jobs and "trainer" not in steps:
            at = next((job for job in jobs if job.text("name") == "node"), jobs[0])
            yield Violation(at.at("template"), f"no job has the label {_STEP}: trainer")


# ---- Queues


@MANIFESTS.rule(
    "queue-suspended",
    finds="`suspend` in an object that a Kueue queue admits",
    reason="Kueue's webhook sets it when the object is created. Applying the file again conflicts "
    "with Kueue, or stops the run (Kueue 0.19).",
    fix="leave suspend out: Kueue's webhook sets it",
)
def _suspended(stream: Stream) -> Iterator[Violation[View]]:
    for manifest in stream.manifests:
        queue = manifest.view.text("metadata", "labels", _QUEUE[0])
        above = ("runPolicy",) if manifest.kind == "PyTorchJob" else ()
        if queue and (suspend := manifest.view.at("spec", *above, "suspend")):
            yield Violation(suspend, f"suspend beside the queue {queue!r}")


@MANIFESTS.rule(
    "queue-label",
    finds="Kueue's label where Kueue does not look: in a pod template, as an annotation, or on a "
    "kind that does not queue",
    reason="It is ignored, and the job runs past the queue (Kueue 0.19).",
    fix="write it under metadata.labels of the job",
)
def _misplaced(stream: Stream) -> Iterator[Violation[View]]:
    for manifest in stream.manifests:
        metadata = manifest.view.at("metadata")
        for key in _QUEUE:
            if annotation := metadata.at("annotations", key):
                yield Violation(annotation, f"{key} is an annotation here, and must be a label")
            if manifest.kind not in _QUEUED and (annotation := metadata.at("labels", key)):
                yield Violation(annotation, f"{key} means nothing on a {manifest.kind}")
    for pods in pods_of(stream):
        if pods.kind == "Pod":
            continue
        for key in _QUEUE:
            on_both = key in pods.owner.view.labels("metadata", "labels")
            if (annotation := pods.template.at("metadata", "labels", key)) and not on_both:
                yield Violation(annotation, f"{key} is on the pods, not on the {pods.kind}")


@MANIFESTS.rule(
    "pod-group",
    finds="a PodGroup that waits for more pods than the file defines",
    reason="The gang is never complete, and none of its pods starts.",
    fix="write the number of pods into minMember",
)
def _groups(stream: Stream) -> Iterator[Violation[View]]:
    for group in stream.of("PodGroup"):
        least = group.view.at("spec", "minMember")
        counts = []
        for pods in pods_of(stream):
            labels = pods.template.labels("metadata", "labels")
            notes = pods.template.labels("metadata", "annotations")
            names = [labels.get("scheduling.x-k8s.io/pod-group"), *map(notes.get, _GROUP_NOTES)]
            counts += [pods.count] if group.name in names else []
        sizes = [count for count in counts if count is not None]
        total = sum(sizes)
        if sizes and len(sizes) == len(counts) and (least.whole() or 0) > total:
            yield Violation(least, f"minMember: {least.value}, and {total} pods belong to it")
