"""Rules about the form of manifests: versions, fields, types, fixed words, quantities; CRDs."""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from toolkit.errors import InputError, Problem
from toolkit.lint.manifests.fields import KINDS, fields_of
from toolkit.lint.registry import MANIFESTS, Rule, Violation
from toolkit.text.did_you_mean import nearest
from toolkit.text.manifests import Manifest, Stream, View
from toolkit.text.quantities import amount
from toolkit.text.yaml_reader import read_text

__all__ = [
    "CRD_RULE",
    "Schemas",
    "mismatches",
    "near",
    "read_schemas",
    "said",
    "schema_violations",
    "schemas_of",
]

_NAMES = {
    "bool": "true or false",
    "int": "an integer",
    "nat": "an integer from 0 on",
    "port": "a port's number or name",
    "pos": "an integer from 1 on",
    "quantity": "a quantity",
    "str": "a string",
}
_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A value that is not what the API holds at its place."""

    kind: Literal["unknown", "missing", "type", "enum", "quantity"]
    at: View
    what: str
    way_out: str | None = None


def said(value: Any) -> str:
    """Return a value for a message: short, and as YAML writes it.

    >>> said(True), said(None), said(3), said("a"), said({"a": 1})
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


@functools.lru_cache(maxsize=1)
def mismatches(stream: Stream) -> tuple[Mismatch, ...]:
    """Return where the objects of a stream are not what the API holds."""
    collected: list[Mismatch] = []
    for manifest in stream.manifests:
        if served := _served(manifest):
            collected += _of_shape(manifest.view, served[1])
    return tuple(collected)


def _served(manifest: Manifest) -> tuple[str, str] | None:
    return KINDS.get((manifest.group, manifest.kind))


def _of_value(view: View, type: str) -> Iterator[Mismatch]:
    value = view.value
    if value is None or type == "any":
        return  # null is the lack of a value, which a server drops
    if type.startswith("["):
        if not isinstance(value, tuple):
            yield _wrong(view, "a list")
        for item in view.items():
            if item.value is None:
                yield _wrong(item, "no item of a list")
            yield from _of_value(item, type[1:-1])
    elif type.startswith("{"):
        if not isinstance(value, Mapping):
            yield _wrong(view, "a mapping")
        for _, entry in view.entries():
            yield from _of_value(entry, type[1:-1])
    elif fields_of(type) is not None:
        yield from _of_shape(view, type)
    elif type in _NAMES:
        yield from _of_scalar(view, type)
    else:
        yield from _of_words(view, [word.replace("~", "") for word in type.split("|")])


def _of_shape(view: View, type: str) -> Iterator[Mismatch]:
    fields = fields_of(type) or {}
    if not isinstance(view.value, Mapping):
        yield _wrong(view, "a mapping")
        return
    for key, entry in view.entries():
        if (field_type := fields.get(key)) is None:
            meant = near(key, fields)
            yield Mismatch(
                kind="unknown",
                at=entry,
                what=f"{entry.where}: the API has no such field",
                way_out=f"did you mean {meant!r}?" if meant else None,
            )
        else:
            yield from _of_value(entry, field_type.type)
    for key, field in fields.items():
        if field.required and view.at(key).value is None:
            lack = view.at(key)
            yield Mismatch(kind="missing", at=lack, what=f"{lack.where} is missing")


def near(key: str, fields: Iterable[str]) -> str | None:
    """Return the field that is meant, if one is nearly called so."""
    lower = {name.lower(): name for name in fields}
    meant = nearest(key.lower(), lower, cutoff=0.75)
    return lower[meant] if meant else None


def _of_scalar(view: View, type: str) -> Iterator[Mismatch]:
    value = view.value
    number = isinstance(value, int) and not isinstance(value, bool)
    if type == "quantity":
        if isinstance(value, (Mapping, tuple, bool)):
            yield _wrong(view, _NAMES[type])
        elif amount(value) is None:
            yield Mismatch(
                kind="quantity", at=view, what=f"{view.where}: {said(value)} is no quantity"
            )
        return
    fits = {
        "bool": isinstance(value, bool),
        "int": number,
        "nat": number and value >= 0,
        "pos": number and value >= 1,
        "port": number or isinstance(value, str),
        "str": isinstance(value, str),
    }[type]
    if not fits:
        quoted = type == "str" and not isinstance(value, (Mapping, tuple))
        yield _wrong(view, _NAMES[type], way_out='write it in "quotes"' if quoted else None)


