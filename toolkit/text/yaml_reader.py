"""Reads YAML so that all problems of a file can be shown, each with its line.

YAML 1.1 (PyYAML, many editors) and YAML 1.2 (Go, so Kubernetes) read some plain words differently:
`no`, `012`, `1e-3`, `4:00:00`. The reader keeps such a word as written and marks it `Ambiguous`:
fields for strings and numbers refuse it with the reason; a field with its own syntax, like a time,
may accept it. No YAML library reads both ways at once: ruamel.yaml keeps lines, but takes one
version per document. PyYAML's parser does the parsing here; only words are resolved here.
"""

import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import InputError, Problem

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of a document to a value."""


def dotted(path: KeyPath) -> str:
    """Return a path as people write it.

    >>> dotted(("spec", "containers", 0, "image"))
    'spec.containers[0].image'
    """
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


_MAX_BYTES = 5_000_000
_MAX_NODES = 100_000  # after aliases are expanded; a job file has dozens
_MAX_DEPTH = 100  # libyaml composes by recursion and takes the process with it
_MAX_DIGITS = 18  # every reader holds so many in 64 bits; Go then uses floating point
_TAG = "tag:yaml.org,2002:"
_PLAIN = "plain"  # instead of a tag: the word is neither quoted nor tagged
# Characters that YAML forbids, line breaks of YAML 1.1 alone, and byte order marks.
_UNREADABLE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]"
)
_CORE = {
    "null": re.compile(r"null|Null|NULL|~|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}
"""Plain words by their tags in YAML 1.2's core schema; every other one is a string."""


