"""The pages of docs/learn: their scripts, the commands that they show, and what these print.

A block of code with a title is a file: ```` ```python title="train.py" ````. A block of the
language `console` holds commands, each after `$ `, and below each of them what it prints. `...`
stands for any text. A file beside the page, in the folder of its name, can be called as well. The
line `<!-- files: PAGE -->` adds the files of another page, which the reader has saved before.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

LEARN = ROOT / "docs/learn"
_FENCE = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    language: str
    title: str | None
    text: str
    line: int
    """The line of the page on which it begins, from 1."""


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    words: str
    output: str
    """What it prints: lines that each end with a line break."""


@dataclass(frozen=True)
class Page:
    """A page of docs/learn."""

    path: Path

    @property
    def name(self) -> str:
        """Its file's name, without the ending."""
        return self.path.stem

    @property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text(encoding="utf-8")

    def blocks(self) -> list[Block]:
        """Return its blocks of code in their order."""
        text = self.text
        return [
            Block(
                found["language"],
                found["title"],
                found["text"],
                text.count("\n", 0, found.start()) + 1,
            )
            for found in _FENCE.finditer(text)
        ]

    def sessions(self) -> dict[int, list[Command]]:
        """Return the commands of each `console` block by its line."""
        return {b.line: commands(b.text) for b in self.blocks() if b.language == "console"}

    def place_files(self, folder: Path) -> None:
        """Write the files of the page into a folder, and those of the pages that it builds on."""
        for name in re.findall(r"^<!-- files: ([\w-]+) -->$", self.text, re.MULTILINE):
            Page(self.path.with_name(f"{name}.md")).place_files(folder)
        for block in self.blocks():
            if block.title:
                path = folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
        if (beside := self.path.with_suffix("")).is_dir():
            shutil.copytree(beside, folder / self.name, dirs_exist_ok=True)


def pages() -> dict[str, Page]:
    """Return the pages by name."""
    return {path.stem: Page(path) for path in sorted(LEARN.glob("*.md"))}


def commands(session: str) -> list[Command]:
    """Return the commands of a session at a terminal.

    >>> commands("$ python a.py\\n1\\n2\\n$ python b.py\\n")
    [Command(words='python a.py', output='1\\n2\\n'), Command(words='python b.py', output='')]
    """
    _, *parts = re.split(r"^\$ ", session, flags=re.MULTILINE)
    return [Command(words, output) for words, _, output in (p.partition("\n") for p in parts)]
