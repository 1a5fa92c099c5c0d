"""The parser: reads lists, pipelines, compound commands and functions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.errors import InputError
from toolkit.lint.bash import ast
from toolkit.lint.bash.lexer import WordReader

DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
"""Builtins that take assignments as arguments."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]\n]*\])?(\+?)=")
_REDIRECTION = re.compile(r"(?:[0-9]+|\{\w+\})?(<<<|<<-|<<|<>|<&|>>|>&|>\||<|>)|(&>>|&>)")
_RESERVED = re.compile(r"[^\s;&|()<>'\"$`\\]+")
_AFTER_TEST = ("", *" \t\n;&|)")
_LAST = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}", ")", ";;", ";&", ";;&"})


@dataclass(frozen=True, kw_only=True)
class ReadScript:
    """A parsed script."""

    commands: ast.CommandList
    comments: tuple[ast.SourceText, ...]


def read_script(script: str | Sequence[ast.SourceText], source: str) -> ReadScript:
    """Parse a script, or the pieces of a nested script such as that of `bash -c`.

    Raises:
        InputError: bash would also reject the script, or it is nested too deeply.
    """
    spans = [ast.SourceText(script, 1)] if isinstance(script, str) else script
    reader = _CommandReader(spans, source)
    try:
        return ReadScript(commands=reader.commands(), comments=tuple(reader.comments))
    except RecursionError:
        raise InputError("nested too deeply to be read", place=source) from None


def readable_lines(text: str, source: str, *, before: int) -> int:
    """Return how many lines above a syntax error contain complete commands.

    `before` is the line of the error, which may be inside a command.
    """
    reader = _CommandReader([ast.SourceText(text, 1)], source)
    try:
        lines = [item.line for item in reader.commands() if item.line <= before]
    except (InputError, RecursionError):
        return reader.line(reader.began) - 1
    return lines[-1] - 1 if lines else 0


