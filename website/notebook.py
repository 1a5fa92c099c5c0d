"""Notebooks as pages: their text, their code, and what the cells have shown."""

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat

_STYLE = re.compile(r"<style\b.*?</style>\s*", re.DOTALL)
_PANDAS = '<table border="1" class="dataframe">'
"""Tables of pandas; on the site they look as other tables do."""

_INDENT = re.compile(r"^[ \t]+", re.MULTILINE)


def markdown(path: Path, images: Path) -> str:
    """Return a notebook as Markdown.

    Args:
        path: The notebook, with the outputs of its last run.
        images: A folder beside the page, for the pictures among the outputs.
    """
    notebook = nbformat.reads(  # type: ignore[no-untyped-call]
        path.read_text(encoding="utf-8"), as_version=4
    )
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(fenced(cell.source, "python"))
            parts += [_shown(output, images) for output in cell.outputs]
    return "\n\n".join(filter(None, parts)) + "\n"


def fenced(text: str, language: str, *, title: str = "") -> str:
    """Return a text in a fence that nothing in it ends."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    head = f'{language} title="{title}"' if title else language
    body = text.rstrip("\n")
    return f"{fence}{head}\n{body}\n{fence}"


def _shown(output: Mapping[str, Any], images: Path) -> str:
    if output["output_type"] == "stream":
        return _block(fenced(output["text"], "text"))
    if output["output_type"] == "error":
        return _block(fenced(f"{output['ename']}: {output['evalue']}", "text"))
    data = output["data"]
    if "image/png" in data:
        images.mkdir(parents=True, exist_ok=True)
        picture = images / f"{len(list(images.iterdir()))}.png"
        picture.write_bytes(base64.b64decode(data["image/png"]))
        return f"![What the cell shows]({images.name}/{picture.name})"
    if "text/html" in data:
        # One block for Markdown: no empty lines, and no indentation that would be code.
        html = _INDENT.sub("", _STYLE.sub("", data["text/html"])).replace(_PANDAS, "<table>")
        html = re.sub(r"\n\s*\n", "\n", html)
        return f'<div class="output">\n{html.strip()}\n</div>'
    return _block(fenced(data["text/plain"], "text"))


def _block(text: str) -> str:
    return f'<div class="output" markdown>\n\n{text}\n\n</div>'
