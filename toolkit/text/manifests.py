"""Kubernetes manifests, read as kubectl reads them, each value with its line."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from toolkit.errors import InputError, Problem
from toolkit.text.yaml_reader import Ambiguous, Document, KeyPath, dotted, read_document

_MARK = re.compile(r"^(---|\.\.\.)(?=\s|$)", re.MULTILINE)
_KEY = re.compile(r"^[\"']?(apiVersion|kind|metadata|spec)[\"']?\s*:", re.MULTILINE)
_JSON = re.compile(r"\s*\{(?s:.*)[\"']?apiVersion[\"']?\s*:")
_OCTAL = re.compile(r"[-+]?0[0-7]+")
_YES = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """One object of a stream."""

    data: Mapping[str, Any]
    """The content, as Kubernetes reads it."""

    document: Document
    """The YAML document that holds it, with the lines."""

    path: KeyPath = ()
    """Its path in the document: below `items` of a List, else empty."""

    index: int = 0
    """Its position among all objects of the stream, counted from 0."""

    inside: bool = False
    """Whether it is part of another object, from which an operator creates it."""

    @cached_property
    def kind(self) -> str:
        """Its kind; empty if that is not a string."""
        return self.view.text("kind")

    @cached_property
    def group(self) -> str:
        """Its API group; empty for the core of Kubernetes."""
        return self.view.text("apiVersion").rpartition("/")[0]

    @cached_property
    def name(self) -> str:
        """Its name; empty without one."""
        return self.view.text("metadata", "name")

    @cached_property
    def namespace(self) -> str:
        """Its namespace; empty if the manifest names none."""
        return self.view.text("metadata", "namespace")

    @cached_property
    def view(self) -> "View":
        """The whole object as a view."""
        return View(value=self.data, path=(), manifest=self)

    def place(self, path: KeyPath) -> str:
        """Return `FILE:LINE` of a value; if the file does not hold it, of its nearest ancestor."""
        return self.document.place((*self.path, *path))


@dataclass(frozen=True, kw_only=True)
class View:
    """A value in a manifest that knows its path; the value may be missing."""

    value: Any
    """The value; None without one."""

    path: KeyPath
    """The keys from the top of the object."""

    manifest: Manifest

    def at(self, *keys: str | int) -> "View":
        """Return the view of a value below, which may be missing."""
        value = self.value
        for key in keys:
            if isinstance(value, dict):
                value = value.get(key)
            elif isinstance(value, tuple) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                value = None
        return View(value=value, path=(*self.path, *keys), manifest=self.manifest)

    def __bool__(self) -> bool:
        """Whether there is a value; 0, false and empty values count."""
        return self.value is not None

    def items(self) -> Iterator["View"]:
        """Yield the items of a list; nothing for any other value."""
        if isinstance(self.value, tuple):
            for index in range(len(self.value)):
                yield self.at(index)

    def entries(self) -> Iterator[tuple[str, "View"]]:
        """Yield the keys and values of a mapping; nothing for any other value."""
        if isinstance(self.value, dict):
            for key in self.value:
                yield key, self.at(key)

    def text(self, *keys: str | int, default: str = "") -> str:
        """Return this value, or the one below `keys`, if it is a string, else the default."""
        value = self.at(*keys).value
        return str(value) if isinstance(value, str) else default

    def whole(self, *keys: str | int) -> int | None:
        """Return this value, or the one below `keys`, if it is an integer."""
        value = self.at(*keys).value
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def words(self, *keys: str | int) -> list[str]:
        """Return the strings in this list, or in the one below `keys`."""
        return [item.value for item in self.at(*keys).items() if isinstance(item.value, str)]

    def labels(self, *keys: str | int) -> dict[str, str]:
        """Return the string entries of this mapping, or of the one below `keys`, like labels."""
        entries = self.at(*keys).entries()
        return {key: entry.value for key, entry in entries if isinstance(entry.value, str)}

    @property
    def where(self) -> str:
        """The keys as people write them: `spec.containers[0].image`."""
        return dotted(self.path)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """All objects of a file."""

    manifests: tuple[Manifest, ...]
    """The objects, including the items of Lists."""

    pod_security: str | None = None
    """The Pod Security level of the profile; None if no profile sets it."""

    def of(self, *kinds: str) -> Iterator[Manifest]:
        """Yield the objects of these kinds, kind by kind."""
        return (manifest for kind in kinds for manifest in self._by_kind.get(kind, ()))

    @cached_property
    def _by_kind(self) -> Mapping[str, list[Manifest]]:
        by_kind: dict[str, list[Manifest]] = {}
        for manifest in self.manifests:
            by_kind.setdefault(manifest.kind, []).append(manifest)
        return by_kind

    def level_of(self, manifest: Manifest) -> str:
        """Return the Pod Security level that applies to an object's pods.

        The default is `restricted`: a pod that passes it passes everywhere.
        """
        return self.known_level_of(manifest) or "restricted"

    def known_level_of(self, manifest: Manifest) -> str | None:
        """Return the level that a Namespace of the file, or the caller, sets; else None."""
        for space in self.of("Namespace"):
            level = space.view.text("metadata", "labels", "pod-security.kubernetes.io/enforce")
            if level and manifest.namespace in ("", space.name):
                return level
        return self.pod_security


def is_manifest(text: str) -> bool:
    r"""Whether a text describes Kubernetes objects rather than a job.

    >>> is_manifest("apiVersion: v1\nkind: Pod\n"), is_manifest("name: x\nmodule: train\n")
    (True, False)
    """
    keys = set(_KEY.findall(text))
    return "apiVersion" in keys or len(keys) > 1 or _JSON.match(text) is not None


_MOST_PROBLEMS = 1000
"""Limit of problems per file."""


def read_manifests(text: str, source: str, *, pod_security: str | None = None) -> Stream:
    """Read a stream of manifests; a List is replaced by its items.

    Raises:
        InputError: the text is not YAML, or a document is not an object with `apiVersion` and
            `kind`; the error lists every such document.
    """
    manifests: list[Manifest] = []
    problems: list[Problem] = []
    for above, part in _parts(text):
        if len(problems) >= _MOST_PROBLEMS:
            break
        try:
            document = read_document(part, source, above=above)
        except InputError as error:
            problems += error.problems
            continue
        problems += document.problems
        if document.data is not None:
            manifests += _objects(_as_kubernetes(document.data), document, problems)
    if not manifests and not problems:
        problems.append(Problem(place=source, message="the file holds no object"))
    if problems:
        raise InputError(problems)
    numbered = (replace(manifest, index=index) for index, manifest in enumerate(manifests))
    return Stream(manifests=tuple(numbered), pod_security=pod_security)


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Yield the documents of a stream, each with the number of lines above it."""
    starts = [match.start() for match in _MARK.finditer(text) if match[1] == "---"]
    bounds = [0, *starts, len(text)]
    above = 0
    for start, end in itertools.pairwise(bounds):
        part = text[start:end]
        lines = map(str.strip, part.splitlines())
        if any(line not in ("", "---", "...") and line[0] not in "#%" for line in lines):
            yield above, part
        above += part.count("\n")


def _objects(data: Any, document: Document, problems: list[Problem]) -> Iterator[Manifest]:
    waiting: list[tuple[KeyPath, Any]] = [((), data)]  # the last one is read next
    while waiting:
        path, value = waiting.pop()
        if not isinstance(value, Mapping):
            what = "not an object; write apiVersion, kind and metadata"
            problems.append(Problem(place=document.place(path), message=what))
            continue
        lacking = [key for key in ("apiVersion", "kind") if not isinstance(value.get(key), str)]
        if lacking:
            what = f"an object without {' and '.join(lacking)}; every manifest needs both"
            problems.append(Problem(place=document.place(path), message=what))
        elif value["kind"] == "List" or isinstance(value.get("items"), tuple):
            items = value.get("items")
            listed = [*enumerate(items if isinstance(items, tuple) else ())]
            waiting += [((*path, "items", index), one) for index, one in reversed(listed)]
        else:
            yield Manifest(data=value, document=document, path=path)


def _as_kubernetes(value: Any) -> Any:
    """Return a value as kubectl reads it: `0644` is octal, `no` is false, `4:00` is a string.

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
