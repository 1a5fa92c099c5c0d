"""Build the site: `make docs` (`python -m website.build`).

Zensical has no hooks. So this stages all pages as plain Markdown, with the files that they link to,
and has Zensical build the folder; then it looks at every link of the result.
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import Any

import toolkit
from website import gallery, link_check, notebook, python_api, versions
from website.sources import ROOT, adapted, place_of, relative, tracked

HERE = Path(__file__).parent
INDEX = ROOT / "docs/index.md"
NOTEBOOKS = ("quickstart", "sweep", "kubernetes")
"""The tutorials in the order in which a reader takes them."""

SECTIONS = {
    "to learn": ("Learn", "learn"),
    "to do something": ("How-to", "how-to"),
    "to look something up": ("Reference", "reference"),
    "to understand": ("Explanation", "explanation"),
}
"""The tables of docs/index.md, and the parts of the navigation that they become."""

PARTS_OF_HOW_TO = {
    "to come from another tool": "From another tool",
    "to get rid of an error": "Error messages",
}
"""More tables, and the groups of pages below How-to that they become."""

_ROW = re.compile(r"^\| \[`?([^`\]]+)`?\]\(([^)]+\.md)\)", re.MULTILINE)
_LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".sbatch": "bash",
    ".sh": "bash",
    ".j2": "jinja",
    ".toml": "toml",
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
_HEADS = {
    "index.md": "---\nhide: [navigation, toc]\n---\n\n",
    "all-pages.md": _NOT_SEARCHED,
    "changelog.md": _NOT_SEARCHED,
}

Nav = list[dict[str, Any]]


class Broken(Exception):
    """The site cannot be built; holds what must be mended."""


class Stage:
    """A folder that Zensical builds: the pages, and the files that they link to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = folder / "pages"
        self._placed: set[str] = set()

    def write(self, place: str, text: str) -> None:
        """Write a page."""
        path = self.pages / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def add(self, path: str) -> None:
        """Place a file or folder of the project, and what it links to."""
        if path in self._placed:
            return
        self._placed.add(path)
        place, source = place_of(path), ROOT / path
        if place.startswith("gallery/"):
            return
        if source.is_dir():
            self.write(place, self._listing(path, place))
        elif source.suffix == ".md":
            text = self.adapt(path, source.read_text(encoding="utf-8"), place)
            self.write(place, _HEADS.get(place, "") + text)
        elif source.suffix == ".ipynb":
            text = notebook.markdown(source, self.pages / f"tutorials/{source.stem}")
            self.write(place, self.adapt(path, text, place))
        elif path.startswith("docs/"):
            self._copy(source, place)
        else:
            self._copy(source, place.removesuffix(".md"))
            page = f"{_NOT_SEARCHED}# {path}\n\n[The file]({source.name})\n"
            with contextlib.suppress(UnicodeDecodeError):  # such as an archive
                text = source.read_text(encoding="utf-8")
                page += f"\n{notebook.fenced(text, _LANGUAGES.get(source.suffix, 'text'))}\n"
            self.write(place, page)

    def adapt(self, path: str, text: str, place: str) -> str:
        """Return a text of the project with its links, whose targets are placed, too."""
        return adapted(path, text, place, self.add)

    def _listing(self, folder: str, place: str) -> str:
        lines = []
        for path in tracked(folder):
            self.add(path)
            lines.append(f"- [{path}]({relative(place_of(path), place)})")
        return f"{_NOT_SEARCHED}# {folder}\n\n" + "\n".join(lines) + "\n"

    def _copy(self, source: Path, place: str) -> None:
        (self.pages / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, self.pages / place)


def staged(folder: Path) -> Path:
    """Stage all pages in an empty folder; return the configuration for Zensical."""
    stage = Stage(folder)
    for page in sorted(ROOT.glob("docs/**/*.md")):
        stage.add(str(page.relative_to(ROOT)))
    for path in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        stage.add(path)
    for place, text in {**gallery.pages(), **python_api.pages()}.items():
        stage.write(place, text)
    stage.write("licenses.md", _licenses())
    shutil.copytree(HERE / "assets", stage.pages / "assets")
    values = {
        "version": toolkit.__version__,
        "nav": _toml(_navigation(stage)),
        "overrides": str(HERE / "overrides"),
        "root": str(ROOT),
    }
    config = folder / "zensical.toml"
    template = (HERE / "zensical.template.toml").read_text(encoding="utf-8")
    config.write_text(Template(template).substitute(values), encoding="utf-8")
    return config


