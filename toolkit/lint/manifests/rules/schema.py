"""Rules about the form of manifests: versions, fields, types, fixed words, quantities.

The schemas of Kubernetes and of the operators are data, in `schemas.json` (Kubernetes 1.37,
Training Operator 1.9, Trainer 2.3, JobSet 0.12, Volcano 1.12, scheduler-plugins 0.31), which is
read when the first manifest is checked. What a cluster has of its own is for its server.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import nearest
from toolkit.lint.rulebook import MANIFESTS, Violation
from toolkit.text.manifests import Manifest, Stream, View
from toolkit.text.quantities import amount

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
_SHOWN = 60


def shown(value: Any) -> str:
    """Return a value for a message: short, and as YAML writes it.

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


@functools.cache
def _packaged() -> tuple[Mapping[tuple[str, str], str], Mapping[str, _Schema]]:
    """Return the version that is served of each API group and kind, and the schemas by name."""
    data = json.loads(_PACKAGED.read_text(encoding="utf-8"))
    served, schemas = {}, data["$defs"]
    for name, definition in data["kinds"].items():
        group, version, kind = name.split("/")
        served[group, kind] = version
        schemas[f"{group}/{kind}"] = schemas[definition]
    return served, schemas


# ---- Values held to a schema


@dataclass(frozen=True)
class _Mismatch(Violation[View]):
    """A value that is not what a schema allows at its place."""

    rule: str = ""
    """The rule that reports it, for a schema of the package."""


_Mismatches = Iterator[_Mismatch]


def _mismatches_of(view: View, schema: _Schema, author: str) -> _Mismatches:
    """Yield where a value is not what a schema allows; messages name the kind and its API."""
    value = view.value
    if value is None:
        return  # null is the lack of a value, which a server drops
    if reference := schema.get("$ref"):
        schema = _packaged()[1][reference.rpartition("/")[2]]
    if expected := _expected(value, schema):
        quotable = schema.get("type") == "string" and not isinstance(value, (Mapping, tuple))
        way_out = 'write it in "quotes"' if quotable and "enum" not in schema else None
        yield _wrong_type(view, expected, way_out)
    elif schema.get("format") == "quantity" and amount(value) is None:
        what = f"{view.where}: {shown(value)} is no quantity"
        yield _Mismatch(view, what, "quantity-malformed")
    elif "enum" in schema and value not in schema["enum"]:
        words = [str(word) for word in schema["enum"]]
        choice = f"write one of {', '.join(filter(None, words))}"
        meant = nearest(str(value), words)
        way_out = f"did you mean {meant!r}? {choice}" if meant else choice
        what = f"{view.where}: {shown(value)} means nothing"
        yield _Mismatch(view, what, "field-word", fix=way_out)
    elif isinstance(value, Mapping):
        yield from _mismatches_of_fields(view, schema, author)
    elif isinstance(value, tuple):
        items = schema.get("items", {})
        for item in view.items():
            if item.value is None and items:
                yield _wrong_type(item, "no item of a list")
            yield from _mismatches_of(item, items, author)


def _mismatches_of_fields(view: View, schema: _Schema, author: str) -> _Mismatches:
    fields: Mapping[str, _Schema] = schema.get("properties", {})
    others = schema.get("additionalProperties")
    for key, entry in view.entries():
        if key in fields:
            yield from _mismatches_of(entry, fields[key], author)
        elif isinstance(others, Mapping):
            yield from _mismatches_of(entry, others, author)
        elif others is None and (fields or schema.get("type") == "object"):
            lower = {name.lower(): name for name in fields}
            meant = nearest(key.lower(), lower, cutoff=0.75)
            what = f"{entry.where}: {author} has no such field"
            way_out = f"did you mean {lower[meant]!r}?" if meant else None
            yield _Mismatch(entry, what, "field-unknown", fix=way_out)
    for key in schema.get("required", ()):
        lack = view.at(key)
        if lack.value is None:
            yield _Mismatch(lack, f"{lack.where} is missing", "field-missing")


def _expected(value: Any, schema: _Schema) -> str | None:
    """Return the type that a schema wants, in words; None where the value has it."""
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


# ---- The rules


@functools.lru_cache(maxsize=1)
def _mismatches(stream: Stream) -> tuple[_Mismatch, ...]:
    """Return where the objects of a stream are not what the API holds."""
    _, schemas = _packaged()
    return tuple(
        mismatch
        for manifest in stream.manifests
        for mismatch in _mismatches_of(
            manifest.view,
            schemas.get(f"{manifest.group}/{manifest.kind}", {}),
            f"{manifest.kind} of {_AUTHORS.get(manifest.group, 'Kubernetes 1.37')}",
        )
    )


_AUTHORS = {
    "kubeflow.org": "Training Operator 1.9",
    "trainer.kubeflow.org": "Trainer 2.3",
    "jobset.x-k8s.io": "JobSet 0.12",
    "scheduling.volcano.sh": "Volcano 1.12",
    "scheduling.x-k8s.io": "scheduler-plugins 0.31",
}


def is_known(manifest: Manifest) -> bool:
    """Whether the fields of an object are checked."""
    return (manifest.group, manifest.kind) in _packaged()[0]


@MANIFESTS.rule(
    "api-version",
    finds="a kind in a version of its API that is not served",
    reason='The server answers "no matches for kind".',
    fix="write the version that the cluster serves: kubectl api-resources",
)
def _versions(stream: Stream) -> Iterator[Violation[View]]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for (group, kind), version in _packaged()[0].items():
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
"""Kinds and groups that they are looked for in, and are not."""


def _form_rule(id: str, *, finds: str, reason: str, fix: str) -> None:
    """Make a rule that reports the mismatches of its name."""

    @MANIFESTS.rule(id, finds=finds, reason=reason, fix=fix)
    def check(stream: Stream) -> Iterator[Violation[View]]:
        return (mismatch for mismatch in _mismatches(stream) if mismatch.rule == id)


_form_rule(
    "field-unknown",
    finds="a field that the API does not have",
    reason="kubectl refuses it; other clients send it, and the server drops it without a word, or "
    "leaves the object with no status.",
    fix="correct its name, or its place",
)
_form_rule(
    "field-missing",
    finds="an object without a field that it must have",
    reason="The server refuses it.",
    fix="write it",
)
_form_rule(
    "field-type",
    finds="a value of another type than the API's: a number for a string, yes for true",
    reason="The server refuses it; numbers and yes, no, on, off in YAML are no strings.",
    fix="write it as the API wants it",
)
_form_rule(
    "field-word",
    finds="a word that is none of those that the field knows (restartPolicy, effect, operator …)",
    reason="Kubernetes refuses it where it checks; the Training Operator's webhook takes any "
    "restartPolicy, cleanPodPolicy or dnsPolicy, and the job makes no pods, or never ends "
    "(Training Operator 1.9).",
    fix="write one that there is",
)
_form_rule(
    "quantity-malformed",
    finds="an amount of CPU, memory or a device that is no quantity",
    reason="The server refuses it: units are Ki, Mi, Gi, Ti (of 1024), k, M, G, T (of 1000) and m "
    "(thousandths), without a space.",
    fix="write it like 500m, 64Gi or 8",
)
