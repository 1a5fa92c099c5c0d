"""Strict validation of Kubernetes objects against the schemas of each of its versions.

The schemas are those of kubernetes-validate, whose own `validate` reads and compiles them anew for
every object: some 0.2 s each.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate.utils import all_versions, major_minor, schema_contents
from referencing import Registry, Resource

__all__ = ["VERSIONS", "faults_of", "folder_of"]

VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))
"""The versions that are served."""


def faults_of(document: Mapping[str, Any], version: str) -> list[str]:
    """Return what a server of a version has against an object, unknown fields included."""
    # networking.k8s.io/v1 is in networking-v1, apps/v1 in apps-v1, v1 in v1.
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", document["apiVersion"])
    errors = _validator(f"{document['kind'].lower()}-{group}", version).iter_errors(document)
    return [f"{version}: {error.message} at {error.json_path}" for error in errors]


@functools.cache
def _validator(name: str, version: str) -> Draft202012Validator:
    folder = folder_of(version)
    schema = schema_contents(f"{folder}/{name}.json", version)
    return Draft202012Validator(
        schema, registry=Resource.from_contents(schema) @ _definitions(folder)
    )


@functools.cache
def _definitions(folder: str) -> "Registry[Any]":
    known = schema_contents(f"{folder}/_definitions.json", "")
    registry: Registry[Any] = Registry()
    return (Resource.from_contents(known) @ registry).crawl()


def folder_of(version: str) -> str:
    """Return where kubernetes-validate keeps the schemas of a version."""
    (exact,) = {known for known in all_versions() if major_minor(known) == version}
    return f"kubernetes-json-schema/v{exact}-local-strict"
