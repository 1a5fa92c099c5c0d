"""Rules about the structure of manifests: versions, fields, types, enums, quantities.

The schemas of Kubernetes and of the operators are data, in `schemas.json` (Kubernetes 1.37,
Training Operator 1.9, Trainer 2.3, JobSet 0.12, Volcano 1.12, scheduler-plugins 0.31). The first
check of a manifest loads this file. Custom kinds of a cluster are checked against the schemas of
their CustomResourceDefinitions. Only the OpenAPI parts of a schema are checked; the server checks
the CEL rules (x-kubernetes-validations).
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import InputError, nearest
from toolkit.lint.rulebook import MANIFESTS, Rule, Violation
from toolkit.text.manifests import Manifest, Stream, View
from toolkit.text.quantities import amount
from toolkit.text.yaml_reader import documents_of, read_text

CRD_RULE = Rule(
    id="crd-schema",
    finds="with `--schemas` or `--server`: a field or value that the schema of a kind "
    "(CustomResourceDefinition) does not allow",
    reason="The server refuses the object, or silently drops the field.",
    fix="write what the schema of the cluster's version has",
)

_Schema = Mapping[str, Any]
_PACKAGED = Path(__file__).parents[1] / "schemas.json"

_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "array": ((tuple,), "a list"),
    "boolean": ((bool,), "true or false"),
    "integer": ((int,), "an integer"),
    "number": ((int, float), "a number"),
    "object": ((Mapping,), "a mapping"),
    "string": ((str,), "a string"),
}
_SIZES = (
    (str, "characters", "minLength", "maxLength"),
    (tuple, "items", "minItems", "maxItems"),
    (Mapping, "keys", "minProperties", "maxProperties"),
)
_BITS = {"int32": 31, "int64": 63}
_FILLED = re.compile(r"failurePolicy\.rules\[\d+\]\.name")
"""Required fields that an operator's webhook fills in before validation (JobSet)."""

_SHOWN = 60


