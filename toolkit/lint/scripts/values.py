"""Word expansion: substitutes the variables that the script itself sets.

The last assignment above a command counts, even inside a condition. Values from the environment,
commands and arithmetic stay unknown.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from toolkit.lint.bash.ast import Assignment, SourceText, Word, WordPart
from toolkit.text.quantities import whole_number

_DEFAULTS = (":-", "-", ":=", "=")
_MARK, _END = "\ue000", "\ue001"  # around text that the outer shell has already expanded,
_HIDDEN = 0xE100  # encoded in characters without a meaning for bash
_DEEPEST = 20
_MOST_PIECES = 200
_MOST_NAMES = 2000  # a subshell copies all variables


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of an argument with a single origin in the script."""

    text: str
    line: int
    known: bool = True
    """Whether `text` is the value; otherwise it is the expansion as written."""

    quoted: bool = True
    """Whether bash keeps the piece in one word."""

    name: str = ""
    """The variable that provides an unknown piece."""

    outer: bool = False
    """Whether the outer shell has already expanded the piece."""


@dataclass(frozen=True, kw_only=True)
class Argument:
    """A word after expansion."""

    pieces: tuple[Piece, ...]
    line: int
    """The line of its use; its value may come from another line."""

    @property
    def text(self) -> str:
        """The text, with unknown parts as written."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def known(self) -> bool:
        """Whether all of the text is known."""
        return all(piece.known for piece in self.pieces)

    @property
    def number(self) -> int | None:
        """The value as a whole number; None for other values."""
        return whole_number(self.text) if self.known else None

    @property
    def spans(self) -> tuple[SourceText, ...]:
        """The argument as text to parse again, with marks around unknown parts."""
        spans = []
        for piece in self.pieces:
            text = piece.text
            if not piece.known:
                hidden = "".join(chr(_HIDDEN + ord(c)) if ord(c) < 128 else c for c in text)
                text = f"{_MARK}{hidden}{_END}"
            spans.append(SourceText(text, piece.line))
        return tuple(spans)

    def line_at(self, offset: int) -> int:
        """Return the line of the character at `offset` of the text."""
        for piece in self.pieces:
            if offset < len(piece.text):
                return piece.line + piece.text.count("\n", 0, max(offset, 0))
            offset -= len(piece.text)
        return self.line

    def cut(self, start: int, end: int | None = None) -> "Argument":
        """Return a part of the argument, by offsets into its text."""
        end = len(self.text) if end is None else end
        pieces, at = [], 0
        for piece in self.pieces:
            left, right = max(start - at, 0), min(end - at, len(piece.text))
            if left < right:
                line = piece.line + piece.text.count("\n", 0, left)
                pieces.append(replace(piece, text=piece.text[left:right], line=line))
            at += len(piece.text)
        return Argument(pieces=tuple(pieces), line=pieces[0].line if pieces else self.line)


@dataclass
class Values:
    """The shell variables that the script sets."""

    scalars: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    arrays: dict[str, tuple[Argument, ...]] = field(default_factory=dict)

    def copy(self) -> "Values":
        """Return a copy, as for a subshell."""
        return Values(dict(self.scalars), dict(self.arrays))

    def forget(self, name: str) -> None:
        """Mark the value of a variable as unknown."""
        self.scalars.pop(name, None)
        self.arrays.pop(name, None)

    def assign(self, assignment: Assignment) -> Argument:
        """Record an assignment and return its value; an array becomes one text."""
        name = assignment.name
        if assignment.items is not None:
            items = tuple(a for word in assignment.items for a in self.arguments(word))
            whole = (*(self.arrays.get(name, ()) if assignment.added else ()), *items)
            self.forget(name)
            if len(whole) <= _MOST_PIECES and len(self.arrays) < _MOST_NAMES:
                self.arrays[name] = whole
            blank = Piece(text=" ", line=assignment.line)
            pieces = tuple(p for item in items for p in (*item.pieces, blank))
            return Argument(pieces=pieces, line=assignment.line)
        value = self.one(assignment.value)
        before = self.scalars.get(name, ()) if assignment.added else ()
        self.forget(name)
        pieces = (*before, *value.pieces)
        # Keep `PID=$!` as a variable that identifies the process. Overlong values are not options.
        literal = [piece.name for piece in pieces] != ["!"] and len(pieces) <= _MOST_PIECES
        if literal and len(self.scalars) < _MOST_NAMES:
            self.scalars[name] = pieces
        return value

    def one(self, word: Word) -> Argument:
        """Expand a word without word splitting, as in an assignment."""
        return Argument(pieces=tuple(self._pieces(word.parts)), line=word.line)

    def arguments(self, word: Word) -> list[Argument]:
        """Expand a word into zero or more arguments."""
        parts = [part for part in word.parts if part.kind != "text" or part.text]
        if len(parts) == 1 and parts[0].kind == "variable" and parts[0].text.endswith("[@]"):
            name = parts[0].text.removesuffix("[@]")
            if name in self.arrays:
                return list(self.arrays[name])
        return list(_split(self.one(word), word))

    def _pieces(self, parts: Iterable[WordPart], depth: int = 0) -> Iterator[Piece]:
        for part in parts:
            if part.kind == "text":
                yield from _texts(part)
            elif part.kind == "variable" and depth < _DEEPEST:
                yield from self._variable(part, depth + 1)
            else:
                source = part.text if part.kind == "command" else part.shown
                yield Piece(text=source, line=part.line, known=False, quoted=part.quoted)

    def _variable(self, part: WordPart, depth: int) -> Iterator[Piece]:
        name = part.text
        unknown = Piece(text=part.shown, line=part.line, known=False, quoted=part.quoted, name=name)
        if part.operator and part.operator not in _DEFAULTS:
            yield unknown
        elif name in self.scalars:
            for piece in self.scalars[name]:
                same = piece.quoted == part.quoted
                yield piece if same else replace(piece, quoted=part.quoted)
        elif part.operator in _DEFAULTS and not name.startswith("SLURM"):
            pieces = tuple(self._pieces(part.argument, depth))
            if part.operator in (":=", "="):
                self.scalars[name] = pieces
            yield from pieces
        elif (item := self._item(name)) is not None:
            yield from item.pieces
        else:
            yield unknown

    def _item(self, name: str) -> Argument | None:
        array, bracket, index = name.partition("[")
        items = self.arrays.get(array, ())
        if array not in self.arrays or (bracket and index == "@]"):
            return None
        number = whole_number(index.rstrip("]")) if bracket else 0
        return items[number] if number is not None and number < len(items) else None


def uncovered(text: str) -> str:
    """Return a text for a message, with hidden parts decoded."""
    text = text.replace(_MARK, "").replace(_END, "")
    return "".join(chr(ord(c) - _HIDDEN) if _HIDDEN <= ord(c) < _HIDDEN + 128 else c for c in text)


def _texts(part: WordPart) -> Iterator[Piece]:
    text, line = part.text, part.line
    if _MARK not in text:
        yield Piece(text=text, line=line, quoted=part.quoted)
        return
    for index, chunk in enumerate(text.split(_MARK)):
        inside, end, after = chunk.partition(_END) if index else ("", "", chunk)
        if end:
            shown = uncovered(inside)
            yield Piece(text=shown, line=line, known=False, name=shown.strip("${}"), outer=True)
        if after:
            yield Piece(text=after, line=line, quoted=part.quoted)


def _split(argument: Argument, word: Word) -> Iterator[Argument]:
    """Split an argument at the blanks of unquoted expansions."""
    quoted = any(part.quoted for part in word.parts)
    words: list[list[Piece]] = [[]]
    for piece in argument.pieces:
        if piece.quoted or not piece.known or not any(c in piece.text for c in " \t\n"):
            words[-1].append(piece)
            continue
        if piece.text[0] in " \t\n" and words[-1]:
            words.append([])
        for index, text in enumerate(piece.text.split()):
            if index:
                words.append([])
            words[-1].append(Piece(text=text, line=piece.line, quoted=False))
        if piece.text[-1] in " \t\n" and words[-1]:
            words.append([])
    *whole, last = words
    yield from (Argument(pieces=tuple(pieces), line=argument.line) for pieces in whole)
    if last and (quoted or any(piece.text for piece in last)):
        yield Argument(pieces=tuple(last), line=argument.line)
    elif not argument.pieces and quoted:
        yield argument
