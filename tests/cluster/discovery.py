"""What a client asks first: which groups, versions and resources there are."""

import re
from collections.abc import Set

from tests.cluster.resources import RESOURCES, Resource
from tests.cluster.wire import Object

__all__ = ["discover"]

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def discover(path: str, missing: Set[str]) -> Object | None:
    """Answer a question about the API itself, or None where it is another one."""
    groups: dict[str, tuple[str, ...]] = {
        r.group: r.versions for r in RESOURCES if r.group and r.group not in missing
    }
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0-fake", "platform": "test"}
    if path in ("/healthz", "/readyz", "/livez"):
        return {"status": "ok"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [_group(name, versions) for name, versions in groups.items()],
        }
    if path == "/api/v1":
        return _resources("v1", [r for r in RESOURCES if not r.group])
    if (match := re.fullmatch(r"/apis/([^/]+)(?:/([^/]+))?", path)) and match[1] in groups:
        group, version = match.groups()
        if version is None:
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(group, groups[group])}
        if version in groups[group]:
            there = [r for r in RESOURCES if r.group == group]
            return _resources(f"{group}/{version}", there)
    return None


def _group(name: str, versions: tuple[str, ...]) -> Object:
    named = [{"groupVersion": f"{name}/{v}", "version": v} for v in versions]
    return {"name": name, "versions": named, "preferredVersion": named[0]}


def _resources(version: str, there: list[Resource]) -> Object:
    found: list[Object] = []
    for one in there:
        entry: Object = {
            "name": one.plural,
            "singularName": one.kind.lower(),
            "namespaced": one.namespaced,
            "kind": one.kind,
            "verbs": VERBS,
            "shortNames": list(one.short),
        }
        found.append(entry)
        for sub in ("status",) * one.status + ("log",) * (one.kind == "Pod"):
            found.append(entry | {"name": f"{one.plural}/{sub}", "verbs": ["get", "patch"]})
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": found,
    }
