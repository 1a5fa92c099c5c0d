"""YAML files read so that every mistake can be shown with its line, all of them at once.

YAML 1.1 (PyYAML, many editors) and YAML 1.2 (Go, so Kubernetes) read some plain words differently:
`no`, `012`, `1e-3`, `4:00:00`. Such a word is kept as it was written and marked `Ambiguous`;
a field that wants a string or a number refuses it with the reason, a field with a syntax of its
own (a time) may take it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from toolkit.errors import InputError, Problem

__all__ = ["Ambiguous", "Document", "KeyPath", "read_document", "read_text"]

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of a document to a value."""

_MAX_NODES = 100_000  # what aliases may expand to; a job file has dozens
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times faster
_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)


class Ambiguous(str):
    """A plain word that is a string to one version of YAML and something else to another."""

    reason: str

    def __new__(cls, written: str, reading: str) -> "Ambiguous":
        """Keep the word as written, and what else it is read as."""
        word = super().__new__(cls, written)
        word.reason = f'{written} is {reading}; write "{written}" if you mean the text'
        return word


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a file (or a mapping) says, and where it says it."""

    data: Any
    """Mappings, tuples and scalars."""

    source: str
    """The file's name as the user gave it."""

    places: Mapping[KeyPath, str] = field(default_factory=dict)
    """`FILE:LINE` of every key and item."""

    problems: tuple[Problem, ...] = ()
    """What is wrong with the YAML itself."""

    def place(self, path: KeyPath) -> str:
        """Return where `path` stands, or its nearest ancestor that is written down."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.source)


class _Reader:
    """One walk over the nodes of a document."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.places: dict[KeyPath, str] = {}
        self.problems: list[Problem] = []
        self.nodes = 0

    def value(self, node: yaml.Node, path: KeyPath, above: tuple[yaml.Node, ...]) -> Any:
        self.nodes += 1
        if node in above or self.nodes > _MAX_NODES:
            raise InputError([Problem(place=self._at(node), message="an alias that never ends")])
        self.places.setdefault(path, self._at(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if not node.tag.startswith(_TAG):
            self._refuse(node, f"the tag {node.tag!r} has no meaning here; leave it out")
        if isinstance(node, yaml.SequenceNode):
            return tuple(
                self.value(item, (*path, index), (*above, node))
                for index, item in enumerate(node.value)
            )
        assert isinstance(node, yaml.MappingNode)
        return self._mapping(node, path, above)

    def _mapping(
        self, node: yaml.MappingNode, path: KeyPath, above: tuple[yaml.Node, ...]
    ) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        lines: dict[str, str] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key is None:
                continue
            if key in entries:
                self._refuse(
                    key_node, f"the key {key!r} stands twice; the first is at {lines[key]}"
                )
                continue
            lines[key] = self.places[(*path, key)] = self._at(key_node)
            entries[key] = self.value(value_node, (*path, key), (*above, node))
        return entries

    def _key(self, node: yaml.Node) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._refuse(node, "a key must be a single word")
            return None
        if node.value == "<<" and not node.style:
            self._refuse(node, "merge keys (<<) are not read; write the keys out")
            return None
        key = self._scalar(node)
        if isinstance(key, Ambiguous):
            self._refuse(node, f"as a key, {key.reason}")
        elif not isinstance(key, str):
            self._refuse(node, f'the key {node.value} is not a string; write "{node.value}"')
        return str(node.value)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        written = str(node.value)
        implicit = _RESOLVER.resolve(yaml.ScalarNode, written, (True, False))
        if node.style or node.tag != implicit:  # quoted, or with a tag
            if node.tag not in (f"{_TAG}str", "!"):
                self._refuse(node, f"the tag {node.tag!r} has no meaning here; leave it out")
            return written
        old, new = implicit.removeprefix(_TAG), _core_tag(written)
        if old in ("value", "merge"):  # `=` and `<<`, of which nobody makes anything
            old = "str"
        if old != new:
            odd = f"{_NAMES[new]} to YAML 1.2" if old == "str" else f"{_NAMES[old]} to YAML 1.1"
            return Ambiguous(written, odd)
        value = _VALUES[new](written)
        if new == "int" and (old_value := _old_int(written)) != value:
            return Ambiguous(written, f"{old_value} to YAML 1.1 and {value} to YAML 1.2")
        return value

    def _at(self, node: yaml.Node) -> str:
        return place_of(self.source, node.start_mark)

    def _refuse(self, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem(place=self._at(node), message=message))


_RESOLVER: Any = yaml.resolver.Resolver()  # type: ignore[no-untyped-call]  # PyYAML's stubs
_NAMES = {
    "bool": "a boolean",
    "float": "a number",
    "int": "a number",
    "null": "null",
    "timestamp": "a date",
}
_VALUES: dict[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda written: None,
    "bool": lambda written: written.lower() == "true",
    "int": lambda written: int(written, 0 if written[:2] in ("0x", "0o") else 10),
    "float": lambda written: float(written.lower().replace(".inf", "inf").replace(".nan", "nan")),
}


def place_of(source: str, mark: yaml.Mark | None) -> str:
    """Return `FILE:LINE`; an option of the command line is a place of its own."""
    if mark is None or source.startswith("--"):
        return source
    return f"{source}:{mark.line + 1}"


def _core_tag(written: str) -> str:
    """Return what YAML 1.2's core schema takes a plain word for."""
    for tag, pattern in (("null", _NULL), ("bool", _BOOL), ("int", _INT), ("float", _FLOAT)):
        if pattern.fullmatch(written):
            return tag
    return "str"


def _old_int(written: str) -> int:
    """Return the integer that YAML 1.1 reads, which takes a leading zero for octal."""
    digits = written.lstrip("+-")
    if len(digits) > 1 and digits[0] == "0" and digits.isdecimal():
        sign = -1 if written[0] == "-" else 1
        return sign * int(digits, 8)
    return int(written, 0)


def read_text(path: Path) -> str:
    """Return the file's text.

    Raises:
        InputError: it is not there, not readable, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        _fail(f"{path}", f"cannot be read: {error.strerror or error}")
    except UnicodeDecodeError as error:
        _fail(f"{path}", f"is not UTF-8 text (byte {error.start})")


def read_document(text: str, source: str) -> Document:
    """Read YAML text; mistakes that leave something to read are kept as problems.

    Raises:
        InputError: the text is not YAML at all.
    """
    reader = _Reader(source)
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        _fail(*_explain(error, source))
    except yaml.YAMLError as error:
        _fail(source, f"is not YAML: {str(error).splitlines()[0]}")
    data = None if node is None else reader.value(node, (), ())
    return Document(data=data, source=source, places=reader.places, problems=tuple(reader.problems))


def _explain(error: yaml.MarkedYAMLError, source: str) -> tuple[str, str]:
    place = place_of(source, error.problem_mark or error.context_mark)
    problem = error.problem or "cannot be read"
    if "\\t" in problem or "'\t'" in problem:
        return place, "a tab; YAML is indented with spaces"
    if "expected a single document" in (error.context or "") + problem:
        return place, "a second document begins; one file holds one"
    return place, f"not YAML: {problem}"


def _fail(place: str, message: str) -> NoReturn:
    raise InputError([Problem(place=place, message=message)])
