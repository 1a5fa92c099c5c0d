"""A manifest, and a value in it that knows where it stands."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from toolkit.text.yaml_reader import Document, KeyPath

__all__ = ["Manifest", "Stream", "View"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """One object of a stream."""

    data: Mapping[str, Any]
    """Its content, as Kubernetes reads it."""

    document: Document
    """The document that it stands in, which knows the lines."""

    path: KeyPath = ()
    """Where it stands in there: below `items` of a List."""

    index: int = 0
    """Its position among all objects of the stream, counted from 0."""

    @cached_property
    def kind(self) -> str:
        """Its kind; empty where that is no string."""
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
        """Its namespace; empty where it goes wherever it is applied."""
        return self.view.text("metadata", "namespace")

    @cached_property
    def view(self) -> "View":
        """All of it."""
        return View(value=self.data, path=(), manifest=self)

    def place(self, path: KeyPath) -> str:
        """Return `FILE:LINE` of a value, or of its nearest ancestor that is written down."""
        return self.document.place((*self.path, *path))


@dataclass(frozen=True, kw_only=True)
class View:
    """A value, or the lack of one."""

    value: Any
    """What stands there; None where nothing does."""

    path: KeyPath
    """The keys from the top of the object."""

    manifest: Manifest
    """The object."""

    def at(self, *keys: str | int) -> "View":
        """Return what stands below, whether or not anything does."""
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
        """Whether anything stands there, be it 0, false or empty."""
        return self.value is not None

    def has(self, key: str) -> bool:
        """Whether a mapping has a key, be it null."""
        return isinstance(self.value, dict) and key in self.value

    def items(self) -> Iterator["View"]:
        """Yield the items of a list; none of anything else."""
        if isinstance(self.value, tuple):
            for index in range(len(self.value)):
                yield self.at(index)

    def entries(self) -> Iterator[tuple[str, "View"]]:
        """Yield the keys and values of a mapping; none of anything else."""
        if isinstance(self.value, dict):
            for key in self.value:
                yield key, self.at(key)

    def text(self, *keys: str | int, default: str = "") -> str:
        """Return the string that stands there, or below `keys`."""
        value = self.at(*keys).value
        return str(value) if isinstance(value, str) else default

    def whole(self, *keys: str | int) -> int | None:
        """Return the integer that stands there, or below `keys`."""
        value = self.at(*keys).value
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def words(self, *keys: str | int) -> list[str]:
        """Return the strings of the list that stands there, or below `keys`."""
        return [item.value for item in self.at(*keys).items() if isinstance(item.value, str)]

    def labels(self, *keys: str | int) -> dict[str, str]:
        """Return a mapping of strings, like labels, that stands there, or below `keys`."""
        entries = self.at(*keys).entries()
        return {key: entry.value for key, entry in entries if isinstance(entry.value, str)}

    @property
    def where(self) -> str:
        """The keys as people write them: `spec.containers[0].image`."""
        parts = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path]
        return "".join(parts).removeprefix(".")


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """All objects of a file."""

    manifests: tuple[Manifest, ...]
    """The objects, those of Lists among them."""

    pod_security: str | None = None
    """The Pod Security level that is known from elsewhere."""

    def of(self, *kinds: str) -> Iterator[Manifest]:
        """Yield the objects of some kinds."""
        return (manifest for kind in kinds for manifest in self._by_kind.get(kind, ()))

    @cached_property
    def _by_kind(self) -> Mapping[str, list[Manifest]]:
        by_kind: dict[str, list[Manifest]] = {}
        for manifest in self.manifests:
            by_kind.setdefault(manifest.kind, []).append(manifest)
        return by_kind

    def level_of(self, manifest: Manifest) -> str:
        """Return the Pod Security level that an object's pods are held to.

        The default is `restricted`: a pod that passes it passes everywhere.
        """
        return self.known_level_of(manifest) or "restricted"

    def known_level_of(self, manifest: Manifest) -> str | None:
        """Return the level if a Namespace of the file, or the caller, sets it."""
        for space in self.of("Namespace"):
            level = space.view.text("metadata", "labels", "pod-security.kubernetes.io/enforce")
            if level and manifest.namespace in ("", space.name):
                return level
        return self.pod_security
