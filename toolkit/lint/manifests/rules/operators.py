"""Rules about how operators and the scheduler handle an object and its pods."""

import re
from collections.abc import Iterator

from toolkit.lint.manifests.pods import Pods, containers_of, launches, pods_of
from toolkit.lint.manifests.rules.schema import shown
from toolkit.lint.rulebook import MANIFESTS, Violation
from toolkit.text.manifests import Manifest, Stream, View
from toolkit.text.quantities import amount, whole_number

_DROP = ("securityContext", "capabilities", "drop")


def _pytorchjobs(stream: Stream) -> Iterator[tuple[Manifest, View]]:
    for manifest in stream.of("PyTorchJob"):
        yield manifest, manifest.view.at("spec")


@MANIFESTS.rule(
    "replica-type",
    finds="pods of a PyTorchJob that are neither Master nor Worker, or a number of Masters that is "
    "not 1",
    reason="The webhook refuses them (Training Operator 1.9).",
    fix="write Master (replicas: 1) and Worker, or Worker alone",
)
def _roles(stream: Stream) -> Iterator[Violation[View]]:
    for _, spec in _pytorchjobs(stream):
        for role, entry in spec.at("pytorchReplicaSpecs").entries():
            replicas = entry.at("replicas")
            if role not in ("Master", "Worker"):
                yield Violation(entry, f"a PyTorchJob has no {role!r}")
            elif role == "Master" and replicas and replicas.value != 1:
                yield Violation(replicas, f"{shown(replicas.value)} Masters")


