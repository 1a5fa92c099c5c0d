"""Streams of YAML documents as kubectl reads them, each value with its line."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.errors import InputError, Problem
from toolkit.text.manifests import Manifest, Stream
from toolkit.text.yaml_reader import Ambiguous, Document, read_document

__all__ = ["is_manifest", "read_manifests"]

_MARK = re.compile(r"^(---|\.\.\.)(?=\s|$)", re.MULTILINE)
_KEY = re.compile(r"^[\"']?(apiVersion|kind|metadata|spec)[\"']?\s*:", re.MULTILINE)
_JSON = re.compile(r"\s*\{(?s:.*)[\"']?apiVersion[\"']?\s*:")
_OCTAL = re.compile(r"[-+]?0[0-7]+")
_YES = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}


def is_manifest(text: str) -> bool:
    r"""Whether a text describes Kubernetes objects, rather than a job.

    >>> is_manifest("apiVersion: v1\nkind: Pod\n"), is_manifest("name: x\nmodule: train\n")
    (True, False)
    """
    keys = set(_KEY.findall(text))
    return "apiVersion" in keys or len(keys) > 1 or _JSON.match(text) is not None


def read_manifests(text: str, source: str, *, pod_security: str | None = None) -> Stream:
    """Read a stream of manifests; a List counts as its items.

    Raises:
        InputError: it is no YAML, or a document is no object with `apiVersion` and `kind`; every
            such document is named.
    """
    manifests: list[Manifest] = []
    problems: list[Problem] = []
    for above, part in _parts(text):
        try:
            document = read_document(part, source, above=above)
        except InputError as error:
            problems += error.problems
            continue
        problems += document.problems
        if document.data is not None:
            data = _as_kubernetes(document.data)
            manifests += _objects(data, document, problems)
    if not manifests and not problems:
        problems.append(Problem(place=source, message="holds no object"))
    if problems:
        raise InputError(problems)
    numbered = (
        Manifest(data=one.data, document=one.document, path=one.path, index=index)
        for index, one in enumerate(manifests)
    )
    return Stream(manifests=tuple(numbered), pod_security=pod_security)


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Yield the documents of a stream, each with the number of lines above it."""
    starts = [match.start() for match in _MARK.finditer(text) if match[1] == "---"]
    bounds = [0, *starts, len(text)]
    above = 0
    for start, end in itertools.pairwise(bounds):
        part = text[start:end]
        if not all(map(_is_silent, part.splitlines())):
            yield above, part
        above += part.count("\n")


def _is_silent(row: str) -> bool:
    return not row.strip() or row.lstrip().startswith(("#", "%")) or row.strip() in ("---", "...")


def _objects(data: Any, document: Document, problems: list[Problem]) -> Iterator[Manifest]:
    """Yield the objects of a document."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), data)]  # the last is the next
    while waiting:
        path, value = waiting.pop()
        if not isinstance(value, Mapping):
            what = "is no object; write apiVersion, kind and metadata"
            problems.append(Problem(place=document.place(path), message=what))
            continue
        lacking = [key for key in ("apiVersion", "kind") if not isinstance(value.get(key), str)]
        if lacking:
            what = f"an object without {' and '.join(lacking)}; every manifest says both"
            problems.append(Problem(place=document.place(path), message=what))
        elif value["kind"] == "List" or isinstance(value.get("items"), tuple):
            items = value.get("items")
            listed = [*enumerate(items if isinstance(items, tuple) else ())]
            waiting += [((*path, "items", index), one) for index, one in reversed(listed)]
        else:
            yield Manifest(data=value, document=document, path=path)


def _as_kubernetes(value: Any) -> Any:
    """Return a value as kubectl reads it: `0644` is octal and `no` is false, `4:00` is a text.

    Source: sigs.k8s.io/yaml, which holds go-yaml 2.
    """
    if isinstance(value, Mapping):
        return {str(key): _as_kubernetes(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_as_kubernetes(item) for item in value)
    if isinstance(value, Ambiguous):
        word = str(value)
        if word.lower() in _YES:
            return _YES[word.lower()]
        if _OCTAL.fullmatch(word):
            return int(word, 8)
        try:
            return float(word.replace("_", ""))
        except ValueError:
            return word
    return value
