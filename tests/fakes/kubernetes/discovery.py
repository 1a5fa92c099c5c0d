"""Discovery: the groups, versions and resources that the server serves."""

import re
from collections.abc import Set

from tests.fakes.kubernetes.resources import RESOURCES, Resource
from tests.fakes.kubernetes.wire import Object

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
    if path == "/openapi/v3":
        names = ["api/v1", *(f"apis/{g}/{v}" for g, found in groups.items() for v in found)]
        return {"paths": {one: {"serverRelativeURL": f"/openapi/v3/{one}"} for one in names}}
    if path.startswith("/openapi/v3/"):
        return _openapi(path.removeprefix("/openapi/v3/"))
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


def _openapi(prefix: str) -> Object:
    """Return the OpenAPI document in which kubectl looks for `fieldValidation` before it
    applies."""
    group, _, version = prefix.removeprefix("api/").removeprefix("apis/").rpartition("/")
    paths: Object = {}
    for one in RESOURCES:
        if one.group == group and version in one.versions:
            space = "namespaces/{namespace}/" if one.namespaced else ""
            said = {
                "parameters": [{"name": "fieldValidation", "in": "query"}],
                "responses": {"200": {"description": "OK"}},
                "x-kubernetes-group-version-kind": {
                    "group": group,
                    "version": version,
                    "kind": one.kind,
                },
            }
            paths[f"/{prefix}/{space}{one.plural}/{{name}}"] = {"patch": said}
    info = {"title": "a cluster for tests", "version": "1"}
    return {"openapi": "3.0.0", "info": info, "paths": paths}


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
