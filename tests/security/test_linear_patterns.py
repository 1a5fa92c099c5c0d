"""The patterns of the readers match any text in work that grows with its length, and no faster.

`re` counts no steps. So each pattern is matched here as `re` does it, by backtracking, and the
steps are counted. The texts are made from one that the pattern matches: parts of it come again and
again, with and without an end that the pattern does not match. A doubling may take `MOST` times the
steps at most: 2 is linear, 4 is quadratic.
"""

import ast
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from tests.conftest import ROOT

MOST = 3.0
SIZE = 36
"""Characters of the smaller text; of one with long parts, `FEWEST` of them."""

FEWEST = 6
MOST_STEPS = 200_000

ROOMS = ("cli", "functions", "kubernetes", "local", "runs", "slurm", "text")
"""The rooms of toolkit/ that read what others have written."""

ANCHORED = {"match", "fullmatch"}

TRUSTED = {
    "kubernetes/submission.py",
}
"""Modules whose patterns are matched against what this user has written."""

Tree = Any
Next = Callable[[int], bool]


class Matcher:
    """Matches a pattern by backtracking, and counts the steps."""

    def __init__(self, tree: Tree, text: str, most: int) -> None:
        self.tree, self.text, self.most, self.steps = tree, text, most, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > self.most:
            raise TimeoutError

    def search(self, *, anywhere: bool, whole: bool) -> bool:
        ends: Next = (lambda at: at == len(self.text)) if whole else (lambda at: True)
        starts = range(len(self.text) + 1) if anywhere else [0]
        return any(self.matches(list(self.tree), 0, start, ends) for start in starts)

    def one(self, operation: Any, value: Any, at: int) -> bool:
        """Whether a single character matches."""
        self.step()
        if at >= len(self.text):
            return False
        char = ord(self.text[at])
        if operation is codes.ANY:
            return self.text[at] != "\n"
        if operation is codes.LITERAL:
            return bool(char == value)
        if operation is codes.NOT_LITERAL:
            return bool(char != value)
        negated = value[0][0] is codes.NEGATE
        return any(_in(kind, of, char) for kind, of in value[negated:]) != negated

    def matches(self, items: list[Any], first: int, at: int, then: Next) -> bool:
        self.step()
        if first == len(items):
            return then(at)
        operation, value = items[first]

        def rest(end: int) -> bool:
            return self.matches(items, first + 1, end, then)

        if operation in SINGLE:
            return self.one(operation, value, at) and rest(at + 1)
        if operation is codes.AT:
            return self.stands(value, at) and rest(at)
        if operation is codes.SUBPATTERN:
            return self.matches(list(value[-1]), 0, at, rest)
        if operation is codes.BRANCH:
            return any(self.matches(list(branch), 0, at, rest) for branch in value[1])
        if operation in (codes.ASSERT, codes.ASSERT_NOT):
            direction, inner = value
            begin = at if direction > 0 else at - inner.getwidth()[0]
            found = begin >= 0 and self.matches(list(inner), 0, begin, lambda end: True)
            return found is (operation is codes.ASSERT) and rest(at)
        assert operation in (codes.MAX_REPEAT, codes.MIN_REPEAT), operation
        least, most, inner = value
        if len(inner) == 1 and inner[0][0] in SINGLE:
            (kind, of), count = inner[0], 0
            if operation is codes.MIN_REPEAT:
                while count < most:
                    if count >= least and rest(at + count):
                        return True
                    if not self.one(kind, of, at + count):
                        return False
                    count += 1
            while count < most and self.one(kind, of, at + count):
                count += 1
            return any(rest(at + taken) for taken in range(count, least - 1, -1))
        return self.repeats(operation, value, at, rest)

    def repeats(self, operation: Any, value: Any, at: int, rest: Next, count: int = 0) -> bool:
        """Match something longer than a character again and again."""
        least, most, inner = value
        lazy = operation is codes.MIN_REPEAT

        def again(end: int) -> bool:
            return end > at and self.repeats(operation, value, end, rest, count + 1)

        if lazy and count >= least and rest(at):
            return True
        if count < most and self.matches(list(inner), 0, at, again):
            return True
        return not lazy and count >= least and rest(at)

    def stands(self, value: Any, at: int) -> bool:
        if value in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
            return at == 0
        if value is codes.AT_END_STRING:
            return at == len(self.text)
        if value is codes.AT_END:
            return at == len(self.text) or self.text[at] == "\n"
        return True  # a boundary: rarely what costs


SINGLE = (codes.ANY, codes.LITERAL, codes.NOT_LITERAL, codes.IN)


def _in(kind: Any, of: Any, char: int) -> bool:
    if kind is codes.LITERAL:
        return bool(char == of)
    if kind is codes.RANGE:
        return bool(of[0] <= char <= of[1])
    text, name = chr(char), str(of)
    found = {
        "SPACE": text.isspace(),
        "DIGIT": text.isdecimal(),
        "WORD": text.isalnum() or text == "_",
    }[name.removeprefix("CATEGORY_").removeprefix("UNI_").removeprefix("NOT_")]
    return found is ("NOT" not in name)


