"""Where each file of the project stands on the site, and the links between them."""

import posixpath
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
_PLACES = {
    "README.md": "index.md",
    "docs/index.md": "all-pages.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "slurm/sandbox/README.md": "how-to/sandbox.md",
    "slurm/examples": "gallery/index.md",
    "k8s/examples": "gallery/index.md",
}
"""The pages that do not stand where their path says."""

_EXAMPLE = re.compile(r"(slurm|k8s)/examples/(.+)\.\w+")
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_FENCE = re.compile(r"\s*(```+|~~~+)")


def place_of(path: str) -> str:
    """Return the place on the site of a file or folder of the project.

    >>> place_of("docs/how-to/slurm.md"), place_of("jobs/digits.yaml"), place_of("k8s/base")
    ('how-to/slurm.md', 'files/jobs/digits.yaml.md', 'files/k8s/base.md')
    """
    if path in _PLACES:
        return _PLACES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if example := _EXAMPLE.fullmatch(path):
        return f"gallery/{example[1]}-{example[2]}.md"
    if path.endswith(".ipynb"):
        return f"tutorials/{Path(path).stem}.md"
    return f"files/{path}.md"


def relative(place: str, page: str) -> str:
    """Return a place as a page links to it."""
    return posixpath.relpath(place, posixpath.dirname(page) or ".")


def tracked(folder: str) -> list[str]:
    """Return the files of a folder that git knows, or all of them where there is no git."""
    argv = ["git", "ls-files", "-z", "--", folder]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout:
        return sorted(filter(None, done.stdout.split("\0")))
    return sorted(str(f.relative_to(ROOT)) for f in (ROOT / folder).rglob("*") if f.is_file())


def outside_code(change: Callable[[str], str], text: str) -> str:
    """Return a text of Markdown with the lines outside of fences changed."""
    lines, fence = [], ""
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and line.strip() == mark[1]:
            fence = ""
        elif not fence:
            line = change(line)
        lines.append(line)
    return "\n".join(lines)


def adapted(path: str, text: str, page: str, need: Callable[[str], None]) -> str:
    """Return a page of the project as it stands on the site.

    Args:
        path: The file in the project, from which its links lead.
        text: What it holds.
        page: Its place on the site.
        need: Called with each path of the project that is linked to.
    """

    def link(match: re.Match[str]) -> str:
        start, target, anchor, end = match[1], match[2], match[3] or "", match[4]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if "://" in target or target.startswith("mailto:") or not (ROOT / found).exists():
            return match[0]
        need(found)
        return f"{start}{relative(place_of(found), page)}{anchor}{end}"

    def line(one: str) -> str:
        if one.startswith("|"):  # GitHub reads \| in the code of a table as |, Python-Markdown not
            one = _CODE.sub(lambda code: code[0].replace("\\|", "|"), one)
        return _LINK.sub(link, one)

    return outside_code(line, text)