class _CommandReader(WordReader):
    """Recursive descent over bash's grammar (bash manual, SHELL GRAMMAR)."""

    began = 0
    """The offset at which the current top-level command begins."""

    def commands(self, *ends: str) -> ast.CommandList:
        commands: list[ast.AndOr] = []
        while True:
            self._separators()
            if not ends:
                self.began = self.at
            if self.done:
                return tuple(commands)
            if (end := self._ending()) is not None:
                if end in ends:
                    return tuple(commands)
                self.fail(f"{end!r} closes nothing here")
            commands.append(self._and_or())

    def nested(self, spans: Sequence[ast.SourceText]) -> ast.CommandList:
        return _CommandReader(spans, self.source).commands()

    def _separators(self) -> None:
        self.blanks()
        while self.newline():
            self.blanks()

    def _ending(self) -> str | None:
        """Return the word or operator that ends a list at this position."""
        for operator in (";;&", ";;", ";&", ")"):
            if self.sees(operator):
                return operator
        match = self.match(_RESERVED)
        return match[0] if match and match[0] in _LAST else None

    def _reserved(self, *words: str) -> str:
        """Step over a reserved word and return it; otherwise return an empty string."""
        match = self.match(_RESERVED)
        if match is None or match[0] not in words:
            return ""
        self.at = match.end()
        return match[0]

    def _expect(self, word: str, opened: int) -> None:
        self._separators()
        word_taken = self.take(word) if word in (")", "}") else self._reserved(word)
        if not word_taken:
            self.fail(f"{word!r} is missing for what begins here", opened)

    def _and_or(self) -> ast.AndOr:
        line = self.line()
        pipelines, operators = [self._pipeline()], list[str]()
        while True:
            self.blanks()
            operator = next((o for o in ("&&", "||") if self.take(o)), None)
            if operator is None:
                break
            operators.append(operator)
            self._separators()
            pipelines.append(self._pipeline())
        background = False
        if not any(self.sees(end) for end in (";;", ";&")):
            background = self.take("&")
            if not background:
                self.take(";")
        return ast.AndOr(
            pipelines=tuple(pipelines), operators=tuple(operators), background=background, line=line
        )

    def _pipeline(self) -> ast.Pipeline:
        negated = False
        while True:
            self.blanks()
            if self.char() == "!" and self.char(1) in " \t":
                self.at += 1
                negated = not negated
            elif self._reserved("time"):
                self.blanks()
                self._reserved("-p")
            else:
                break
        nodes = [self._node()]
        while True:
            self.blanks()
            if self.sees("||") or not (self.take("|&") or self.take("|")):
                return ast.Pipeline(nodes=tuple(nodes), negated=negated)
            self._separators()
            nodes.append(self._node())

    # ---- One command

    def _node(self) -> ast.Node:
        node = self._command()
        if isinstance(node, ast.Compound):
            return replace(node, redirections=tuple(iter(self._redirection, None)))
        return node

    def _command(self) -> ast.Node:
        start, line = self.at, self.line()
        if self.arithmetic():
            return ast.Compound(kind="arithmetic", line=line)
        if self.take("("):
            body = self.commands(")")
            self._expect(")", start)
            return ast.Compound(kind="subshell", line=line, bodies=(body,))
        word = self._reserved("{", "if", "while", "until", "for", "select", "case", "function")
        if word == "{":
            body = self.commands("}")
            self._expect("}", start)
            return ast.Compound(kind="group", line=line, bodies=(body,))
        if word == "if":
            return self._if(start, line)
        if word in ("while", "until"):
            tests = (self.commands("do"),)
            return ast.Compound(kind=word, line=line, conditions=tests, bodies=self._loop(start))
        if word in ("for", "select"):
            return self._for(start, line)
        if word == "case":
            return self._case(start, line)
        if word == "function":
            self.blanks()
            name = self.word().shown
            self.blanks()
            if self.take("("):
                self._expect(")", start)
            return self._function(name, line)
        if self.sees("[[") and self.char(2) in " \t\n":
            return self._test(line)
        return self._simple(line)

    def _if(self, start: int, line: int) -> ast.Compound:
        conditions, bodies = [self.commands("then")], []
        self._expect("then", start)
        while True:
            bodies.append(self.commands("elif", "else", "fi"))
            if self._reserved("elif"):
                conditions.append(self.commands("then"))
                self._expect("then", start)
                continue
            if self._reserved("else"):
                bodies.append(self.commands("fi"))
            self._expect("fi", start)
            return ast.Compound(
                kind="if", line=line, conditions=tuple(conditions), bodies=tuple(bodies)
            )

    def _loop(self, start: int) -> tuple[ast.CommandList]:
        """Read the body of a loop."""
        self._expect("do", start)
        body = self.commands("done")
        self._expect("done", start)
        return (body,)

    def _for(self, start: int, line: int) -> ast.Compound:
        self.blanks()
        words: list[ast.Word] = []
        name = ""
        if not self.arithmetic():
            name = self.word().shown
            self._separators()
            if self._reserved("in"):
                while True:
                    self.blanks()
                    if self.done or self.char() in "\n;":
                        break
                    words.append(self.word())
                    if not words[-1].parts:
                        self.fail("the list of this loop cannot be read", start)
        self.blanks()
        self.take(";")
        self._separators()
        if self.sees("{"):
            body = self._node()
            if not isinstance(body, ast.Compound):
                self.fail("the body of this loop cannot be read", start)
            bodies = body.bodies
        else:
            bodies = self._loop(start)
        return ast.Compound(kind="for", line=line, bodies=bodies, words=tuple(words), variable=name)

    def _case(self, start: int, line: int) -> ast.Compound:
        self.blanks()
        subject = self.word()
        self._expect("in", start)
        bodies: list[ast.CommandList] = []
        while True:
            self._separators()
            if self._reserved("esac"):
                break
            self.take("(")
            while True:
                self.blanks()
                before = self.at
                self.word()
                self.blanks()
                if self.take(")"):
                    break
                if not self.take("|") or self.at == before:
                    self.fail("this case has a pattern that cannot be read", start)
            bodies.append(self.commands(";;", ";&", ";;&", "esac"))
            if not any(self.take(end) for end in (";;&", ";;", ";&")):
                self._expect("esac", start)
                break
        return ast.Compound(kind="case", line=line, bodies=tuple(bodies), words=(subject,))

    def _function(self, name: str, line: int) -> ast.FunctionDefinition:
        self._separators()
        body = self._node()
        if isinstance(body, ast.FunctionDefinition):
            self.fail(f"the function {name!r} has no body")
        return ast.FunctionDefinition(name=name, body=body, line=line)

    def _test(self, line: int) -> ast.SimpleCommand:
        start, words = self.at, list[ast.Word]()
        while True:
            while self.char() in (" ", "\t", "\n") or self.sees("\\\n"):
                self.at += 2 if self.char() == "\\" else 1
            if self.done:
                self.fail("this [[ is never closed", start)
            if self.sees("]]") and self.char(2) in _AFTER_TEST:
                self.at += 2
                break
            words.append(self.test_word())
        redirections = tuple(iter(self._redirection, None))
        return ast.SimpleCommand(
            assignments=(), words=tuple(words), redirections=redirections, line=line
        )

    def _simple(self, line: int) -> ast.Node:
        assignments: list[ast.Assignment] = []
        words: list[ast.Word] = []
        redirections: list[ast.Redirection] = []
        start = self.at
        while True:
            self.blanks()
            if (redirection := self._redirection()) is not None:
                redirections.append(redirection)
                continue
            if self.done or self.char() in "\n;&|)":
                break
            if self.char() == "(":
                if len(words) != 1 or assignments:
                    self.fail("a bracket that bash does not take here")
                self.at += 1
                self._expect(")", start)
                return self._function(words[0].shown, line)
            declares = bool(words) and words[0].bare in DECLARES
            match = self.match(_ASSIGNMENT) if declares or not words else None
            if match is not None:
                assignments.append(self._assignment(match))
            else:
                words.append(self.word())
        if self.at == start:
            self.fail("a command is missing here")
        return ast.SimpleCommand(
            assignments=tuple(assignments),
            words=tuple(words),
            redirections=tuple(redirections),
            line=line,
        )

    def _assignment(self, match: "re.Match[str]") -> ast.Assignment:
        start, line = self.at, self.line()
        self.at = match.end()
        items: tuple[ast.Word, ...] | None = None
        value = ast.Word(parts=(), line=line)
        if self.take("("):
            read: list[ast.Word] = []
            while True:
                self._separators()
                if self.take(")"):
                    break
                before = self.at
                read.append(self.word())
                if self.at == before:
                    self.fail("this list is never closed", start)
            items = tuple(read)
        else:
            value = self.word()
        name = match[1] + (match[2] or "")
        return ast.Assignment(name=name, added=bool(match[3]), value=value, items=items, line=line)

    def _redirection(self) -> ast.Redirection | None:
        self.blanks()
        match = self.match(_REDIRECTION)
        if match is None or (match[1] in ("<", ">") and self.text[match.end() :][:1] == "("):
            return None
        operator = match[1] or match[2]
        self.at = match.end()
        self.blanks()
        target = self.word()
        if not target.parts:
            self.fail(f"nothing follows {operator}")
        body: tuple[ast.WordPart, ...] = ()
        if operator in ("<<", "<<-"):
            body = self.here_document(target, tabs=operator == "<<-")
        return ast.Redirection(operator=operator, target=target, body=body)
