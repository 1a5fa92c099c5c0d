"""What a bash script is made of."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class SourceText:
    """A piece of text and the line on which it begins."""

    text: str
    line: int


@dataclass(frozen=True, kw_only=True)
class WordPart:
    """A piece of a word: literal text, or an expansion."""

    kind: Literal["text", "variable", "command", "computed"]
    """`computed` stands for arithmetic and everything else that only a running shell can
    evaluate."""

    text: str
    """The literal text; a variable's name, with `[@]` for all of an array; else the source."""

    line: int
    """Where it stands."""

    quoted: bool = False
    """Whether quotes keep it in one word."""

    operator: str = ""
    """What follows a variable's name in its braces: `:-`, `%%`."""

    argument: tuple["WordPart", ...] = ()
    """What follows that."""

    inner: "CommandList" = ()
    """The commands of a substitution."""

    @property
    def shown(self) -> str:
        """The part as it is written in messages."""
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
        """The text, where nothing in it is expanded."""
        if any(part.kind != "text" for part in self.parts):
            return None
        return "".join(part.text for part in self.parts)

    @property
    def bare(self) -> str:
        """The text of a word without quotes, which alone may be a reserved one; else nothing."""
        if len(self.parts) != 1 or self.parts[0].kind != "text" or self.parts[0].quoted:
            return ""
        return self.parts[0].text

    @property
    def shown(self) -> str:
        """The word as it is written in messages."""
        return "".join(part.shown for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """`NAME=value`, `NAME+=value`, or `NAME=(…)`."""

    name: str
    added: bool
    value: Word
    items: tuple[Word, ...] | None
    """The words of an array."""

    line: int


@dataclass(frozen=True, kw_only=True)
class Redirection:
    """`>file`, or the text of a here-document."""

    operator: str
    target: Word
    body: tuple[WordPart, ...] = ()
    """The text of a here-document, expanded where bash would."""


@dataclass(frozen=True, kw_only=True)
class SimpleCommand:
    """A simple command."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirections: tuple[Redirection, ...]
    line: int

    @property
    def name(self) -> str:
        """The program, builtin or function, if it can be read from the text."""
        return (self.words[0].literal or "") if self.words else ""


@dataclass(frozen=True, kw_only=True)
class Compound:
    """`if`, `while`, `until`, `for`, `case`, `{ }`, `( )`."""

    kind: str
    conditions: tuple["CommandList", ...] = ()
    """The commands whose exit status is tested."""

    bodies: tuple["CommandList", ...] = ()
    words: tuple[Word, ...] = ()
    """What a loop goes over, or what `case` looks at."""

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
    """Commands joined by `|`; most have one."""

    nodes: tuple[Node, ...]
    negated: bool


@dataclass(frozen=True, kw_only=True)
class AndOr:
    """Pipelines joined by `&&` and `||`."""

    pipelines: tuple[Pipeline, ...]
    operators: tuple[str, ...]
    """One less than there are pipelines."""

    background: bool
    line: int


CommandList = tuple[AndOr, ...]


def joined(parts: Iterable[WordPart]) -> Iterator[WordPart]:
    """Join neighbours of literal text that stand on one line and are quoted alike."""
    runs: list[list[WordPart]] = []
    end = 0  # the line on which the last of them ends
    for part in parts:
        first = runs[-1][0] if runs else part
        alike = first.kind == part.kind == "text" and first.quoted == part.quoted
        if runs and alike and part.line == end:
            runs[-1].append(part)
        else:
            runs.append([part])
        end = part.line + part.text.count("\n")
    for run in runs:
        # At once: a here-document has two parts per line.
        text = "".join(part.text for part in run)
        yield replace(run[0], text=text) if len(run) > 1 else run[0]


def compounds(commands: CommandList) -> Iterator[Compound]:
    """Yield the compound commands of a list, those of functions and inside others too."""
    for item in commands:
        for pipeline in item.pipelines:
            for node in pipeline.nodes:
                inside = node.body if isinstance(node, FunctionDefinition) else node
                if isinstance(inside, Compound):
                    yield inside
                    for inner in (*inside.conditions, *inside.bodies):
                        yield from compounds(inner)