def shown(value: Any) -> str:
    """Return a short YAML form of a value for a message.

    >>> shown(True), shown(None), shown(3), shown("a"), shown({"a": 1})
    ('true', 'null', '3', "'a'", 'a mapping')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, tuple):
        return "a list"
    if isinstance(value, str):
        text = str(value)
        return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
    return str(value)


# ---- Schemas


@dataclass(frozen=True, kw_only=True, eq=False)
class Schemas:
    """The schemas of some kinds."""

    served: Mapping[tuple[str, str, str], _Schema]
    """Object schemas by API group, version and kind."""

    definitions: Mapping[str, _Schema]
    """The definitions for `$ref`, by name; empty for CustomResourceDefinitions."""

    def versions(self, group: str, kind: str) -> list[str]:
        """Return the served versions of a kind."""
        return [v for g, v, k in self.served if (g, k) == (group, kind)]


@functools.cache
def _packaged() -> Schemas:
    data = json.loads(_PACKAGED.read_text(encoding="utf-8"))
    served = {}
    for name, definition in data["kinds"].items():
        group, version, kind = name.split("/")
        served[group, version, kind] = data["$defs"][definition]
    return Schemas(served=served, definitions=data["$defs"])


def read_schemas(folder: Path) -> Schemas:
    """Read every CustomResourceDefinition below a folder, as printed by `kubectl get crd -o yaml`.

    Raises:
        InputError: the folder contains none, or one of its files is not YAML.
    """
    if not folder.is_dir():
        raise InputError("there is no such folder", place=str(folder))
    objects: list[Any] = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".yaml", ".yml", ".json")):
        try:
            text = read_text(path)
            is_json = path.suffix == ".json"
            objects += [json.loads(text)] if is_json else documents_of(text)
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            words = " ".join(str(error).split())
            raise InputError(f"not YAML: {words}", place=str(path)) from error
    schemas = schemas_of(objects)
    if not schemas.served:
        what = "holds no CustomResourceDefinition; write them there: kubectl get crd -o yaml"
        raise InputError(what, place=str(folder))
    return schemas


def schemas_of(objects: Iterable[Any]) -> Schemas:
    """Return the schemas of all CustomResourceDefinitions in objects and lists of objects."""
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
    return Schemas(served=served, definitions={})


# ---- Schema validation


@dataclass(frozen=True)
class _Mismatch(Violation[View]):
    """A value that a schema does not allow."""

    rule: str = ""
    """The rule that reports a mismatch with a packaged schema."""


_Mismatches = Iterator[_Mismatch]


class _Checker:
    def __init__(self, schemas: Schemas, author: str) -> None:
        self.definitions = schemas.definitions
        self.author = author
        """The kind and its API as shown in messages, such as `Job of Kubernetes 1.37`."""

    def value(self, view: View, schema: _Schema) -> _Mismatches:
        value = view.value
        if value is None:
            return  # the server drops null values
        if reference := schema.get("$ref"):
            schema = self.definitions[reference.rpartition("/")[2]]
        if expected := _expected(value, schema):
            quotable = schema.get("type") == "string" and not isinstance(value, (Mapping, tuple))
            way_out = 'write it in "quotes"' if quotable and "enum" not in schema else None
            yield _wrong_type(view, expected, way_out)
            return
        yield from _scalar(view, schema)
        if isinstance(value, Mapping):
            yield from self.fields(view, schema)
        elif isinstance(value, tuple):
            yield from self.items(view, schema)
        for kind, unit, low, high in _SIZES:
            if isinstance(value, kind) and not len(value) >= schema.get(low, 0):
                what = f"{view.where} has {len(value)} {unit}; it must have {schema[low]}"
                yield _Mismatch(view, what)
            if isinstance(value, kind) and high in schema and len(value) > schema[high]:
                what = f"{view.where} has {len(value)} {unit}; it may have {schema[high]}"
                yield _Mismatch(view, what)
        if not schema.get("x-kubernetes-int-or-string"):  # its anyOf repeats the type check
            yield from self.combined(view, schema)

    def fields(self, view: View, schema: _Schema, *, own: Sequence[str] = ()) -> _Mismatches:
        """Yield the mismatches of a mapping; the server itself defines the fields `own`."""
        fields: Mapping[str, _Schema] = schema.get("properties", {})
        others = schema.get("additionalProperties")
        free = schema.get("x-kubernetes-preserve-unknown-fields") or others is True
        if schema.get("x-kubernetes-embedded-resource"):
            own = _OWN
        for key, entry in view.entries():
            if key in own:
                continue
            if key in fields:
                yield from self.value(entry, fields[key])
            elif isinstance(others, Mapping):
                yield from self.value(entry, others)
            elif not free and (fields or schema.get("type") == "object") and others is None:
                lower = {name.lower(): name for name in fields}
                meant = nearest(key.lower(), lower, cutoff=0.75)
                what = f"{entry.where}: {self.author} has no such field"
                way_out = f"did you mean {lower[meant]!r}?" if meant else None
                yield _Mismatch(entry, what, "field-unknown", fix=way_out)
        for key in schema.get("required", ()):
            lack = view.at(key)
            filled = "default" in fields.get(key, {}) or _FILLED.search(lack.where)
            if lack.value is None and not filled:
                yield _Mismatch(lack, f"{lack.where} is missing", "field-missing")

    def items(self, view: View, schema: _Schema) -> _Mismatches:
        items = schema.get("items", {})
        for item in view.items():
            if item.value is None and items and not items.get("nullable"):
                yield _wrong_type(item, "no item of a list")
            yield from self.value(item, items)
        kind = schema.get("x-kubernetes-list-type")
        names = schema.get("x-kubernetes-list-map-keys", ())
        defaults = items.get("properties", {})
        seen = set()
        for item in view.items() if kind in ("map", "set") else ():
            entries = [(item.at(name).value, defaults.get(name, {})) for name in names]
            values = [other.get("default") if one is None else one for one, other in entries]
            key = tuple(map(repr, values)) if kind == "map" else (repr(item.value),)
            if key in seen:
                yield _Mismatch(item, f"{item.where} is in the list twice: {', '.join(key)}")
            seen.add(key)

    def combined(self, view: View, schema: _Schema) -> _Mismatches:
        """Yield violations of allOf, anyOf, oneOf and not."""

        def part(schema: _Schema) -> _Mismatches:  # a part need not list all fields
            return self.value(view, {"x-kubernetes-preserve-unknown-fields": True, **schema})

        where, value = view.where, shown(view.value)
        for one in schema.get("allOf", ()):
            yield from part(one)
        fits = [not any(part(one)) for one in schema.get("anyOf", ())]
        if fits and not any(fits):
            yield _Mismatch(view, f"{where}: {value} is none of what the schema allows there")
        fits = [not any(part(one)) for one in schema.get("oneOf", ())]
        if fits and sum(fits) != 1:
            what = f"{where}: the schema allows one of {len(fits)} forms; {sum(fits)} fit"
            yield _Mismatch(view, what)
        if "not" in schema and not any(part(schema["not"])):
            yield _Mismatch(view, f"{where}: {value} is what the schema forbids")


_OWN = ("apiVersion", "kind", "metadata", "status")


def _expected(value: Any, schema: _Schema) -> str | None:
    """Return the expected type in words; None if the value fits."""
    plain = isinstance(value, (int, str)) and not isinstance(value, bool)
    if schema.get("format") == "quantity":
        return None if plain or isinstance(value, float) else "a quantity"
    if schema.get("x-kubernetes-int-or-string"):
        return None if plain else "an integer or a string"
    name = schema.get("type", "")
    if name not in _TYPES:
        return None
    types, words = _TYPES[name]
    fits = isinstance(value, types) and (name == "boolean" or not isinstance(value, bool))
    if fits and not ("minimum" in schema and value < schema["minimum"]):
        return None
    if "enum" in schema:
        return f"one of {', '.join(map(str, filter(None, schema['enum'])))}"
    return f"{words} from {schema['minimum']} on" if "minimum" in schema else words


def _wrong_type(view: View, expected: str, way_out: str | None = None) -> _Mismatch:
    what = f"{view.where} must be {expected}, and is {shown(view.value)}"
    return _Mismatch(view, what, "field-type", fix=way_out)


def _scalar(view: View, schema: _Schema) -> _Mismatches:
    """Yield violations of scalar constraints."""
    value, where = view.value, view.where
    if schema.get("format") == "quantity" and amount(value) is None:
        yield _Mismatch(view, f"{where}: {shown(value)} is not a quantity", "quantity-malformed")
    if "enum" in schema and value not in schema["enum"]:
        words = [str(word) for word in schema["enum"]]
        choice = f"write one of {', '.join(filter(None, words))}"
        meant = nearest(str(value), words)
        way_out = f"did you mean {meant!r}? {choice}" if meant else choice
        yield _Mismatch(view, f"{where}: {shown(value)} means nothing", "field-word", fix=way_out)
    if isinstance(value, str) and (pattern := schema.get("pattern")):
        try:
            matches = re.search(pattern, value) is not None
        except re.error:
            matches = True  # Go syntax that Python does not support
        if not matches:
            yield _Mismatch(view, f"{where}: {shown(value)} is not like {pattern}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        bits = _BITS.get(schema.get("format", ""))
        most = schema.get("maximum", 2**bits - 1 if bits else None)
        if bits and value < -(2**bits):
            yield _Mismatch(view, f"{where}: {value} is less than {-(2**bits)}")
        if most is not None and value > most:
            yield _Mismatch(view, f"{where}: {value} is more than {most}")


def schema_violations(stream: Stream, schemas: Schemas) -> Iterator[Violation[View]]:
    """Yield the values that violate the schemas of a cluster's custom kinds."""
    checker = _Checker(schemas, "the schema")
    for manifest in stream.manifests:
        written = manifest.view.at("apiVersion")
        version = written.text().rpartition("/")[2]
        versions = schemas.versions(manifest.group, manifest.kind)
        if versions and version not in versions:
            what = f"{manifest.kind} is served as {', '.join(versions)}"
            yield Violation(written, what, fix=f"write apiVersion: {manifest.group}/{versions[-1]}")
        elif versions:
            schema = schemas.served[manifest.group, version, manifest.kind]
            yield from checker.fields(manifest.view, schema, own=_OWN)