@MANIFESTS.rule(
    "container-name",
    finds="pods without the container that the operator looks for: `pytorch` of a PyTorchJob, "
    "`node` of a TrainingRuntime",
    reason="The webhook refuses the PyTorchJob; a TrainJob's command and variables go nowhere "
    "(Training Operator 1.9, Trainer 2.3).",
    fix="name the training container so",
)
def _containers(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        runtime = pods.kind.endswith("Runtime") and pods.role == "node"
        required = "pytorch" if pods.kind == "PyTorchJob" else "node" if runtime else ""
        names = [one.name for one in pods.containers]
        if required and names and required not in names:
            at = pods.containers[0].view.at("name")
            yield Violation(at, f"no container is called {required!r}; found {', '.join(names)}")


@MANIFESTS.rule(
    "master-restricted",
    finds="a PyTorchJob with Master and Worker, and pods written for Pod Security `restricted`",
    reason="The operator gives workers an init container that waits for the master, and "
    "`restricted` refuses that container: only the master is created, and waits forever (Training "
    "Operator 1.9).",
    fix="use Workers alone, with torchrun --nnodes=N --rdzv-backend=c10d --rdzv-id=NAME "
    "--rdzv-endpoint=NAME-worker-0:23456",
)
def _masters(stream: Stream) -> Iterator[Violation[View]]:
    for manifest, spec in _pytorchjobs(stream):
        roles = spec.at("pytorchReplicaSpecs")
        workers = roles.at("Worker")
        if not roles.at("Master") or not workers or workers.whole("replicas") == 0:
            continue
        pod, level = workers.at("template", "spec"), stream.known_level_of(manifest)
        restricted = level == "restricted"
        if level is None:
            drops = [one.words(*_DROP) for one in pod.at("containers").items()]
            unprivileged = pod.at("securityContext", "runAsNonRoot").value
            restricted = bool(unprivileged) and all("ALL" in dropped for dropped in drops)
        if restricted:
            yield Violation(roles.at("Master"), "Master and Worker in restricted pods")


@MANIFESTS.rule(
    "backoff-limit",
    finds="a backoffLimit of a PyTorchJob that one incident uses up",
    reason="The operator adds up the restarts of all containers: with 2 pods and a limit of 2, one "
    "incident fails the job (Training Operator 1.9).",
    fix="write incidents x pods + 1, or leave it out",
)
def _backoff(stream: Stream) -> Iterator[Violation[View]]:
    for manifest, spec in _pytorchjobs(stream):
        limit = spec.at("runPolicy", "backoffLimit")
        pods = [one for one in pods_of(stream) if one.owner is manifest]
        restarts = any(one.job.text("restartPolicy") in ("OnFailure", "Always") for one in pods)
        count = pods[0].together if pods else None
        whole = limit.whole()
        if whole is not None and count and restarts and whole <= count:
            what = f"backoffLimit: {whole} for {count} pods that each restart"
            yield Violation(limit, what)


@MANIFESTS.rule(
    "clean-pod-policy",
    finds="a PyTorchJob with cleanPodPolicy: None, which is its default",
    reason="After the job fails, the remaining pods stay: they run on, or crash and restart, and "
    "keep their GPUs (Training Operator 1.9).",
    fix="write runPolicy: {cleanPodPolicy: Running}",
)
def _clean(stream: Stream) -> Iterator[Violation[View]]:
    for _, spec in _pytorchjobs(stream):
        policy = spec.at("runPolicy", "cleanPodPolicy")
        if not policy or policy.value == "None":
            yield Violation(policy, "pods of a job that has ended stay behind, and may run")


@MANIFESTS.rule(
    "job-restart-policy",
    finds="pods of a Job with restartPolicy Always, which is the pods' default, or OnFailure "
    "with a podFailurePolicy",
    reason="The server refuses it, or the Job that a JobSet makes of it.",
    fix="write restartPolicy: Never",
)
def _restarts(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        if pods.kind not in ("Job", "JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
            continue
        policy = pods.spec.at("restartPolicy")
        if not policy:
            if pods.spec and pods.kind == "Job":  # JobSet sets OnFailure itself
                yield Violation(policy, "no restartPolicy")
        elif policy.value == "Always":
            yield Violation(policy, "restartPolicy: Always")
        elif policy.value == "OnFailure" and pods.job.at("podFailurePolicy"):
            yield Violation(policy, "restartPolicy: OnFailure beside a podFailurePolicy")


@MANIFESTS.rule(
    "failure-rule-container",
    finds="a podFailurePolicy for a container that the pods do not have",
    reason="The server refuses it, or the rule never matches.",
    fix="write the container's name",
)
def _failure_rules(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        names = [one.name for one in pods.all_containers]
        for entry in pods.job.at("podFailurePolicy", "rules").items():
            name = entry.at("onExitCodes", "containerName")
            if name.text() and names and name.text() not in names:
                yield Violation(name, f"no container is named {name.text()!r}")


# ---- Job


def _meeting_jobs(stream: Stream) -> Iterator[Pods]:
    """Yield the pods of Jobs in which several torchruns must rendezvous."""
    for launch in launches(stream):
        if launch.pods.kind == "Job" and launch.pods.several:
            yield launch.pods


@MANIFESTS.rule(
    "job-not-indexed",
    finds="a Job with torchrun in several pods that is not Indexed, or does not run all of them at "
    "once",
    reason="Without an index no pod knows its rank or the others' names; with fewer pods at "
    "a time than completions, torchrun waits for pods that start only after others have ended.",
    fix="write completionMode: Indexed, and completions equal to parallelism",
)
def _indexed(stream: Stream) -> Iterator[Violation[View]]:
    for pods in _meeting_jobs(stream):
        mode = pods.job.at("completionMode")
        completions = pods.job.at("completions")
        if mode.value != "Indexed":
            yield Violation(mode, f"{pods.count} pods without an index")
        elif completions and completions.value != pods.count:
            what = f"{shown(completions.value)} completions, and {pods.count} pods at a time"
            yield Violation(completions, what)


@MANIFESTS.rule(
    "job-unreachable",
    finds="an Indexed Job with torchrun in several pods and no Service that names them",
    reason="NAME-0.SUBDOMAIN is in the cluster's DNS only with a headless Service and the pods' "
    "subdomain.",
    fix="write subdomain: NAME into the pods, and a headless Service of that name",
)
def _unreachable(stream: Stream) -> Iterator[Violation[View]]:
    services = {service.name for service in stream.of("Service")}
    for pods in _meeting_jobs(stream):
        subdomain = pods.spec.at("subdomain")
        if pods.job.at("completionMode").value != "Indexed":
            continue
        if not subdomain:
            yield Violation(subdomain, "the pods have no subdomain, and so no names")
        elif services and subdomain.text() not in services:  # otherwise it is in another file
            yield Violation(subdomain, f"there is no Service {subdomain.text()!r} here")


@MANIFESTS.rule(
    "job-peers-hang",
    finds="an Indexed Job with torchrun in several pods that continues after one pod fails",
    reason="Nothing restarts the other pods: they may wait for the lost pod until the deadline "
    "(Kubernetes 1.34).",
    fix="write backoffLimitPerIndex: N and maxFailedIndexes: 0; or use a JobSet",
)
def _hang(stream: Stream) -> Iterator[Violation[View]]:
    for pods in _meeting_jobs(stream):
        if pods.job.at("completionMode").value != "Indexed":
            continue
        each, most = pods.job.at("backoffLimitPerIndex"), pods.job.at("maxFailedIndexes")
        in_place = pods.spec.text("restartPolicy") == "OnFailure"
        if not each and not in_place:
            yield Violation(each, "no backoffLimitPerIndex: one pod's end hangs the others")
        elif each and most.value != 0:
            yield Violation(most, "no maxFailedIndexes: 0, so the others keep waiting")


# ---- JobSet


@MANIFESTS.rule(
    "jobset-backoff-limit",
    finds="Jobs of a JobSet with a backoffLimit other than 0, where the JobSet restarts",
    reason="The Job replaces only the failed pod (six times by default), while the others hang; "
    "the JobSet restarts everything only after the Job fails (JobSet 0.12).",
    fix="write backoffLimit: 0 into the template of the replicated job",
)
def _gang(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        if pods.kind == "JobSet":
            policy = pods.owner.view.at("spec", "failurePolicy")
        elif pods.kind.endswith("Runtime"):
            policy = pods.owner.view.at("spec", "template", "spec", "failurePolicy")
        else:
            continue
        limit = pods.job.at("backoffLimit")
        if policy.value and policy.text("restartStrategy") == "InPlaceRestart":
            continue  # its agents restart the containers, up to a large backoffLimit
        if policy.whole("maxRestarts") and limit.value != 0:
            there = f"backoffLimit: {shown(limit.value)}" if limit else "no backoffLimit: 6"
            yield Violation(limit, f"{there} restarts of a pod alone")


# ---- The scheduler

_OWN_FIELD = re.compile(
    r"metadata\.(name|namespace|uid|(labels|annotations)\['[^']+'\])"
    r"|spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?)"
)


@MANIFESTS.rule(
    "toleration-odd",
    finds="a toleration that contradicts itself",
    reason="The server refuses the pods, or the Job that creates them.",
    fix="write operator: Exists without a value, or Equal with key and value; tolerationSeconds "
    "with effect: NoExecute alone",
)
def _tolerations(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        for one in pods.spec.at("tolerations").items():
            exists = one.text("operator") == "Exists"
            if exists and one.text("value"):
                yield Violation(one.at("value"), "operator Exists takes no value")
            elif not one.text("key") and not exists:
                yield Violation(one, "a toleration without a key needs operator: Exists")
            elif one.at("tolerationSeconds") and one.text("effect") != "NoExecute":
                yield Violation(one, "tolerationSeconds is for the effect NoExecute")


@MANIFESTS.rule(
    "expression-values",
    finds="In or NotIn without values, or Exists with some, in a selector or an affinity",
    reason="The server refuses it, or the pods or the Job that an operator makes of it.",
    fix="write values: [...] for In and NotIn, and none for Exists and DoesNotExist",
)
def _expressions(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        for key in ("affinity", "topologySpreadConstraints"):
            yield from _expressions_of(pods.spec.at(key))
    for manifest in stream.of("NetworkPolicy", "Job"):
        yield from _expressions_of(manifest.view.at("spec", "podSelector"))


def _expressions_of(view: View) -> Iterator[Violation[View]]:
    for _, entry in view.entries():
        yield from _expressions_of(entry)
    for item in view.items():
        operator, values = item.text("operator"), list(item.at("values").items())
        if operator in ("In", "NotIn") and not values:
            yield Violation(item, f"{operator} without values")
        elif operator in ("Exists", "DoesNotExist") and values:
            yield Violation(item.at("values"), f"{operator} takes no values")
        yield from _expressions_of(item)


@MANIFESTS.rule(
    "host-network-dns",
    finds="hostNetwork without dnsPolicy: ClusterFirstWithHostNet",
    reason="Such pods ask the node's resolver, which knows no Services: no peer is found.",
    fix="write dnsPolicy: ClusterFirstWithHostNet",
)
def _dns(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        if pods.spec.at("hostNetwork").value is True:
            policy = pods.spec.at("dnsPolicy")
            if policy.value in (None, "ClusterFirst", "Default"):
                at = policy if policy else pods.spec.at("hostNetwork")
                yield Violation(at, "these pods ask the node's resolver")


@MANIFESTS.rule(
    "elastic-range",
    finds="an elasticPolicy range that excludes the number of workers",
    reason="The operator accepts it. Below the minimum, torchrun waits for pods that are never "
    "created; pods above the maximum wait unused; a minimum above the maximum ends torchrun.",
    fix="write minReplicas <= replicas <= maxReplicas",
)
def _ranges(stream: Stream) -> Iterator[Violation[View]]:
    for manifest in stream.of("PyTorchJob"):
        policy = manifest.view.at("spec", "elasticPolicy")
        least, most = policy.whole("minReplicas"), policy.whole("maxReplicas")
        replicas = manifest.view.at("spec", "pytorchReplicaSpecs", "Worker", "replicas")
        count = replicas.whole() if replicas else 1
        if least is not None and most is not None and least > most:
            yield Violation(
                policy.at("minReplicas"), f"minReplicas {least} exceeds maxReplicas {most}"
            )
        elif policy and count is not None and not (least or 0) <= count <= (most or count):
            yield Violation(
                replicas,
                f"{count} workers, where minReplicas is {shown(least)} and maxReplicas "
                f"{shown(most)}",
            )


@MANIFESTS.rule(
    "nproc-gpus",
    finds="torchrun with more workers than its container has GPUs",
    reason="A worker finds no GPU of its number, or two share a GPU, which NCCL refuses.",
    fix="make --nproc-per-node (nprocPerNode, numProcPerNode) the number of GPUs",
)
def _workers(stream: Stream) -> Iterator[Violation[View]]:
    for launch in launches(stream):
        limits = launch.container.resources.at("limits")
        gpus = [(name, amount(v.value)) for name, v in limits.entries() if name.endswith("/gpu")]
        spec = launch.pods.owner.view.at("spec")
        number = launch.option("nproc-per-node")
        places = [spec.at("nprocPerNode"), spec.at("trainer", "numProcPerNode")]
        at = next((place for place in places if place), launch.container.view.at("args"))
        if number is None and at.value is not None and not isinstance(at.value, tuple):
            number = str(at.value)
        for name, count in gpus:
            if number and count and (whole_number(number) or 0) > count:
                yield Violation(at, f"{number} workers, and {name}: {limits.at(name).value}")


@MANIFESTS.rule(
    "field-path",
    finds="a fieldRef to a field that pods do not expose",
    reason="The server refuses the pod.",
    fix="write one of metadata.name, .namespace, .uid, .labels['KEY'], .annotations['KEY'], "
    "spec.nodeName, spec.serviceAccountName, status.hostIP, .hostIPs, .podIP, .podIPs",
)
def _paths(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        for entry in container.view.at("env").items():
            path = entry.at("valueFrom", "fieldRef", "fieldPath")
            if path.text() and not _OWN_FIELD.fullmatch(path.text()):
                yield Violation(path, f"{path.text()!r} is no such field")
