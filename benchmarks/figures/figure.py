"""A figure of a page: what it measures, how it is drawn, and the table beside it.

`benchmarks/figures/PAGE.py` holds those of docs/learn/PAGE.md, in `FIGURES`. What was measured
stands in docs/learn/figures/NAME.json, the drawing in NAME.svg, and the table in the page, between
`<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

ROOT = Path(__file__).parent.parent.parent
PAGES = ROOT / "docs/learn"
FIGURES = PAGES / "figures"

Data = Mapping[str, Any]
"""What was measured: values that JSON can hold, with units in their names."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of a page."""

    name: str
    """The stem of its files."""

    page: str
    """The stem of its page."""

    title: str
    """What is shown, in some words: for those who cannot see the drawing, too."""

    measure: Callable[[], Data]
    """Measure it anew; takes minutes at most, on two cores with nothing beside it."""

    draw: Callable[[Data], Drawing] | None = None
    """Draw it; None for a table alone."""

    table: Callable[[Data], str] | None = None
    """Return the table in Markdown, without a line break at the end; None for a drawing alone."""

    data: str = ""
    """The figure whose measurement it shows, if that is another one."""

    @property
    def data_file(self) -> Path:
        """The file of what was measured."""
        return FIGURES / f"{self.data or self.name}.json"

    @property
    def drawing_file(self) -> Path:
        """The file of the drawing."""
        return FIGURES / f"{self.name}.svg"

    def written_into(self, page: str, data: Data) -> str:
        """Return the text of a page with the table of the data.

        Raises:
            ValueError: the page has no place for the table.
        """
        if self.table is None:
            return page
        place = re.compile(rf"(<!-- table: {self.name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(page):
            raise ValueError(f"{self.page}.md has no line '<!-- table: {self.name} -->'")
        parts = filter(None, (self.table(data), machine_line(data)))
        text = "\n" + "".join(f"{part}\n\n" for part in parts)
        return place.sub(lambda found: found[1] + text + found[2], page)

    def write(self, data: Data) -> None:
        """Write data, drawing and table."""
        FIGURES.mkdir(exist_ok=True)
        self.data_file.write_text(compact_json(data), encoding="utf-8")
        if self.draw is not None:
            from benchmarks.figures.drawing import svg

            description = f"{self.title}. {self.table(data) if self.table else ''}".strip()
            text = svg(self.draw(data), title=self.title, description=description)
            self.drawing_file.write_text(text, encoding="utf-8")
        page = PAGES / f"{self.page}.md"
        page.write_text(self.written_into(page.read_text(encoding="utf-8"), data), encoding="utf-8")


def compact_json(data: Data) -> str:
    """Return data as JSON, with lists and mappings that hold no others on one line.

    >>> print(compact_json({"lr": [0.1, 0.2], "machine": {"cores": "2"}}), end="")
    {
     "lr": [0.1, 0.2],
     "machine": {"cores": "2"}
    }
    """
    text = json.dumps(data, indent=1) + "\n"
    return re.sub(r"([\[{])\n\s*([^\[\]{}]*?)\n\s*([\]}])", _on_one_line, text)


def _on_one_line(found: re.Match[str]) -> str:
    return found[1] + re.sub(r",\n\s*", ", ", found[2]) + found[3]


def figures(page: str) -> tuple[Figure, ...]:
    """Return the figures of a page."""
    name = f"benchmarks.figures.{page.replace('-', '_')}"
    if importlib.util.find_spec(name) is None:
        return ()
    found: tuple[Figure, ...] = importlib.import_module(name).FIGURES
    return found


def machine() -> dict[str, str]:
    """Return on what is measured: a part of each figure's data, as `machine`."""
    import torch

    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": model[1].strip() if model else platform.machine(),
        "torch": torch.__version__.partition("+")[0],
    }


def machine_line(data: Data) -> str:
    """Return the line below a table: on what it was measured; '' where nothing is measured."""
    if "machine" not in data:
        return ""
    found = data["machine"]
    return f"*Measured on {found['cores']} cores ({found['processor']}), torch {found['torch']}.*"
