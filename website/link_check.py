"""Finds the links of a built site that lead nowhere, and what a page would fetch elsewhere."""

import posixpath
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FETCHED = {"script", "img", "iframe", "source", "video", "audio"}
_FETCHED_BY_LINK = {"stylesheet", "icon", "preload", "preconnect", "modulepreload", "manifest"}


@dataclass
class _Page(HTMLParser):
    """The anchors of a page, its links, and the addresses that a browser fetches by itself."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[key] or "" for key in ("id", "name") if key in given}
        addresses = [given[key] or "" for key in ("href", "src") if key in given]
        self.links += addresses
        by_link = tag == "link" and _FETCHED_BY_LINK & set((given.get("rel") or "").split())
        if tag in _FETCHED or by_link:
            self.fetched += addresses


def problems(site: Path) -> list[str]:
    """Return what is wrong with the links of all pages below a folder."""
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    pages = {}
    for name in sorted(files):
        if name.endswith(".html"):
            pages[name] = page = _Page()
            page.feed((site / name).read_text(encoding="utf-8"))
    wrong = []
    for name, page in pages.items():
        for address in page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.fetched and parts.scheme != "data":
                    wrong.append(f"{name}: fetches {address}")
                continue
            path = unquote(parts.path)
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
            if path and target not in files:
                if not _leads_to_the_versions(target):
                    wrong.append(f"{name}: {address}: no such page")
            elif anchor := unquote(parts.fragment):
                other = pages.get(target if path else name)
                if other is not None and anchor not in other.anchors:
                    wrong.append(f"{name}: {address}: no such anchor")
    return wrong


def _leads_to_the_versions(target: str) -> bool:
    """Whether a link leads to the list of all versions, which is beside the site of each one."""
    return target == "../index.html"