def _of_words(view: View, words: list[str]) -> Iterator[Mismatch]:
    value = view.value
    if not isinstance(value, str):
        yield _wrong(view, f"one of {', '.join(filter(None, words))}")
    elif value not in words:
        meant = nearest(value, words)
        choice = f"write one of {', '.join(filter(None, words))}"
        yield Mismatch(
            kind="enum",
            at=view,
            what=f"{view.where}: {said(value)} means nothing",
            way_out=f"did you mean {meant!r}? {choice}" if meant else choice,
        )


def _wrong(view: View, wanted: str, *, way_out: str | None = None) -> Mismatch:
    what = f"{view.where} must be {wanted}, and is {said(view.value)}"
    return Mismatch(kind="type", at=view, what=what, way_out=way_out)


def _mismatched(stream: Stream, kind: str) -> Iterator[Violation[View]]:
    for one in mismatches(stream):
        if one.kind == kind:
            yield Violation(one.at, one.what, fix=one.way_out)


# ---- The rules


@MANIFESTS.rule(
    "api-version",
    finds="a kind in a version of its API that is not served",
    reason='The server answers "no matches for kind".',
    fix="write the version that the cluster serves: kubectl api-resources",
)
def _versions(stream: Stream) -> Iterator[Violation[View]]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for (group, kind), (version, _) in KINDS.items():
        groups.setdefault(kind, []).append((group, version))
    for manifest in stream.manifests:
        written = manifest.view.at("apiVersion")
        group, _, version = str(written.value).rpartition("/")
        for api_version, served in groups.get(manifest.kind, ()):
            moved = (manifest.kind, group) in _MOVED
            if (group == api_version and version != served) or moved:
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
"""Kinds and groups that they are looked for in, and are not."""


@MANIFESTS.rule(
    "field-unknown",
    finds="a field that the API does not have",
    reason="kubectl refuses it; other clients send it, and the server drops it without a word, or "
    "leaves the object with no status.",
    fix="correct its name, or its place",
)
def _unknown(stream: Stream) -> Iterator[Violation[View]]:
    return _mismatched(stream, "unknown")


@MANIFESTS.rule(
    "field-missing",
    finds="an object without a field that it must have",
    reason="The server refuses it.",
    fix="write it",
)
def _missing(stream: Stream) -> Iterator[Violation[View]]:
    return _mismatched(stream, "missing")


@MANIFESTS.rule(
    "field-type",
    finds="a value of another type than the API's: a number for a string, yes for true",
    reason="The server refuses it; numbers and yes, no, on, off in YAML are no strings.",
    fix="write it as the API wants it",
)
def _types(stream: Stream) -> Iterator[Violation[View]]:
    return _mismatched(stream, "type")


@MANIFESTS.rule(
    "field-word",
    finds="a word that is none of those that the field knows (restartPolicy, effect, operator …)",
    reason="Kubernetes refuses it where it checks; the Training Operator's webhook takes any "
    "restartPolicy, cleanPodPolicy or dnsPolicy, and the job makes no pods, or never ends "
    "(Training Operator 1.9).",
    fix="write one that there is",
)
def _words(stream: Stream) -> Iterator[Violation[View]]:
    return _mismatched(stream, "enum")


@MANIFESTS.rule(
    "quantity-malformed",
    finds="an amount of CPU, memory or a device that is no quantity",
    reason="The server refuses it: units are Ki, Mi, Gi, Ti (of 1024), k, M, G, T (of 1000) and m "
    "(thousandths), without a space.",
    fix="write it like 500m, 64Gi or 8",
)
def _quantities(stream: Stream) -> Iterator[Violation[View]]:
    return _mismatched(stream, "quantity")


# ---- The schemas of a cluster's own kinds

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


def schema_violations(stream: Stream, schemas: Schemas) -> Iterator[Violation[View]]:
    """Yield where the objects of a stream are not what their schemas allow."""
    for manifest in stream.manifests:
        written = manifest.view.at("apiVersion")
        version = written.text().rpartition("/")[2]
        versions = schemas.versions(manifest.group, manifest.kind)
        if versions and version not in versions:
            yield Violation(
                written,
                f"{manifest.kind} is served as {', '.join(versions)}",
                fix=f"write apiVersion: {manifest.group}/{versions[-1]}",
            )
        elif versions:
            schema = schemas.served[manifest.group, version, manifest.kind]
            for at, said_of_it in _object(manifest.view, schema, top=True):
                what, _, meant = said_of_it.partition(_MEANT)
                fix = f"did you mean {meant}?" if meant else None
                yield Violation(at, what, fix=fix)


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
