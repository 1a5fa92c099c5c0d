"""Manifests held to the schemas of a cluster's own kinds (CustomResourceDefinitions).

Only OpenAPI parts of a schema are checked; its rules in CEL (x-kubernetes-validations) are for
the server.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import InputError, Problem
from toolkit.lint.manifests.registry import Fault
from toolkit.lint.manifests.rules.schema import near, said
from toolkit.lint.rules import Rule
from toolkit.text.manifests import Stream, View
from toolkit.text.yaml_reader import read_text

__all__ = ["CRD_RULE", "Schemas", "read_schemas", "schema_faults", "schemas_of"]

CRD_RULE = Rule(
    id="crd-schema",
    finds="with `--schemas` or `--server`: what the schema of a kind (CustomResourceDefinition) "
    "does not allow",
    reason="The server refuses it, or drops the field without a word.",
    fix="write what the schema of the cluster's version has",
)

_Schema = Mapping[str, Any]
_TYPES: Mapping[str, tuple[type, ...]] = {
    "array": (tuple,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (Mapping,),
    "string": (str,),
}
_A = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "object": "a mapping",
    "string": "a string",
}
_FILLED = re.compile(r"failurePolicy\.rules\[\d+\]\.name")
"""Fields that a schema requires and an operator's webhook fills in before (JobSet's)."""

_BITS = {"int32": 31, "int64": 63}
_MEANT = "\0"  # separates the fault from the field that is meant
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True, eq=False)
class Schemas:
    """The schemas of a cluster's own kinds."""

    served: Mapping[tuple[str, str, str], _Schema]
    """API group, version and kind: the schema of the whole object."""

    def versions(self, group: str, kind: str) -> list[str]:
        """Return the versions in which a kind is served."""
        return [v for g, v, k in self.served if (g, k) == (group, kind)]


def read_schemas(folder: Path) -> Schemas:
    """Read every CustomResourceDefinition below a folder, as `kubectl get crd -o yaml` prints it.

    Raises:
        InputError: it holds none, or a file of it is no YAML.
    """
    if not folder.is_dir():
        raise InputError([Problem(place=str(folder), message="there is no such folder")])
    objects: list[Any] = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".yaml", ".yml", ".json")):
        try:
            text = read_text(path)
            documents = [json.loads(text)] if path.suffix == ".json" else _documents(text)
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            words = " ".join(str(error).split())
            raise InputError([Problem(place=str(path), message=f"not YAML: {words}")]) from error
        objects += documents
    schemas = schemas_of(objects)
    if not schemas.served:
        what = "holds no CustomResourceDefinition; write them there: kubectl get crd -o yaml"
        raise InputError([Problem(place=str(folder), message=what)])
    return schemas


def _documents(text: str) -> list[Any]:
    return list(yaml.load_all(text, Loader=_LOADER))  # a SafeLoader


def schemas_of(objects: Iterable[Any]) -> Schemas:
    """Return the schemas among objects: CustomResourceDefinitions, and lists of them."""
    served: dict[tuple[str, str, str], _Schema] = {}
    waiting = [*objects][::-1]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        if isinstance(one.get("items"), list):
            waiting += reversed(one["items"])
        spec = one.get("spec")
        if one.get("kind") != "CustomResourceDefinition" or not isinstance(spec, Mapping):
            continue
        for version in spec.get("versions", ()):
            schema = version.get("schema", {}).get("openAPIV3Schema")
            if schema and version.get("served", True):
                served[spec["group"], version["name"], spec["names"]["kind"]] = schema
    return Schemas(served=served)


def schema_faults(stream: Stream, schemas: Schemas) -> Iterator[Fault]:
    """Yield where the objects of a stream are not what their schemas allow."""
    for manifest in stream.manifests:
        written = manifest.view.at("apiVersion")
        version = written.text().rpartition("/")[2]
        versions = schemas.versions(manifest.group, manifest.kind)
        if versions and version not in versions:
            yield Fault(
                at=written,
                what=f"{manifest.kind} is served as {', '.join(versions)}",
                fix=f"write apiVersion: {manifest.group}/{versions[-1]}",
            )
        elif versions:
            schema = schemas.served[manifest.group, version, manifest.kind]
            for at, said_of_it in _object(manifest.view, schema, top=True):
                what, _, meant = said_of_it.partition(_MEANT)
                fix = f"did you mean {meant}?" if meant else None
                yield Fault(at=at, what=what, fix=fix)


_Found = Iterator[tuple[View, str]]