# ---- The rules


@functools.lru_cache(maxsize=1)
def _mismatches(stream: Stream) -> tuple[_Mismatch, ...]:
    """Return the values in a stream that do not match the API schemas."""
    packaged = _packaged()
    served = {(group, kind): schema for (group, _, kind), schema in packaged.served.items()}
    return tuple(
        mismatch
        for manifest in stream.manifests
        for mismatch in _Checker(packaged, _author(manifest)).value(
            manifest.view, served.get((manifest.group, manifest.kind), {})
        )
    )


_AUTHORS = {
    "kubeflow.org": "Training Operator 1.9",
    "trainer.kubeflow.org": "Trainer 2.3",
    "jobset.x-k8s.io": "JobSet 0.12",
    "scheduling.volcano.sh": "Volcano 1.12",
    "scheduling.x-k8s.io": "scheduler-plugins 0.31",
}


def _author(manifest: Manifest) -> str:
    """Return the kind and its API as shown in messages."""
    return f"{manifest.kind} of {_AUTHORS.get(manifest.group, 'Kubernetes 1.37')}"


def is_known(manifest: Manifest, schemas: Schemas | None = None) -> bool:
    """Whether a schema checks the fields of an object."""
    kinds = {
        (group, kind)
        for group, _, kind in (*_packaged().served, *(schemas.served if schemas else ()))
    }
    return (manifest.group, manifest.kind) in kinds