_FASTEST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader, ten times faster if PyYAML was built with libyaml."""


class _Loader(_FASTEST):  # type: ignore[misc]  # chosen late
    """A loader that marks plain words."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        """Return the tag of a node without one."""
        if kind is yaml.ScalarNode and implicit[0]:
            return _PLAIN
        return super().resolve(kind, value, implicit)


class Ambiguous(str):
    """A plain word that is a string to one version of YAML and something else to another."""

    reading: str

    def __new__(cls, written: str, reading: str) -> "Ambiguous":
        """Create the word; `reading` says what it means to which version."""
        word = super().__new__(cls, written)
        word.reading = f"{written} is {reading}"
        return word

    @property
    def reason(self) -> str:
        """Why a field refuses the word as a string, and the fix."""
        return f'{self.reading}; write "{self}" if you mean the text'


@dataclass(frozen=True, kw_only=True)
class Document:
    """The data of a file (or a mapping), with the place of each value."""

    data: Any
    """Mappings, tuples and scalars."""

    source: str
    """The file's name as the user gave it."""

    places: Mapping[KeyPath, str] = field(default_factory=dict)
    """`FILE:LINE` of every key and item."""

    written: Mapping[KeyPath, str] = field(default_factory=dict)
    """The original text of values that are not strings, like `3.10`, which is read as 3.1."""

    problems: tuple[Problem, ...] = ()
    """Problems of the YAML itself."""

    def place(self, path: KeyPath) -> str:
        """Return the place of a key, or of its nearest ancestor in the file."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.source)

    def located(self, problem: Problem) -> Problem:
        """Return the problem with the place of its key, unless it has a place."""
        place = problem.place or (self.place(problem.key) if problem.key else self.source)
        return replace(problem, place=place)


class _NodeReader:
    """One walk over the nodes of a document."""

    def __init__(self, source: str, above: int) -> None:
        self.source, self.above = source, above
        self.places: dict[KeyPath, str] = {}
        self.written: dict[KeyPath, str] = {}
        self.problems: list[Problem] = []
        self.nodes = 0

    def value(self, node: yaml.Node, path: KeyPath, above: tuple[yaml.Node, ...]) -> Any:
        self.nodes += 1
        if node in above:
            raise InputError("an alias that never ends", place=self._at(node))
        if self.nodes > _MAX_NODES:
            message = f"more than {_MAX_NODES} values, aliases counted at each use"
            raise InputError(message, place=self._at(node))
        self.places.setdefault(path, self._at(node))
        if isinstance(node, yaml.ScalarNode):
            scalar = self._scalar(node)
            if not isinstance(scalar, str):
                self.written[path] = str(node.value)
            return scalar
        sequence = isinstance(node, yaml.SequenceNode)
        if node.tag != f"{_TAG}{'seq' if sequence else 'map'}":
            self._refuse(node, f"the tag {node.tag!r} has no meaning here; leave it out")
        if sequence:
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
                self._refuse(key_node, f"duplicate key {key!r}; the first is at {lines[key]}")
                continue
            lines[key] = self.places[(*path, key)] = self._at(key_node)
            entries[key] = self.value(value_node, (*path, key), (*above, node))
        return entries

    def _key(self, node: yaml.Node) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._refuse(node, "a key must be a single word")
            return None
        if node.value == "<<" and node.tag == _PLAIN:
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
        if node.tag != _PLAIN:
            if node.tag != f"{_TAG}str":
                self._refuse(node, f"the tag {node.tag!r} has no meaning here; leave it out")
            return written
        implicit = _RESOLVER.resolve(yaml.ScalarNode, written, (True, False))
        old, new = implicit.removeprefix(_TAG), _core_tag(written)
        if old in ("value", "merge"):  # `=` and `<<`, which are words to all readers
            old = "str"
        if old != new:
            odd = f"{_NAMES[new]} to YAML 1.2" if old == "str" else f"{_NAMES[old]} to YAML 1.1"
            return Ambiguous(written, odd)
        if new == "int" and len(written) > _MAX_DIGITS:
            return Ambiguous(written, "a number that not every reader can hold")
        value = _VALUES[new](written)
        digits = written.lstrip("+-")
        if new == "int" and len(digits) > 1 and digits[0] == "0" and digits.isdecimal():
            octal = int(digits, 8) * (-1 if written[0] == "-" else 1)  # so does YAML 1.1 read it
            if octal != value:
                return Ambiguous(written, f"{octal} to YAML 1.1 and {value} to YAML 1.2")
        return value

    def _at(self, node: yaml.Node) -> str:
        return place_of(self.source, self.above + node.start_mark.line)

    def _refuse(self, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem(place=self._at(node), message=message))


_RESOLVER: Any = yaml.resolver.Resolver()
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


def place_of(source: str, line: int | None) -> str:
    """Return `FILE:LINE`, counted from 1; an option of the command line has no lines."""
    if line is None or source.startswith("--"):
        return source
    return f"{source}:{line + 1}"


def _core_tag(written: str) -> str:
    """Return the tag of a plain word by YAML 1.2's core schema."""
    return next((tag for tag, pattern in _CORE.items() if pattern.fullmatch(written)), "str")


_streams: dict[Path, bytes] = {}
"""The content of pipes, which can be read only once but is needed more often."""


def _at_once(name: str, flags: int) -> int:
    """Open a file without waiting for the writer of a pipe."""
    return os.open(name, flags | os.O_NONBLOCK)


def read_text(path: Path) -> str:
    """Return the file's text; `-` is standard input.

    Raises:
        InputError: the file does not exist, is not readable or not UTF-8, or is too large to have
            been written by a person; at most 5 MB are read.
    """
    size = "no end in sight"
    try:
        content = _streams.get(path)
        if content is None:
            file = Path("/dev/stdin") if path == Path("-") else path
            with open(file, "rb", opener=_at_once) as opened:
                info = os.fstat(opened.fileno())
                if not stat.S_ISREG(info.st_mode):
                    # A pipe from the user, such as `<(command)`; any other pipe may have no end.
                    if not str(file.absolute()).startswith(("/dev/", "/proc/")):
                        raise InputError("is not a regular file", place=f"{path}")
                    os.set_blocking(opened.fileno(), True)
                content = opened.read(_MAX_BYTES + 1) or b""  # None: a device has nothing yet
            if stat.S_ISREG(info.st_mode):
                size = f"{info.st_size:,} bytes"
            else:
                _streams[path] = content
        if len(content) > _MAX_BYTES:
            limit = f"at most {_MAX_BYTES:,} bytes are read"
            raise InputError(f"has {size}, and {limit}; is that the right file?", place=f"{path}")
        text = content.decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
        raise InputError(why, place=f"{path}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text (byte {error.start})", place=f"{path}") from error