def _value(view: View, schema: _Schema) -> _Found:
    value = view.value
    if value is None:
        return  # null is dropped before the schema is applied
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            yield view, f"{view.where} must be an integer or a string, and is {said(value)}"
            return
    elif wanted := schema.get("type"):
        of_type = isinstance(value, _TYPES.get(wanted, (object,)))
        if not of_type or (isinstance(value, bool) and wanted != "boolean"):
            yield view, f"{view.where} must be {_A.get(wanted, wanted)}, and is {said(value)}"
            return
    yield from _limits(view, schema)
    if isinstance(value, Mapping):
        yield from _object(view, schema)
    elif isinstance(value, tuple):
        yield from _list(view, schema)
    yield from _combined(view, schema)


def _object(view: View, schema: _Schema, *, top: bool = False) -> _Found:
    fields: Mapping[str, _Schema] = schema.get("properties", {})
    others = schema.get("additionalProperties")
    free = schema.get("x-kubernetes-preserve-unknown-fields") or others is True
    own: Sequence[str] = ()
    if top or schema.get("x-kubernetes-embedded-resource"):
        own = ("apiVersion", "kind", "metadata", "status")  # the server knows these itself
    for key, entry in view.entries():
        if key in own:
            continue
        if key in fields:
            yield from _value(entry, fields[key])
        elif isinstance(others, Mapping):
            yield from _value(entry, others)
        elif not free and (fields or schema.get("type") == "object") and others is None:
            meant = near(key, fields)
            hint = f"{_MEANT}{meant!r}" if meant else ""
            yield entry, f"{entry.where}: the schema has no such field{hint}"
    for key in schema.get("required", ()):
        lack = view.at(key)
        filled = "default" in fields.get(key, {}) or _FILLED.search(lack.where)
        if lack.value is None and not filled:
            yield lack, f"{lack.where} is missing"


def _list(view: View, schema: _Schema) -> _Found:
    items = schema.get("items", {})
    for item in view.items():
        yield from _value(item, items)
    kind = schema.get("x-kubernetes-list-type")
    keys = schema.get("x-kubernetes-list-map-keys", ())
    seen = set()
    for item in view.items() if kind in ("map", "set") else ():
        defaults = items.get("properties", {})
        key = (
            tuple(
                repr(item.at(k).value if item.at(k) else defaults.get(k, {}).get("default"))
                for k in keys
            )
            if kind == "map"
            else (repr(item.value),)
        )
        if key in seen:
            yield item, f"{item.where} stands twice in the list: {', '.join(key)}"
        seen.add(key)


def _limits(view: View, schema: _Schema) -> _Found:
    """Yield violations of the limits of a single value."""
    value, where = view.value, view.where
    if "enum" in schema and value not in schema["enum"]:
        choices = ", ".join(map(str, filter(None, schema["enum"])))
        yield view, f"{where}: {said(value)} is none of {choices}"
    if isinstance(value, str) and (pattern := schema.get("pattern")):
        try:
            matches = re.search(pattern, value) is not None
        except re.error:
            matches = True  # Go's syntax, which Python does not know
        if not matches:
            yield view, f"{where}: {said(value)} is not like {pattern}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        least, most = schema.get("minimum"), schema.get("maximum")
        if bits := _BITS.get(schema.get("format", "")):
            least = -(2**bits) if least is None else least
            most = 2**bits - 1 if most is None else most
        if least is not None and value < least:
            yield view, f"{where}: {value} is less than {least}"
        if most is not None and value > most:
            yield view, f"{where}: {value} is more than {most}"
    for kind, unit, low, high in _SIZES:
        if isinstance(value, kind) and not len(value) >= schema.get(low, 0):
            yield view, f"{where} has {len(value)} {unit}; it must have {schema[low]}"
        if isinstance(value, kind) and high in schema and len(value) > schema[high]:
            yield view, f"{where} has {len(value)} {unit}; it may have {schema[high]}"


_SIZES = (
    (str, "characters", "minLength", "maxLength"),
    (tuple, "items", "minItems", "maxItems"),
    (Mapping, "keys", "minProperties", "maxProperties"),
)


def _combined(view: View, schema: _Schema) -> _Found:
    """Yield violations of anyOf, oneOf, allOf and not, whose parts mean little by themselves."""
    if schema.get("x-kubernetes-int-or-string"):
        return  # its anyOf is the same condition
    for part in schema.get("allOf", ()):
        yield from _part(view, part)
    fits = [not any(_part(view, part)) for part in schema.get("anyOf", ())]
    if fits and not any(fits):
        yield view, f"{view.where}: {said(view.value)} is none of what the schema allows there"
    fits = [not any(_part(view, part)) for part in schema.get("oneOf", ())]
    if fits and sum(fits) != 1:
        yield view, f"{view.where}: the schema allows one of {len(fits)} forms; {sum(fits)} fit"
    if "not" in schema and not any(_part(view, schema["not"])):
        yield view, f"{view.where}: {said(view.value)} is what the schema forbids"


def _part(view: View, schema: _Schema) -> _Found:
    """Return violations of a part of a schema that does not list all fields."""
    return _value(view, {"x-kubernetes-preserve-unknown-fields": True, **schema})
