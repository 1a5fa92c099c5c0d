"""The pages of traps show lines of their scripts, and `toolkit check` finds what the pages say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.learn.support.page import LEARN, Block, Page
from toolkit.checks import check

INDEX = Page(LEARN / "traps.md")
THEMES = [Page(path) for path in sorted(LEARN.glob("traps-*.md"))]
SCRIPTS = sorted(INDEX.path.with_suffix("").glob("*.py"))
_FORM = r"\]\((traps/\w+_{form}\.py)\)"


@dataclass(frozen=True)
class Trap:
    """A section of a theme's page, or a row of the index, which another page explains."""

    title: str
    page: Page
    line: int
    text: str
    explained: str
    """The target of the index's link."""

    def script(self, form: str) -> Path:
        """Return the one script of a form to which the section links."""
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
        return [
            b for b in self.page.blocks() if b.language == "python" and self.line <= b.line <= end
        ]


def sections() -> list[Trap]:
    """Return the traps that a theme's page shows."""
    found = []
    for page in THEMES:
        for s in re.finditer(r"^## (.+)\n(?:(?!^## ).*\n)*", page.text, re.MULTILINE):
            if s[1] != "Exercises":
                anchor = re.sub(r"[^\w -]", "", s[1].lower()).replace(" ", "-")
                line = page.text.count("\n", 0, s.start()) + 1
                found.append(Trap(s[1], page, line, s[0], f"{page.path.name}#{anchor}"))
    return found


def rows() -> list[Trap]:
    """Return the traps of the index that another page explains."""
    part = INDEX.text.partition("\n## Mistakes that other pages show\n")[2].partition("\n## ")[0]
    return [
        Trap(row[1], INDEX, 0, row[0], row[2])
        for row in re.finditer(r"^\| \[([^\]]+)\]\(([^)]+)\) \| .*$", part, re.MULTILINE)
    ]


SHOWN, LISTED = sections(), rows()
TRAPS = SHOWN + LISTED
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


def test_the_index_has_so_many_traps_as_it_says() -> None:
    (count,) = re.findall(r"index of (\d+) mistakes", INDEX.text)
    assert len(TRAPS) == int(count) >= 28


@pytest.mark.parametrize("trap", SHOWN, ids=lambda trap: trap.title)
def test_a_trap_shows_lines_of_its_wrong_and_of_its_right_script(trap: Trap) -> None:
    wrong, right = trap.blocks()
    assert wrong.title is None is right.title
    for block, form in ((wrong, "wrong"), (right, "right")):
        assert stands_in(block.text, trap.script(form).read_text()), block.text


@each_trap
def test_a_trap_calls_its_wrong_script_and_then_its_right_one(trap: Trap) -> None:
    end = trap.line + trap.text.count("\n") if trap.line else 10**6
    called = [
        command.words
        for line, session in trap.page.sessions().items()
        for command in session
        if trap.line <= line <= end
    ]
    forms = [re.findall(r"traps/\w+\.py", words) for words in called]
    names = [[f"traps/{trap.script(form).name}"] for form in ("wrong", "right")]
    if trap in LISTED:  # the index calls the scripts of all its rows
        forms = [form for form in forms if form in names]
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
    contents, _, _ = INDEX.text.partition("\n## ")[2].partition("\n## ")
    linked = re.findall(r"\[([^\]]+)\]\((\S+\.md#?[^)]*)\)", contents.partition("\n\nThe pages")[0])
    assert set(linked) == {(trap.title, trap.explained) for trap in TRAPS}


def test_a_section_that_the_index_links_to_exists() -> None:
    for trap in TRAPS:
        name, _, anchor = trap.explained.partition("#")
        headings = re.findall(r"^#+ (.+)$", (LEARN / name).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
        assert not anchor or anchor in anchors, trap.explained
