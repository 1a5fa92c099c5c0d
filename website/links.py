"""Finds the links of a built site that lead nowhere, and what a page would fetch elsewhere."""

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
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for address in page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.fetched and parts.scheme != "data":
                    wrong.append(f"{name}: fetches {address}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.path.startswith("/") or not target.is_file():
                wrong.append(f"{name}: {address}: no such page")
            elif parts.fragment and target in pages:
                anchor = unquote(parts.fragment)
                if anchor not in pages[target].anchors:
                    wrong.append(f"{name}: {address}: no such anchor")
    return wrong