def _navigation(stage: Stage) -> Nav:
    """Return the navigation, and write the first page of each part."""
    nav: Nav = [{"Start": "index.md"}, {"Tutorial": _tutorials(stage)}]
    index = INDEX.read_text(encoding="utf-8")
    for heading, (title, folder) in SECTIONS.items():
        text, entries = _table(index, heading)
        first = f"{folder}/index.md"
        if title == "How-to":
            entries.append({"The sandbox": place_of("slurm/sandbox/README.md")})
            for part, name in PARTS_OF_HOW_TO.items():
                rows, pages_of_part = _table(index, part)
                text += f"\n\n## {name}\n\n{rows}"
                entries.append({name: pages_of_part})
        if title == "Reference":
            text += "\n| [Python](python.md) | every public name of `import toolkit` |"
            entries.append({"Python": _python()})
        stage.write(first, stage.adapt("docs/index.md", f"# {title}\n\n{text}\n", first))
        nav.append({title: [first, *entries]})
    pages: Nav = [{title: place} for place, title in gallery.titles().items()]
    nav.insert(4, {"Gallery": ["gallery/index.md", *pages]})
    nav.append(
        {
            "Project": [
                {"All pages": "all-pages.md"},
                {"Changes": "changelog.md"},
                {"Contributing": "contributing.md"},
                {"Reporting a vulnerability": "reporting.md"},
                {"Licences of the site": "licenses.md"},
            ]
        }
    )
    return nav


def _table(index: str, heading: str) -> tuple[str, Nav]:
    """Return a table of the index without its heading, and the pages that it names."""
    (table,) = re.findall(rf"^\| {heading} \|.*?(?=\n\n|\Z)", index, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\| [^|]* \|", "| |", table, count=1)
    return text, [{name: place_of(f"docs/{path}")} for name, path in _ROW.findall(table)]


def _tutorials(stage: Stage) -> list[Any]:
    """Return the entries of the tutorials, and write their first page."""
    assert {path.stem for path in ROOT.glob("notebooks/*.ipynb")} == set(NOTEBOOKS)
    first = "tutorials/index.md"
    lines = [
        "# Tutorial",
        "Notebooks that ran: what you see below a cell is what it printed. The tests run them "
        "again. Open one with Jupyter to change it.",
    ]
    entries: list[Any] = [first]
    rows = []
    for name in NOTEBOOKS:
        stage.add(f"notebooks/{name}.ipynb")
        text = (stage.pages / f"tutorials/{name}.md").read_text(encoding="utf-8")
        title, introduction = text.removeprefix("# ").split("\n\n", 2)[:2]
        rows.append(f"## [{title}]({name}.md)\n\n{introduction}")
        entries.append({title: f"tutorials/{name}.md"})
    stage.write(first, "\n\n".join([*lines, *rows]) + "\n")
    return entries


def _python() -> list[Any]:
    titles = {f"reference/python-{page}.md": title for page, (title, _) in python_api.PAGES.items()}
    return [
        {"All names": "reference/python.md"},
        *({title: place} for place, title in titles.items()),
    ]


def _licenses() -> str:
    """Return the page with the licences of what the built site holds beside our own text."""
    theme = files("zensical") / "templates"
    texts = {
        "Zensical (styles, scripts, templates)": distribution("zensical").read_text(
            "licenses/LICENSE.md"
        ),
        "Libraries in the script of Zensical": _text(theme / "assets/javascripts/LICENSE"),
        "Lucide (icons)": _text(theme / ".icons/lucide/LICENSE"),
        "Material Design Icons": _text(theme / ".icons/material/LICENSE"),
        "iframe-worker": _text(HERE / "assets/iframe-worker.LICENSE"),
    }
    parts = [
        "# Licences of the site",
        "The text of these pages is that of torch-deploy-toolkit, Apache-2.0. The site also holds:",
    ]
    for name, text in texts.items():
        assert text, name
        parts += [f"## {name}", notebook.fenced(text, "text")]
    return "\n\n".join(parts) + "\n"


def _text(path: Traversable) -> str:
    return path.read_text(encoding="utf-8")


def _toml(value: Any) -> str:
    """Return lists, tables and strings on one line of TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def build(site: Path, stage: Path) -> Path:
    """Build the site of this version.

    Args:
        site: The folder of all versions.
        stage: A folder for what is built from; it is emptied first.

    Returns:
        The folder of this version.

    Raises:
        Broken: A link leads nowhere, or Zensical has found something.
    """
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    config = staged(stage)
    argv = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)]
    done = subprocess.run(argv, cwd=stage, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = _COLOUR.sub("", f"{done.stdout}{done.stderr}")
        raise Broken(said.partition("Traceback (most recent call last)")[0])
    built = site / toolkit.__version__
    shutil.rmtree(built, ignore_errors=True)
    built.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(stage / "built", built)
    (built / "404.html").unlink()  # for a server at the root of a domain only
    versions.write(site, toolkit.__version__)
    if wrong := link_check.problems(built):
        raise Broken("\n".join(wrong))
    return built


def main() -> int:
    """Build the site; return 1 if something must be mended first."""
    parser = argparse.ArgumentParser(description="Build the site of the documentation.")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="the folder to write")
    given = parser.parse_args()
    try:
        built = build(given.site.resolve(), ROOT / ".cache/site")
    except Broken as error:
        print(error, file=sys.stderr)
        return 1
    print(f"built: {built / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
