"""The page of traps shows lines of its scripts, and `toolkit check` finds what the page says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.learn.support.page import LEARN, Block, Page
from toolkit.checks import check

PAGE = Page(LEARN / "traps.md")
SCRIPTS = sorted(PAGE.path.with_suffix("").glob("*.py"))
_FORM = r"\]\((traps/\w+_{form}\.py)\)"


@dataclass(frozen=True)
class Trap:
    """A section of the page."""

    title: str
    line: int
    text: str

    def script(self, form: str) -> Path:
        """Return the one script of a form that the section links to."""
        (name,) = re.findall(_FORM.format(form=form), self.text)
        return LEARN / str(name)

    @property
    def rules(self) -> list[str]:
        """The rules that the section names, each with a link."""
        named = re.findall(
            r"\[`([a-z0-9-]+)`\]\(\.\./reference/rules\.md#([a-z0-9-]+)\)", self.text
        )
        assert all(name == anchor for name, anchor in named), self.title
        return sorted(name for name, _ in named)

    def blocks(self) -> list[Block]:
        """Return the section's lines of Python, in their order."""
        end = self.line + self.text.count("\n")
        return [b for b in PAGE.blocks() if b.language == "python" and self.line <= b.line <= end]


def traps() -> list[Trap]:
    sections = list(re.finditer(r"^### (.+)\n(?:(?!^#{2,3} ).*\n)*", PAGE.text, re.MULTILINE))
    return [Trap(s[1], PAGE.text.count("\n", 0, s.start()) + 1, s[0]) for s in sections]


TRAPS = traps()
each_trap = pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.title)


def stands_in(block: str, script: str) -> bool:
    """Whether lines stand in a script, indented alike; `...` is any number of other lines."""
    parts = [part.strip("\n") for part in re.split(r"^ *\.\.\.\n", block, flags=re.MULTILINE)]
    lines = script.splitlines()
    for indent in {re.match(" *", line)[0] for line in lines}:  # type: ignore[index]
        at: int | None = 0
        for part in filter(None, parts):
            wanted = [f"{indent}{line}" if line else "" for line in part.splitlines()]
            places = range(at or 0, len(lines))
            at = next((n + len(wanted) for n in places if lines[n:][: len(wanted)] == wanted), None)
            if at is None:
                break
        if at is not None:
            return True
    return False


@pytest.mark.parametrize(
    ("block", "stands"),
    [
        ("b\n", True),
        ("a\n...\nc\n", True),
        ("if b:\n    c\n", True),
        ("if b:\n    ...\n    d\n", True),
        ("if b:\nc\n", False),
        ("c\n...\na\n", False),
        ("if\n", False),
    ],
)
def test_lines_are_found_as_they_stand(block: str, stands: bool) -> None:
    assert stands_in(block, "a\nb\nc\nwith e:\n    if b:\n        c\n        d\n") == stands


def test_the_page_has_so_many_traps_as_it_says() -> None:
    (count,) = re.findall(r"shows (\d+) of them", PAGE.text)
    assert len(TRAPS) == int(count) >= 28


@each_trap
def test_a_trap_shows_lines_of_its_wrong_and_of_its_right_script(trap: Trap) -> None:
    wrong, right = trap.blocks()
    assert wrong.title is None is right.title
    for block, form in ((wrong, "wrong"), (right, "right")):
        assert stands_in(block.text, trap.script(form).read_text()), block.text


@each_trap
def test_a_trap_calls_its_wrong_script_and_then_its_right_one(trap: Trap) -> None:
    called = [
        command.words
        for line, session in PAGE.sessions().items()
        for command in session
        if trap.line <= line <= trap.line + trap.text.count("\n")
    ]
    forms = [re.findall(r"traps/\w+\.py", words) for words in called]
    names = [[f"traps/{trap.script(form).name}"] for form in ("wrong", "right")]
    assert [form for n, form in enumerate(forms) if form not in forms[:n]] == names


def test_every_script_belongs_to_a_trap() -> None:
    linked = {trap.script(form) for trap in TRAPS for form in ("wrong", "right")}
    assert set(SCRIPTS) == linked
    assert len(linked) == 2 * len(TRAPS)


@each_trap
def test_the_rules_of_a_trap_find_its_wrong_form_and_nothing_else(trap: Trap) -> None:
    assert sorted(finding.rule or "" for finding in check(trap.script("wrong"))) == trap.rules


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_nothing_is_found_in_a_right_form(path: Path) -> None:
    if path.stem.endswith("_right"):
        assert check(path) == []


def test_the_contents_lead_to_every_trap() -> None:
    contents, _, _ = PAGE.text.partition("\n## ")[2].partition("\n## ")
    anchors = {re.sub(r"[^\w -]", "", t.title.lower()).replace(" ", "-") for t in TRAPS}
    linked = re.findall(r"\[([^\]]+)\]\(#([^)]+)\)", contents)
    assert {anchor for _, anchor in linked} == anchors
    assert {title for title, _ in linked} == {trap.title for trap in TRAPS}
