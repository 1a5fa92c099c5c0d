"""The pages of docs/learn do what they say: each command prints what the page shows."""

from __future__ import annotations

import difflib
import doctest
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.figures.figure import FIGURES, Figure, figures
from tests.learn.support.page import Page, pages
from tests.learn.support.runner import Result, call

PAGES = pages()
SESSIONS = [(name, line) for name, page in PAGES.items() for line in page.sessions()]
ONLY_SLOW = ("python traps/", "torchrun --nproc-per-node 2 traps/fixed_init_file_wrong.py")
"""Commands that start a Python, which starts others, some 5 s each; and one that gives up after
30 s. Only slow tests call them."""

FAST = [
    (name, line)
    for name, line in SESSIONS
    if not any(c.words.startswith(ONLY_SLOW) for c in PAGES[name].sessions()[line])
]
DRAWN = [figure for name in PAGES for figure in figures(name)]
SVG = "{http://www.w3.org/2000/svg}"


def differences(wanted: str, shown: str) -> str:
    """Return how an output differs from what a page shows, where `...` stands for any text."""
    if doctest.OutputChecker().check_output(wanted, shown, doctest.ELLIPSIS):
        return ""
    return "\n".join(difflib.ndiff(wanted.splitlines(), shown.splitlines()))


def check(page: Page, line: int, folder: Path, *, real_torchrun: bool) -> None:
    page.place_files(folder)
    for command in page.sessions()[line]:
        result = call(command.words, folder, real_torchrun=real_torchrun)
        wanted, shown = command.output, result.shown
        if real_torchrun and command.words.startswith("torchrun"):
            wanted, shown = as_torchrun_prints(command.output, result)
        about = f"{page.path.name}:{line}: {command.words}"
        assert not differences(wanted, shown), (
            f"{about}\n{differences(wanted, shown)}\n{result.stderr}"
        )
        if not command.words.startswith("toolkit"):
            failed = re.search(r"^\w*(\.\w+)*Error\b", command.output, re.MULTILINE) is not None
            assert failed == bool(result.status), (about, result)


def as_torchrun_prints(output: str, result: Result) -> tuple[str, str]:
    """Return what a page shows of the ranks, and what they printed."""
    lines = output.splitlines(keepends=True)
    if result.status:
        # Among all that the ranks and torchrun itself have to say of it.
        error = re.escape(lines.pop().rstrip("\n")).replace(re.escape("..."), ".*")
        assert re.search(error, result.stderr), result
    return "".join(lines), result.stdout


@pytest.mark.parametrize(("page", "line"), FAST)
def test_commands_print_what_the_page_shows(page: str, line: int, tmp_path: Path) -> None:
    check(PAGES[page], line, tmp_path, real_torchrun=False)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), SESSIONS)
def test_commands_print_the_same_with_torchrun_itself(page: str, line: int, tmp_path: Path) -> None:
    check(PAGES[page], line, tmp_path, real_torchrun=True)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_compiles(page: str) -> None:
    for block in PAGES[page].blocks():
        if block.language == "python":
            compile("\n" * block.line + block.text, f"{page}.md", "exec")


@pytest.mark.parametrize("page", PAGES)
def test_every_script_of_a_page_is_called(page: str) -> None:
    called = " ".join(c.words for session in PAGES[page].sessions().values() for c in session)
    for block in PAGES[page].blocks():
        if block.title and block.title.endswith(".py"):
            text = "".join(b.text for b in PAGES[page].blocks() if b is not block and b.title)
            imported = re.search(rf"^(from|import) {block.title[:-3]}\b", text, re.MULTILINE)
            assert block.title in called or imported, block.title


@pytest.mark.parametrize("figure", DRAWN, ids=lambda figure: figure.name)
def test_a_table_shows_what_was_measured(figure: Figure) -> None:
    data = json.loads(figure.data_file.read_text())
    assert figure.written_into(PAGES[figure.page].text, data) == PAGES[figure.page].text


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_page_has_a_text_in_its_place(page: str) -> None:
    for alternative, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", PAGES[page].text):
        assert len(alternative) > 30, (target, "say what it shows")
        assert (PAGES[page].path.parent / target).is_file(), target


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.svg")), ids=lambda path: path.stem)
def test_a_figure_is_readable_in_the_dark_and_needs_nothing_else(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc")
    text = path.read_text()
    assert "prefers-color-scheme: dark" in text
    assert "<script" not in text
    assert not re.search(r'(href|src)="(?!#)', text)
    assert any(path.name in page.text for page in PAGES.values()), "no page shows it"
