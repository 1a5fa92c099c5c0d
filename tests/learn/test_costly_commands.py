"""Commands that would cost each test run too much: a `bash` block, and a `text` block below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.learn.support.page import pages
from tests.learn.support.runner import call
from tests.learn.test_learn_pages import differences

PAIR = re.compile(
    r"^```bash\n(python -m train[^\n]*)\n```\n\n(?:The last lines:\n\n)?```text\n(.*?)^```$",
    re.M | re.S,
)
PAGES = ("collectives", "eight-gpus", "fsdp", "pipelines")
COMMANDS = [(name, *pair) for name in PAGES for pair in PAIR.findall(pages()[name].text)]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command", "shown"), COMMANDS)
def test_a_costly_command_prints_what_the_page_shows(
    page: str, command: str, shown: str, tmp_path: Path
) -> None:
    pages()[page].place_files(tmp_path)
    # A block without a title, which begins with the name of its file.
    for block in pages()[page].blocks():
        if named := re.match(r"# (\w+\.py)\n", block.text):
            (tmp_path / named[1]).write_text(block.text)
    result = call(command, tmp_path)
    assert result.status == (2 if "does not fit" in shown else 0), result.stderr
    # The page may end before the output does.
    assert not differences(f"{shown}...", result.stdout)


def test_pages_show_costly_commands() -> None:
    assert [page for page, _, _ in COMMANDS] == [
        "collectives",
        *["eight-gpus"] * 2,
        *["fsdp"] * 2,
        "pipelines",
    ]