def read_document(text: str, source: str, *, above: int = 0) -> Document:
    """Read YAML text; the document holds the problems that do not stop the reader.

    Messages name the file by `source`; `above` lines of it come before the text.

    Raises:
        InputError: the text is not YAML at all.
    """
    if match := _UNREADABLE.search(text):
        place = place_of(source, above + text.count("\n", 0, match.start()))
        what = f"the character U+{ord(match[0]):04X}, which not every reader of YAML accepts"
        raise InputError(what, place=place)
    reader = _NodeReader(source, above)
    try:
        _refuse_excess(text, source, above)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or "cannot be read"
        message = f"not YAML: {problem}"
        if mark is not None and text[mark.index : mark.index + 1] == "\t":
            message = "a tab; YAML is indented with spaces"
        elif "expected a single document" in (error.context or "") + problem:
            message = "a second document begins; one file holds one"
        place = place_of(source, None if mark is None else above + mark.line)
        raise InputError(message, place=place) from error
    data = None if node is None else reader.value(node, (), ())
    return Document(
        data=data,
        source=source,
        places=reader.places,
        written=reader.written,
        problems=tuple(reader.problems),
    )


def read_file(path: Path, error_type: type[InputError] = InputError) -> Document:
    """Read a YAML file, as `read_document()` reads its text.

    Raises:
        InputError: of `error_type`; the file cannot be read, or is not YAML at all.
    """
    try:
        return read_document(read_text(path), str(path))
    except InputError as error:
        raise error_type(error.problems) from None


class _StreamLoader(_FASTEST):  # type: ignore[misc]  # chosen late
    """A loader to which a date is a text, as it is to Kubernetes."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # of the base class
        first: [(tag, word) for tag, word in known if tag != f"{_TAG}timestamp"]
        for first, known in _FASTEST.yaml_implicit_resolvers.items()
    }


def documents_of(text: str) -> list[Any]:
    """Return the documents of a stream, such as a rendered manifest, as Kubernetes reads them."""
    return [document for document in yaml.load_all(text, Loader=_StreamLoader) if document]


def write_document(data: Any) -> str:
    """Return YAML that every reader, including `read_document()`, reads as `data`.

    >>> print(write_document({"env": {"LR": "1e-3"}}), end="")
    env:
      LR: "1e-3"
    """
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper for YAML 1.1, with quotes around words that YAML 1.2 reads differently."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        """Return a string, quoted if a reader could take it for something else."""
        plain = _core_tag(text) == "str" and not _UNREADABLE.search(text)
        return self.represent_scalar(f"{_TAG}str", text, style=None if plain else '"')


_Dumper.add_representer(str, _Dumper.represent_str)


def _refuse_excess(text: str, source: str, above: int) -> None:
    """Refuse text that would exhaust memory or libyaml's stack, before a tree is built."""
    depth = values = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        values += isinstance(event, yaml.NodeEvent)
        if depth > _MAX_DEPTH or values > 2 * _MAX_NODES:  # keys also count as nodes
            line = None if event.start_mark is None else above + event.start_mark.line
            what = f"{_MAX_DEPTH} levels" if depth > _MAX_DEPTH else f"{_MAX_NODES} values"
            raise InputError(f"more than {what}", place=place_of(source, line))
