"""Drawings as SVG files: readable on light and dark pages, and the same for the same data."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING

import matplotlib as mpl
from cycler import cycler
from matplotlib import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

TEXT, GROUND, FAINT = "#010101", "#fefefe", "#b0b0b1"
"""What is drawn in these colours changes with the colours of the page: text, ground, grid."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9")
"""For data: told apart by people who do not see all colours, and on both grounds (Okabe, Ito)."""

_STYLE = """<style>
:root { --text: #1f2328; --ground: #ffffff; --faint: #d0d7de }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --ground: #161b22; --faint: #3d444d }
}
</style>"""
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and copied
    "svg.hashsalt": "figure",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.facecolor": GROUND,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=COLOURS),
    "grid.color": FAINT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "figure.facecolor": GROUND,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 5,
}


@contextmanager
def axes(width: float = 7.0, height: float = 3.4, **subplots: object) -> Iterator[Axes]:
    """Give axes to draw into; sizes are in inches. `axes.figure` is the drawing."""
    with mpl.rc_context(_SETTINGS):
        figure, found = pyplot.subplots(figsize=(width, height), layout="constrained", **subplots)
        yield found
        pyplot.close(figure)


def svg(drawing: Drawing, *, title: str, description: str) -> str:
    """Return a drawing as an SVG file with a title and a description for those who hear it."""
    buffer = io.StringIO()
    with mpl.rc_context(_SETTINGS):
        drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    for colour, name in ((TEXT, "text"), (GROUND, "ground"), (FAINT, "faint")):
        text = text.replace(colour, f"var(--{name})")
    # What has no colour of its own is black.
    head = f"<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>\n{_STYLE}"
    text = re.sub(r"<svg [^>]*>", lambda found: f"{found[0]}\n{head}", text, count=1)
    text = text.replace("<svg ", '<svg role="img" fill="var(--text)" ', 1)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