def example(items: Any, more: int = 1) -> str:
    """Return a text that a pattern matches; what repeats comes once, or so often as it must."""
    parts = []
    for operation, value in items:
        if operation is codes.LITERAL:
            parts.append(chr(value))
        elif operation is codes.ANY:
            parts.append("x")
        elif operation in (codes.NOT_LITERAL, codes.IN):
            matcher = Matcher([], "", 10**9)
            fits = (c for c in "x1 /.-:=_A|\t[" if _fits(matcher, operation, value, c))
            parts.append(next(fits, ""))
        elif operation is codes.SUBPATTERN:
            parts.append(example(value[-1]))
        elif operation is codes.BRANCH:
            parts.append(example(value[1][-1]))
        elif operation in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            parts.append(example(value[2]) * max(min(value[1], more), value[0]))
    return "".join(parts)


def _fits(matcher: Matcher, operation: Any, value: Any, char: str) -> bool:
    matcher.text = char
    return matcher.one(operation, value, 0)


def pumped(tree: Any, size: int) -> Iterator[str]:
    """Yield texts of some size that a pattern may take long for."""
    text = example(tree)[:40]
    parts = {text[:end] for end in range(1, len(text) + 1)}
    parts |= {text[begin:] for begin in range(len(text))} | set(text)
    for part in sorted(parts):
        times = max(size // len(part), FEWEST * size // SIZE)
        begin = text.partition(part)[0]
        for end in ("", "\x00", "\n\x00"):
            yield part * times + end
            if begin:
                yield begin + part * times + end


def steps(tree: Any, text: str, how: str) -> int:
    matcher = Matcher(tree, text, MOST_STEPS)
    with contextlib.suppress(TimeoutError):
        matcher.search(anywhere=how not in ANCHORED, whole=how == "fullmatch")
    return matcher.steps


def growth(pattern: str, how: str) -> tuple[float, str]:
    """Return by how much the steps grow that a pattern takes at worst, and for which text."""
    tree = parser.parse(pattern)
    sys.setrecursionlimit(20_000)  # a Matcher calls itself for each part of a text
    worst = (0.0, "")
    for small, large in zip(pumped(tree, SIZE), pumped(tree, 2 * SIZE), strict=True):
        if len(large) < 1.8 * len(small):
            continue
        before, after = steps(tree, small, how), steps(tree, large, how)
        if after > MOST_STEPS:
            return float("inf"), large
        # A pattern that takes few steps for each character does not matter.
        if after > 8 * len(large):
            worst = max(worst, (after / before, large))
    return worst


def patterns() -> dict[str, tuple[str, str]]:
    """Return the patterns of the rooms, and how each is used, by module and name."""
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / "toolkit" / room).rglob("*.py")):
            name = str(path.relative_to(ROOT / "toolkit"))
            if name not in TRUSTED:
                for place, pattern, how in _patterns_of(path):
                    found[f"{name}: {place} ({how})"] = pattern, how
    return found


def _patterns_of(path: Path) -> Iterator[tuple[str, str, str]]:
    source = path.read_text()
    module = f"toolkit.{path.relative_to(ROOT / 'toolkit').with_suffix('')}".replace("/", ".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "re.compile":
                compiled = getattr(__import__(module, fromlist=[name]), name)
                text = compiled.pattern
                text = text.decode("latin-1") if isinstance(text, bytes) else text
                used = set(re.findall(rf"\b{name}\.(\w+)", source)) & METHODS
                hows = {how if how in ANCHORED else "search" for how in used or {"match"}}
                for how in sorted(hows):
                    yield name, text, how
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            pattern = node.args[0]
            if isinstance(pattern, ast.Constant) and isinstance(pattern.value, str):
                yield f"line {node.lineno}", pattern.value, ast.unparse(node.func).split(".")[1]


METHODS = {"match", "fullmatch", "search", "finditer", "findall", "split", "sub"}
CALLS = {f"re.{method}" for method in METHODS}


CASES = [pytest.param(*case, id=name) for name, case in patterns().items()]


@pytest.mark.parametrize(("pattern", "how"), CASES)
def test_a_pattern_is_linear(pattern: str, how: str) -> None:
    grows, text = growth(pattern, how)
    assert grows <= MOST, text


@pytest.mark.parametrize(
    ("pattern", "how"),
    [
        (r"pod \S+?/(\S+) failed", "search"),
        (r" SubmitTime=(\d{1,11}) EligibleTime=(\d{1,11}) .* StartTime=(\d{1,11}) E", "search"),
        (r"(a+)+b", "match"),
        (r"\s*x", "search"),
        (r"(x|xx)*y", "match"),
    ],
)
def test_a_pattern_that_is_not_is_found(pattern: str, how: str) -> None:
    assert growth(pattern, how)[0] > MOST
