"""The syntax tree of a bash script."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class SourceText:
    """A piece of text and its first line."""

    text: str
    line: int


@dataclass(frozen=True, kw_only=True)
class WordPart:
    """A piece of a word: literal text, or an expansion."""

    kind: Literal["text", "variable", "command", "computed"]
    """`computed` is arithmetic, and anything else that only a running shell can evaluate."""

    text: str
    """The literal text, a variable's name (with `[@]` for a whole array), or the source."""

    line: int
    """The line on which the part begins."""

    quoted: bool = False
    """Whether quotes prevent word splitting."""

    operator: str = ""
    """The operator after a variable's name in braces, such as `:-` or `%%`."""

    argument: tuple["WordPart", ...] = ()
    """The parts after the operator."""

    inner: "CommandList" = ()
    """The commands of a command substitution."""

    @property
    def shown(self) -> str:
        """The part as shown in messages."""
        if self.kind == "text":
            return self.text
        if self.kind == "variable":
            plain = self.text.isidentifier() and not self.operator
            rest = "".join(part.shown for part in self.argument)
            return f"${self.text}" if plain else f"${{{self.text}{self.operator}{rest}}}"
        return "$(…)" if self.kind == "command" else self.text


@dataclass(frozen=True, kw_only=True)
class Word:
    """A word before expansion."""

    parts: tuple[WordPart, ...]
    line: int

    @property
    def literal(self) -> str | None:
        """The literal text; None if the word contains an expansion."""
        if any(part.kind != "text" for part in self.parts):
            return None
        return "".join(part.text for part in self.parts)

    @property
    def bare(self) -> str:
        """The text of an unquoted literal word, which may be a reserved word; otherwise empty."""
        if len(self.parts) != 1 or self.parts[0].kind != "text" or self.parts[0].quoted:
            return ""
        return self.parts[0].text

    @property
    def shown(self) -> str:
        """The word as shown in messages."""
        return "".join(part.shown for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """`NAME=value`, `NAME+=value`, or `NAME=(…)`."""

    name: str
    added: bool
    value: Word
    items: tuple[Word, ...] | None
    """The elements of an array."""

    line: int


@dataclass(frozen=True, kw_only=True)
class Redirection:
    """`>file`, or the text of a here-document."""

    operator: str
    target: Word
    body: tuple[WordPart, ...] = ()
    """The text of a here-document, with expansions where bash expands."""


@dataclass(frozen=True, kw_only=True)
class SimpleCommand:
    """A simple command."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirections: tuple[Redirection, ...]
    line: int

    @property
    def name(self) -> str:
        """The program, builtin or function; empty if the name is not literal."""
        return (self.words[0].literal or "") if self.words else ""


@dataclass(frozen=True, kw_only=True)
class Compound:
    """`if`, `while`, `until`, `for`, `case`, `{ }`, `( )`."""

    kind: str
    conditions: tuple["CommandList", ...] = ()
    """The commands that are tested for their exit status."""

    bodies: tuple["CommandList", ...] = ()
    words: tuple[Word, ...] = ()
    """The list of a `for` loop, or the subject of `case`."""

    redirections: tuple[Redirection, ...] = ()
    line: int
    variable: str = ""
    """The variable of a `for` loop."""


@dataclass(frozen=True, kw_only=True)
class FunctionDefinition:
    """The definition of a function."""

    name: str
    body: "Compound | SimpleCommand"
    line: int


Node = SimpleCommand | Compound | FunctionDefinition


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Commands joined by `|`; most pipelines have a single command."""

    nodes: tuple[Node, ...]
    negated: bool


@dataclass(frozen=True, kw_only=True)
class AndOr:
    """Pipelines joined by `&&` and `||`."""

    pipelines: tuple[Pipeline, ...]
    operators: tuple[str, ...]
    """One operator between each pair of pipelines."""

    background: bool
    line: int


CommandList = tuple[AndOr, ...]


def joined(parts: Iterable[WordPart]) -> Iterator[WordPart]:
    """Merge adjacent literal text on one line with the same quoting."""
    runs: list[list[WordPart]] = []
    end = 0  # the line on which the previous part ends
    for part in parts:
        first = runs[-1][0] if runs else part
        alike = first.kind == part.kind == "text" and first.quoted == part.quoted
        if runs and alike and part.line == end:
            runs[-1].append(part)
        else:
            runs.append([part])
        end = part.line + part.text.count("\n")
    for run in runs:
        # Join once per run: a here-document has two parts per line.
        text = "".join(part.text for part in run)
        yield replace(run[0], text=text) if len(run) > 1 else run[0]


def compounds(commands: CommandList) -> Iterator[Compound]:
    """Yield the compound commands of a list, including nested commands and function bodies."""
    for item in commands:
        for pipeline in item.pipelines:
            for node in pipeline.nodes:
                inside = node.body if isinstance(node, FunctionDefinition) else node
                if isinstance(inside, Compound):
                    yield inside
                    for inner in (*inside.conditions, *inside.bodies):
                        yield from compounds(inner)
