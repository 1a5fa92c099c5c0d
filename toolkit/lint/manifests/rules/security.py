"""Rules about pod permissions: Pod Security, hostPath volumes, tokens."""

from collections.abc import Iterator

from toolkit.job.kubernetes_options import PLAIN_CAPABILITIES
from toolkit.lint.manifests.pods import Pods, launches, pods_of
from toolkit.lint.manifests.rules.schema import shown
from toolkit.lint.rulebook import MANIFESTS, Violation
from toolkit.text.manifests import Stream, View


@MANIFESTS.rule(
    "pod-security",
    finds="pods that Pod Security refuses, at the known level of the namespace, or else at "
    "`restricted`",
    reason="A Pod is refused. A workload is accepted, but its pods are not created: only events "
    "report it (FailedCreate, of a PyTorchJob FailedCreatePod), and status stays empty (Kubernetes "
    "1.34).",
    fix="write it as `restricted` wants it, or check against the level of the namespace",
)
def _levels(stream: Stream) -> Iterator[Violation[View]]:
    assumed: list[tuple[View, str]] = []
    for pods in pods_of(stream):
        level = stream.level_of(pods.owner)
        if level not in ("baseline", "restricted") or not pods.spec:
            continue
        refused = [(at, what, "leave it out") for at, what in _against(pods, level)]
        # A patch extends a runtime, which may set the missing fields.
        lacks = _lacking(pods) if level == "restricted" and pods.kind != "TrainJob" else []
        if lacks:
            what = f"pods without {', without '.join(lacks)}"
            refused.append((pods.spec, what, "write it"))
        if stream.known_level_of(pods.owner) is None:
            assumed += [(at, what) for at, what, _ in refused]
            continue
        for at, what, fix in refused:
            yield Violation(at, f"Pod Security {level!r} refuses {what}", fix=fix)
    if assumed:  # the namespace's level is unknown: one finding for the file
        kinds = list(dict.fromkeys(what for _, what in assumed))
        more = f"; and {len(kinds) - _MOST_SHOWN} more" if len(kinds) > _MOST_SHOWN else ""
        listed = "; ".join(kinds[:_MOST_SHOWN])
        yield Violation(
            assumed[0][0],
            "checked against Pod Security 'restricted', as no namespace here says another level; "
            f"it refuses {listed}{more}",
            fix="write it so, or name the profile of the namespace with --to",
        )


_MOST_SHOWN = 3


def _against(pods: Pods, level: str) -> Iterator[tuple[View, str]]:
    yield from _against_baseline(pods)
    if level == "restricted":
        yield from _against_restricted(pods)


def _against_baseline(pods: Pods) -> Iterator[tuple[View, str]]:
    """Yield violations of `baseline`; a separate rule reports hostPath volumes."""
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pods.spec.at(key).value is True:
            yield pods.spec.at(key), f"{key}: true"
    for one in pods.all_containers:
        if one.security.at("privileged").value is True:
            yield one.security.at("privileged"), "privileged: true"
        for added in one.security.at("capabilities", "add").items():
            if added.text() not in PLAIN_CAPABILITIES:
                yield added, f"the capability {added.text()}"
        for port in one.view.at("ports").items():
            if port.whole("hostPort"):
                yield port.at("hostPort"), "a hostPort"
    for security in _contexts(pods):
        profile = security.at("seccompProfile", "type")
        if profile.value == "Unconfined":
            yield profile, "seccompProfile: Unconfined"


def _against_restricted(pods: Pods) -> Iterator[tuple[View, str]]:
    """Yield values that violate only `restricted`."""
    for security in _contexts(pods):
        if security.at("runAsUser").value == 0:
            yield security.at("runAsUser"), "runAsUser: 0"
        if security.at("runAsNonRoot").value is False:
            yield security.at("runAsNonRoot"), "runAsNonRoot: false"
    for one in pods.all_containers:
        escalation = one.security.at("allowPrivilegeEscalation")
        if escalation.value is True:
            yield escalation, "allowPrivilegeEscalation: true"
        for added in one.security.at("capabilities", "add").items():
            if added.text() in PLAIN_CAPABILITIES - {"NET_BIND_SERVICE"}:
                yield added, f"the capability {added.text()}"
    for volume in pods.spec.at("volumes").items():
        for key in ("nfs", "iscsi", "cephfs", "glusterfs", "rbd", "gitRepo", "fc", "flexVolume"):
            if volume.at(key):
                yield volume.at(key), f"a volume of the kind {key}"


def _contexts(pods: Pods) -> list[View]:
    return [pods.spec.at("securityContext"), *(one.security for one in pods.all_containers)]


def _lacking(pods: Pods) -> list[str]:
    """Return the missing fields that `restricted` requires."""
    pod, *own = _contexts(pods)
    seccomp = ("seccompProfile", "type")
    lacks = []
    if not pod.at("runAsNonRoot") and not all(one.at("runAsNonRoot") for one in own):
        lacks.append("runAsNonRoot: true")
    if not pod.at(*seccomp) and not all(one.at(*seccomp) for one in own):
        lacks.append("seccompProfile: {type: RuntimeDefault}")
    if not all(one.at("allowPrivilegeEscalation") for one in own):
        lacks.append("allowPrivilegeEscalation: false in each container")
    if not all("ALL" in one.words("capabilities", "drop") for one in own):
        lacks.append("capabilities: {drop: [ALL]} in each container")
    return lacks


@MANIFESTS.rule(
    "host-path",
    finds="a folder of the node mounted into a pod",
    reason="Pods see the node's files, which may differ from node to node. Pod Security refuses it "
    "except at `privileged`.",
    fix="use a PersistentVolumeClaim",
)
def _host_paths(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        for volume in pods.spec.at("volumes").items():
            path = volume.at("hostPath")
            if path and stream.level_of(pods.owner) != "privileged":
                folder = path.text("path").rstrip("/")
                fix = next((fix for name, fix in _INSTEAD.items() if folder.startswith(name)), None)
                what = f"the node's folder {shown(path.at('path').value)}"
                yield Violation(path, what, fix=fix)


_INSTEAD = {
    "/dev/shm": "use an emptyDir of medium: Memory",
    "/dev/infiniband": "use a device plugin, and ask for its resource (rdma/…)",
    "/dev": "use a device plugin, and ask for its resource",
}


@MANIFESTS.rule(
    "token-mounted",
    finds="training pods that mount the token of their ServiceAccount",
    reason="Training does not call the API, but an intruder in the pod could, with the rights of "
    "the ServiceAccount.",
    fix="write automountServiceAccountToken: false",
)
def _tokens(stream: Stream) -> Iterator[Violation[View]]:
    accounts = {
        account.name: account.view.at("automountServiceAccountToken").value
        for account in stream.of("ServiceAccount")
    }
    starts = {id(launch.pods) for launch in launches(stream)}
    for pods in pods_of(stream):
        trains = pods.role == "node" or pods.kind == "PyTorchJob" or id(pods) in starts
        if not trains:
            continue  # a pod that does not train may need the API
        mounted = pods.spec.at("automountServiceAccountToken")
        account = pods.spec.text("serviceAccountName", default="default")
        if pods.kind == "TrainJob" or mounted.value is False or not pods.spec:
            continue
        if not mounted and accounts.get(account) is False:
            continue
        yield Violation(mounted, f"the token of the ServiceAccount {account!r} is mounted")
