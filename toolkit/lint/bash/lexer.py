"""The lexer: reads words, quotes, expansions and here-documents."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NoReturn

from toolkit.errors import InputError
from toolkit.lint.bash.ast import CommandList, SourceText, Word, WordPart, joined

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]")
_SHORT_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_OPERATOR = re.compile(r":[-=?+]|[-=?+]|##?|%%?|//?|\^\^?|,,?|:|@")
_DEFAULTS = (":-", "-", ":=", "=", ":+", "+", ":?", "?")
_PLAIN = re.compile(r"[\w./:,%~=-]+")
_PLAIN_QUOTED = re.compile(r"[\w./:,%~= ;&|()<>-]+")
_ENDS_WORD = frozenset(" \t\n;&|()<>")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b"}


class WordReader:
    """A position in the text, with methods that read from this position."""

    def __init__(self, spans: Sequence[SourceText], source: str) -> None:
        """Prepare to read a text from pieces with known lines."""
        self.text = "".join(span.text for span in spans)
        self.source = source
        self.at, self.limit = 0, len(self.text)
        self.comments: list[SourceText] = []
        self._lines = [span.line for span in spans] or [1]
        self._starts = [0]
        for span in spans[:-1]:
            self._starts.append(self._starts[-1] + len(span.text))
        self._newlines = [match.start() for match in re.finditer("\n", self.text)]
        self._after_newline: dict[int, int] = {}

    # ---- Position

    def line(self, at: int | None = None) -> int:
        """Return the line of an offset, by default the current one."""
        at = self.at if at is None else at
        index = bisect_right(self._starts, at) - 1
        before = bisect_left(self._newlines, self._starts[index])
        return self._lines[index] + bisect_left(self._newlines, at) - before

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        """Raise an InputError; bash would also reject the text."""
        raise InputError(what, place=f"{self.source}:{self.line(at)}")

    @property
    def done(self) -> bool:
        """Whether the whole text is read."""
        return self.at >= self.limit

    def sees(self, text: str) -> bool:
        """Whether `text` comes next."""
        return self.text.startswith(text, self.at) and self.at + len(text) <= self.limit

    def take(self, text: str) -> bool:
        """Step over `text`, if it comes next."""
        seen = self.sees(text)
        self.at += len(text) if seen else 0
        return seen

    def char(self, ahead: int = 0) -> str:
        """Return the next character; nothing at the end."""
        at = self.at + ahead
        return self.text[at] if at < self.limit else ""

    def match(self, pattern: re.Pattern[str]) -> "re.Match[str] | None":
        """Match a pattern at the current position."""
        return pattern.match(self.text, self.at, self.limit)

    def blanks(self) -> None:
        """Step over blanks, line continuations and comments."""
        while not self.done:
            if self.char() in " \t":
                self.at += 1
            elif self.sees("\\\n"):
                self.at += 2
            elif self.char() == "#":
                end = self.text.find("\n", self.at, self.limit)
                end = self.limit if end < 0 else end
                self.comments.append(SourceText(self.text[self.at : end], self.line()))
                self.at = end
            else:
                return

    def newline(self) -> bool:
        """Step over a newline and the here-documents below the line."""
        if self.char() != "\n":
            return False
        self.at = self._after_newline.pop(self.at, self.at + 1)
        return True

    # ---- Words

    def word(self) -> Word:
        """Read a word, which may be empty."""
        line, parts = self.line(), list[WordPart]()
        while not self.done:
            if self.char() in "<>" and self.char(1) == "(":
                self.at += 2
                parts.append(self._commands(self.at - 2, "(", quoted=False))
            elif self.char() in "?*+@!" and self.char(1) == "(":
                start = self.at
                self.at += 1
                self._balance("(", ")")
                parts.append(self._text(self.text[start : self.at], start))
            elif self.char() in _ENDS_WORD:
                break
            else:
                parts += self.parts()
        return Word(parts=tuple(joined(parts)), line=line)

    def test_word(self) -> Word:
        """Read a word inside `[[ ]]`, where only blanks separate words."""
        line, parts = self.line(), list[WordPart]()
        while not self.done and self.char() not in " \t\n":
            if self.char() in _ENDS_WORD:
                parts.append(self._text(self.char(), self.at))
                self.at += 1
            else:
                parts += self.parts()
        return Word(parts=tuple(joined(parts)), line=line)

    def parts(self, *, double: bool = False, plain_quotes: bool = False) -> list[WordPart]:
        """Read the next part: plain characters, or a quoted or expanded piece.

        Args:
            double: Whether the part is inside double quotes or a here-document.
            plain_quotes: Whether a single quote is an ordinary character.
        """
        start, char = self.at, self.char()
        if char == "\\":
            self.at += 2
            escaped = self.text[start + 1 : self.at]
            if escaped == "\n":
                return []
            if double and escaped not in ("$", "`", '"', "\\"):
                return [self._text(char + escaped, start, quoted=True)]
            return [self._text(escaped, start, quoted=True)]
        if char == "`":
            return [self._backticks(quoted=double)]
        if char == "$" and (part := self._expansion(double=double)) is not None:
            return part
        if char == "'" and not plain_quotes and not double:
            end = self.text.find("'", start + 1, self.limit)
            if end < 0:
                self.fail("this single quote is never closed", start)
            self.at = end + 1
            return [self._text(self.text[start + 1 : end], start + 1, quoted=True)]
        if char == '"' and not double:
            return self._double()
        plain = self.match(_PLAIN_QUOTED if double else _PLAIN)
        self.at = plain.end() if plain else start + 1
        return [self._text(self.text[start : self.at], start, quoted=double)]

    def until(self, end: str, *, double: bool, plain_quotes: bool) -> tuple[WordPart, ...]:
        """Read parts up to `end`, and step over `end`."""
        start, parts = self.at, list[WordPart]()
        while not self.take(end):
            if self.done:
                self.fail(f"{end} is missing for what begins here", start)
            if double and self.char() == '"' and end != '"':
                parts += self._double()
                continue
            parts += self.parts(double=double, plain_quotes=plain_quotes)
        return tuple(joined(parts))

    def _double(self) -> list[WordPart]:
        start = self.at
        self.at += 1
        parts: list[WordPart] = [self._text("", start, quoted=True)]
        while self._inside('"', "double quote", start):
            parts += self.parts(double=True)
        return parts

    def _inside(self, end: str, what: str, start: int) -> bool:
        """Step over `end` and return False; return True if `end` is still ahead."""
        if self.take(end):
            return False
        if self.done:
            self.fail(f"this {what} is never closed", start)
        return True

    def _text(self, text: str, at: int, *, quoted: bool = False) -> WordPart:
        return WordPart(kind="text", text=text, line=self.line(at), quoted=quoted)

    def _read_from(self, start: int, *, quoted: bool, inner: CommandList | None = None) -> WordPart:
        """Return the text since `start` as a command substitution or a computed part."""
        source, line = self.text[start : self.at], self.line(start)
        if inner is None:
            return WordPart(kind="computed", text=source, line=line, quoted=quoted)
        return WordPart(kind="command", text=source, line=line, quoted=quoted, inner=inner)

    # ---- Expansions

    def _expansion(self, *, double: bool) -> list[WordPart] | None:
        """Read the expansion after `$`; None for a literal `$`."""
        start = self.at
        if self.sees("$((") and self._arithmetic_ends(start + 3):
            return [self._read_from(start, quoted=double)]
        if self.take("$("):
            return [self._commands(start, "$(", quoted=double)]
        if self.take("${"):
            return [self._braces(start, double=double)]
        if not double and self.char(1) == "'":
            return [self._ansi()]
        if not double and self.char(1) == '"':
            self.at += 1
            return self._double()
        self.at += 1
        if name := self.match(_SHORT_NAME):
            self.at = name.end()
            text = "*[@]" if name[0] in "@*" else name[0]
            return [WordPart(kind="variable", text=text, line=self.line(start), quoted=double)]
        self.at = start
        return None

    def _commands(self, start: int, opening: str, *, quoted: bool) -> WordPart:
        """Read the commands of a substitution and the closing parenthesis."""
        inner = self.commands(")")
        if not self.take(")"):
            self.fail(f"this {opening} is never closed", start)
        return self._read_from(start, quoted=quoted, inner=inner)

    def _braces(self, start: int, *, double: bool) -> WordPart:
        name = self.match(_NAME)
        special = name is None or (name[0] in "#!" and self.char(1) not in ("}", ":", "-"))
        if special or name is None:  # a length or indirect expansion: only a running shell knows it
            self.until("}", double=double, plain_quotes=False)
            return self._read_from(start, quoted=double)
        self.at = name.end()
        text = "*[@]" if name[0] in "@*" else name[0]
        if self.char() == "[":
            begin = self.at
            self._balance("[", "]")
            subscript = self.text[begin : self.at]
            text += "[@]" if subscript in ("[@]", "[*]") else subscript
        operator = match[0] if (match := self.match(_OPERATOR)) else ""
        self.at += len(operator)
        plain = double and operator in _DEFAULTS
        return WordPart(
            kind="variable",
            text=text,
            line=self.line(start),
            quoted=double,
            operator=operator,
            argument=self.until("}", double=double and operator in _DEFAULTS, plain_quotes=plain),
        )

    def _ansi(self) -> WordPart:
        start = self.at
        self.at += 2
        text = ""
        while self._inside("'", "single quote", start):
            if self.take("\\"):
                text += _ESCAPES.get(self.char(), self.char())
            else:
                text += self.char()
            self.at += 1
        return self._text(text, start, quoted=True)

    def _backticks(self, *, quoted: bool) -> WordPart:
        start = self.at
        self.at += 1
        text = ""
        while self._inside("`", "backtick", start):
            if self.char() == "\\" and self.char(1) in ("`", "\\", "$"):
                self.at += 1
            text += self.char()
            self.at += 1
        inner = self.nested([SourceText(text, self.line(start))])
        return self._read_from(start, quoted=quoted, inner=inner)

    def _arithmetic_ends(self, at: int) -> bool:
        """Step over `… ))` if `))` closes the expression; otherwise do not move."""
        depth = 0
        for index in range(at, self.limit):
            char = self.text[index]
            if char == "(":
                depth += 1
            elif char == ")" and depth:
                depth -= 1
            elif char == ")":
                if not self.text.startswith("))", index):
                    return False
                self.at = index + 2
                return True
        return False

    def arithmetic(self) -> bool:
        """Step over `(( … ))`, if it comes next."""
        return self.sees("((") and self._arithmetic_ends(self.at + 2)

    def _balance(self, opening: str, closing: str) -> None:
        """Step over a bracket, its contents and the closing bracket."""
        start, depth = self.at, 0
        while not self.done:
            char = self.char()
            if char in "\\'\"$`":
                self.parts()
                continue
            self.at += 1
            depth += (char == opening) - (char == closing)
            if not depth:
                return
        self.fail(f"this {opening} is never closed", start)

    # ---- Here-documents

    def here_document(self, delimiter: Word, *, tabs: bool) -> tuple[WordPart, ...]:
        """Read the here-document below the current line, up to `delimiter`."""
        newline = self.at
        while (newline := self.text.find("\n", newline, self.limit)) >= 0:
            if self.text[newline - 1] != "\\":
                break
            newline += 1
        if newline < 0:
            self.fail("a here-document begins on the last line")
        start = at = self._after_newline.get(newline, newline + 1)
        end = delimiter.literal if delimiter.literal is not None else delimiter.shown
        while at < self.limit:
            stop = self.text.find("\n", at, self.limit)
            stop = self.limit if stop < 0 else stop
            row = self.text[at:stop]
            if (row.lstrip("\t") if tabs else row) == end:
                break
            at = stop + 1
        else:
            self.fail(f"the here-document has no end {end!r}")
        self._after_newline[newline] = min(stop + 1, self.limit)
        if any(part.quoted for part in delimiter.parts):
            return (self._text(self.text[start:at], start, quoted=True),)
        place, limit = self.at, self.limit
        self.at, self.limit = start, at
        parts: list[WordPart] = []
        while not self.done:
            parts += self.parts(double=True, plain_quotes=True)
        self.at, self.limit = place, limit
        return tuple(joined(parts))

    # ---- Commands, implemented by the parser

    def commands(self, *ends: str) -> CommandList:
        """Read commands up to one of `ends`."""
        raise NotImplementedError

    def nested(self, spans: Sequence[SourceText]) -> CommandList:
        """Read the commands of a separate text, such as the contents of backticks."""
        raise NotImplementedError
