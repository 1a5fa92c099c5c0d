"""Rules about the form of manifests: versions, fields, types, fixed words, quantities."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.errors import nearest
from toolkit.lint.manifests.fields import KINDS, fields_of
from toolkit.lint.manifests.registry import Fault, rule
from toolkit.text.manifests import Manifest, Stream, View
from toolkit.text.quantities import amount

__all__ = ["mismatches", "near", "said"]

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


def _faults(stream: Stream, kind: str) -> Iterator[Fault]:
    for one in mismatches(stream):
        if one.kind == kind:
            yield Fault(at=one.at, what=one.what, fix=one.way_out)


# ---- The rules


@rule(
    "api-version",
    finds="a kind in a version of its API that is not served",
    reason='The server answers "no matches for kind".',
    fix="write the version that the cluster serves: kubectl api-resources",
)
def _versions(stream: Stream) -> Iterator[Fault]:
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
                yield Fault(
                    at=written,
                    what=f"{manifest.kind} is not served as {written.value}",
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


@rule(
    "field-unknown",
    finds="a field that the API does not have",
    reason="kubectl refuses it; other clients send it, and the server drops it without a word, or "
    "leaves the object with no status.",
    fix="correct its name, or its place",
)
def _unknown(stream: Stream) -> Iterator[Fault]:
    return _faults(stream, "unknown")


@rule(
    "field-missing",
    finds="an object without a field that it must have",
    reason="The server refuses it.",
    fix="write it",
)
def _missing(stream: Stream) -> Iterator[Fault]:
    return _faults(stream, "missing")


@rule(
    "field-type",
    finds="a value of another type than the API's: a number for a string, yes for true",
    reason="The server refuses it; numbers and yes, no, on, off in YAML are no strings.",
    fix="write it as the API wants it",
)
def _types(stream: Stream) -> Iterator[Fault]:
    return _faults(stream, "type")


@rule(
    "field-word",
    finds="a word that is none of those that the field knows (restartPolicy, effect, operator …)",
    reason="Kubernetes refuses it where it checks; the Training Operator's webhook takes any "
    "restartPolicy, cleanPodPolicy or dnsPolicy, and the job makes no pods, or never ends "
    "(Training Operator 1.9).",
    fix="write one that there is",
)
def _words(stream: Stream) -> Iterator[Fault]:
    return _faults(stream, "enum")


@rule(
    "quantity-malformed",
    finds="an amount of CPU, memory or a device that is no quantity",
    reason="The server refuses it: units are Ki, Mi, Gi, Ti (of 1024), k, M, G, T (of 1000) and m "
    "(thousandths), without a space.",
    fix="write it like 500m, 64Gi or 8",
)
def _quantities(stream: Stream) -> Iterator[Fault]:
    return _faults(stream, "quantity")