@MANIFESTS.rule(
    "api-version",
    finds="a kind in an API version that is not served",
    reason='kubectl reports "no matches for kind".',
    fix="write the version that the cluster serves: kubectl api-resources",
)
def _versions(stream: Stream) -> Iterator[Violation[View]]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for group, version, kind in _packaged().served:
        groups.setdefault(kind, []).append((group, version))
    for manifest in stream.manifests:
        written = manifest.view.at("apiVersion")
        group, _, version = str(written.value).rpartition("/")
        for api_version, served in groups.get(manifest.kind, ()):
            if (group == api_version and version != served) or (manifest.kind, group) in _MOVED:
                way_out = f"{api_version}/{served}".lstrip("/")
                yield Violation(
                    written,
                    f"{manifest.kind} is not served as {written.value}",
                    fix=f"write apiVersion: {way_out}",
                )
                break


_MOVED = {
    ("Job", ""),
    ("JobSet", "batch"),
    ("NetworkPolicy", "extensions"),
    ("Pod", "batch"),
    ("PyTorchJob", ""),
    ("PyTorchJob", "batch"),
    ("PyTorchJob", "trainer.kubeflow.org"),
    ("TrainJob", ""),
    ("TrainJob", "kubeflow.org"),
    ("TrainingRuntime", "kubeflow.org"),
    ("Service", "batch"),
}
"""Kinds, each with an API group that does not serve it but is often written."""


def _form_rule(id: str, *, finds: str, reason: str, fix: str) -> None:
    """Register a rule that reports the mismatches with its id."""

    @MANIFESTS.rule(id, finds=finds, reason=reason, fix=fix)
    def check(stream: Stream) -> Iterator[Violation[View]]:
        return (mismatch for mismatch in _mismatches(stream) if mismatch.rule == id)


_form_rule(
    "field-unknown",
    finds="a field that the API does not have",
    reason="kubectl refuses it. With other clients, the server silently drops it, or leaves the "
    "object with no status.",
    fix="correct its name, or its place",
)
_form_rule(
    "field-missing",
    finds="an object without a required field",
    reason="The server refuses it.",
    fix="write it",
)
_form_rule(
    "field-type",
    finds="a value of the wrong type: a number or yes for a string",
    reason="The server refuses it: in YAML, numbers and yes, no, on, off are not strings.",
    fix="write it as the API wants it",
)
_form_rule(
    "field-word",
    finds="a value that the field does not allow (restartPolicy, effect, operator …)",
    reason="Kubernetes refuses it where it checks. The webhook of Training Operator 1.9 "
    "accepts any word: with another restartPolicy or dnsPolicy the job creates no pods, and with "
    "another cleanPodPolicy its end deletes all pods and their logs.",
    fix="write one that there is",
)
_form_rule(
    "quantity-malformed",
    finds="a malformed amount of CPU, memory or a device",
    reason="The server refuses it: units are Ki, Mi, Gi, Ti … (of 1024), k, M, G, T … (of 1000) "
    "and m (thousandths), without a space.",
    fix="write it like 500m, 64Gi or 8",
)
