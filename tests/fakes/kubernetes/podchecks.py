"""What the API server refuses of a pod's spec (k8s.io/kubernetes, pkg/apis/core/validation).

Operators' webhooks do not look at these; a template of theirs that is wrong fails as a pod.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.fakes.kubernetes.wire import Object

__all__ = ["DNS_1035", "is_dns_label", "is_dns_subdomain", "pod_problems", "security_problems"]

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+|[KMGTPE]i|[numkMGTPE]?)")
_VARIABLE = re.compile(r"[ -<>-~]+")

_ENUMS: dict[str, tuple[str, ...]] = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "dnsPolicy": ("ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"),
}
_CONTAINER_ENUMS: dict[str, tuple[str, ...]] = {
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
}


def is_dns_label(name: str) -> bool:
    """Whether a name is an RFC 1123 label."""
    return len(name) <= 63 and _LABEL.fullmatch(name) is not None


def is_dns_subdomain(name: str) -> bool:
    """Whether a name is an RFC 1123 subdomain."""
    return len(name) <= 253 and all(_LABEL.fullmatch(part) for part in name.split("."))


def pod_problems(template: Mapping[str, Any], path: str = "spec") -> Iterator[str]:
    """Yield the problems of a pod's metadata and spec."""
    for key, value in ((template.get("metadata") or {}).get("labels") or {}).items():
        if not _VALUE.fullmatch(value):
            yield f'metadata.labels: Invalid value: "{value}": a valid label must be ... ({key})'
    spec = template["spec"]
    for key, values in _ENUMS.items():
        yield from _enum(spec, key, values, path)
    for key in ("subdomain", "hostname"):
        if spec.get(key) and not is_dns_label(spec[key]):
            yield f'{path}.{key}: Invalid value: "{spec[key]}": a lowercase RFC 1123 label'
    volumes = [volume["name"] for volume in spec.get("volumes") or ()]
    yield from _twins(volumes, f"{path}.volumes", "name")
    for index, volume in enumerate(spec.get("volumes") or ()):
        if not is_dns_label(volume["name"]):
            yield f'{path}.volumes[{index}].name: Invalid value: "{volume["name"]}"'
        if len(volume) != 2:
            yield f"{path}.volumes[{index}]: Required value: must specify a volume type"
    if not spec.get("containers"):
        yield f"{path}.containers: Required value"
    names = [c["name"] for c in spec.get("containers") or ()]
    yield from _twins(names, f"{path}.containers", "name")
    for index, container in enumerate(spec.get("containers") or ()):
        yield from _container(container, volumes, f"{path}.containers[{index}]")
    for index, one in enumerate(spec.get("tolerations") or ()):
        if one.get("operator") == "Exists" and one.get("value"):
            where = f"{path}.tolerations[{index}].operator"
            yield f"{where}: Invalid value: value must be empty when `operator` is 'Exists'"
        if not one.get("key") and one.get("operator") != "Exists":
            where = f"{path}.tolerations[{index}].operator"
            yield f"{where}: Invalid value: operator must be Exists when `key` is empty"


def _container(container: Object, volumes: list[str], path: str) -> Iterator[str]:
    if not is_dns_label(container["name"]):
        yield f'{path}.name: Invalid value: "{container["name"]}"'
    if not container.get("image"):
        yield f"{path}.image: Required value"
    for key, values in _CONTAINER_ENUMS.items():
        yield from _enum(container, key, values, path)
    for index, variable in enumerate(container.get("env") or ()):
        if not _VARIABLE.fullmatch(variable["name"]):
            yield f'{path}.env[{index}].name: Invalid value: "{variable["name"]}"'
        if variable.get("value") and variable.get("valueFrom"):
            yield f"{path}.env[{index}].valueFrom: Invalid value: may not be specified with value"
    mounts = container.get("volumeMounts") or ()
    yield from _twins([m["mountPath"] for m in mounts], f"{path}.volumeMounts", "mountPath")
    for index, mount in enumerate(mounts):
        if mount["name"] not in volumes:
            yield f'{path}.volumeMounts[{index}].name: Not found: "{mount["name"]}"'
    requests = (container.get("resources") or {}).get("requests") or {}
    limits = (container.get("resources") or {}).get("limits") or {}
    for what, found in (("requests", requests), ("limits", limits)):
        for name, value in found.items():
            if not _QUANTITY.fullmatch(str(value)):
                yield f'{path}.resources.{what}[{name}]: Invalid value: "{value}": quantities must'
    for name in {*requests, *limits}:
        extended = "/" in name and not name.startswith("kubernetes.io/")
        if extended and requests.get(name, limits.get(name)) != limits.get(name):
            yield f"{path}.resources.requests: Invalid value: must be equal to {name} limit"


def _enum(thing: Object, key: str, values: tuple[str, ...], path: str) -> Iterator[str]:
    if thing.get(key) is not None and thing[key] not in values:
        known = ", ".join(f'"{one}"' for one in values)
        yield f'{path}.{key}: Unsupported value: "{thing[key]}": supported values: {known}'


def _twins(names: list[str], path: str, key: str) -> Iterator[str]:
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f'{path}[{index}].{key}: Duplicate value: "{name}"'


def security_problems(spec: Mapping[str, Any]) -> list[str]:
    """Return why Pod Security "restricted" refuses a pod."""
    found, pod = [], spec.get("securityContext") or {}
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            found.append(f"host namespaces ({key}=true)")
    for volume in spec.get("volumes") or ():
        if "hostPath" in volume or "nfs" in volume:
            kind = "hostPath" if "hostPath" in volume else "nfs"
            found.append(f'restricted volume types (volume "{volume["name"]}" uses {kind})')
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        mine, name = container.get("securityContext") or {}, f'container "{container["name"]}"'
        capabilities = mine.get("capabilities") or {}
        if mine.get("allowPrivilegeEscalation") is not False:
            what = "must set securityContext.allowPrivilegeEscalation=false"
            found.append(f"allowPrivilegeEscalation != false ({name} {what})")
        if "ALL" not in (capabilities.get("drop") or ()):
            what = 'must set securityContext.capabilities.drop=["ALL"]'
            found.append(f"unrestricted capabilities ({name} {what})")
        if added := [c for c in capabilities.get("add") or () if c != "NET_BIND_SERVICE"]:
            found.append(f"unrestricted capabilities ({name} must not include {added})")
        if mine.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
            found.append(f"runAsNonRoot != true (pod or {name} must set it)")
        if mine.get("runAsUser", pod.get("runAsUser")) == 0:
            found.append(f"runAsUser=0 (pod or {name} must not set runAsUser=0)")
        profile = mine.get("seccompProfile") or pod.get("seccompProfile") or {}
        if profile.get("type") not in ("RuntimeDefault", "Localhost"):
            found.append(f"seccompProfile (pod or {name} must set securityContext.seccompProfile)")
    return found
