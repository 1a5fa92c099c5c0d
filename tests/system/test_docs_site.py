"""The site of the documentation: built once, every link followed, and shown by a real browser."""

import doctest
import fcntl
import html
import importlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains, Chrome

import toolkit
from tests.conftest import ROOT, Until
from tests.support.browser import chromium, log_of
from tests.support.golden import EXAMPLES
from website import build, link_check, notebook, sources, versions

WIDE = "return document.documentElement.scrollWidth - innerWidth"
BACKGROUND = "return getComputedStyle(document.body).backgroundColor"
PAGES = (
    "index.html",
    "gallery/index.html",
    "gallery/slurm-digits.html",
    "reference/python-runs.html",
)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this version, which all processes of the test run share."""
    base = tmp_path_factory.getbasetemp()  # below that of the test run, with several processes
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "docs-site"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = shared / "site" / toolkit.__version__
        return done if done.exists() else build.build(shared / "site", shared / "stage")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


def shown(browser: Chrome, page: Path, *, width: int = 1280, dark: bool = False) -> None:
    """Show a page on a screen of a width."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())


def code_of(page: Path) -> list[str]:
    """Return what the blocks of code of a page hold."""
    blocks = re.findall(r"<pre.*?><code>(.*?)</code></pre>", page.read_text(), re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]+>", "", block)) for block in blocks]


# ---- The site


def test_every_link_leads_somewhere_and_nothing_is_fetched_from_a_network(site: Path) -> None:
    assert link_check.problems(site) == []
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(.?(https?:)?//", style.read_text()), style


def test_every_page_of_the_docs_is_on_the_site(site: Path) -> None:
    pages = [sources.place_of(str(path.relative_to(ROOT))) for path in ROOT.glob("docs/**/*.md")]
    notebooks = [f"tutorials/{path.stem}.md" for path in ROOT.glob("notebooks/*.ipynb")]
    for page in [*pages, *notebooks]:
        assert (site / page).with_suffix(".html").is_file(), page


def test_every_public_name_is_documented(site: Path) -> None:
    text = "".join(page.read_text() for page in site.glob("reference/python-*.html"))
    anchors = set(re.findall(r'id="toolkit\.(\w+)"', text))
    assert set(toolkit.__all__) <= anchors


@pytest.mark.parametrize("path", EXAMPLES)
def test_the_gallery_shows_what_is_committed(site: Path, path: str) -> None:
    page = (site / sources.place_of(path)).with_suffix(".html")
    job, profile, *_ = EXAMPLES[path]
    command, *shown_files = code_of(page)
    assert command.startswith(f"toolkit render {job} --to {profile}")
    files = [(ROOT / file).read_text().rstrip("\n") for file in (job, profile, path)]
    assert [text.rstrip("\n") for text in shown_files] == files


def test_the_index_of_the_search_has_the_sections_of_the_pages(site: Path) -> None:
    index = json.loads((site / "search.json").read_text())
    places = {item["location"] for item in index["items"]}
    assert "how-to/failures.html#the-same-failure-twice" in places
    assert not [place for place in places if place.startswith("files/")]


def test_licences_of_what_the_site_holds_are_kept(site: Path) -> None:
    text = "\n".join(code_of(site / "licenses.html"))
    for owner in ("Zensical and contributors", "Zeno Rocha", "Lucide", "Martin Donath"):
        assert owner in text


# ---- In a browser


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(360, True, id="phone, dark"),
        pytest.param(1280, False, id="desk, light"),
        pytest.param(360, False, id="phone, light", marks=pytest.mark.slow),
        pytest.param(1280, True, id="desk, dark", marks=pytest.mark.slow),
    ],
)
def test_a_page_is_shown_without_a_complaint_and_asks_no_network(
    browser: Chrome, site: Path, page: str, width: int, dark: bool
) -> None:
    browser.get("about:blank")
    log_of(browser, "browser"), log_of(browser, "performance")
    shown(browser, site / page, width=width, dark=dark)
    assert [entry["message"] for entry in log_of(browser, "browser")] == []
    messages = [json.loads(e["message"])["message"] for e in log_of(browser, "performance")]
    asked = [m["params"]["request"]["url"] for m in messages if "request" in m.get("params", {})]
    assert asked and [url for url in asked if not url.startswith(("file://", "data:"))] == []
    assert browser.execute_script(WIDE) <= 0, "nobody needs to scroll aside"
    bright = sum(map(int, re.findall(r"\d+", browser.execute_script(BACKGROUND))[:3]))
    assert (bright < 200) is dark


def test_the_search_finds_a_page_without_a_server(
    browser: Chrome, site: Path, until: Until
) -> None:
    shown(browser, site / "index.html")
    until(lambda: browser.execute_script(_OPEN), "the search opens", 120)
    ActionChains(browser).send_keys("watchdog").perform()

    def dialog() -> str:
        return str(browser.execute_script(_DIALOG))

    until(lambda: "hangs.html" in dialog(), "a result", 120, seen=dialog)


_OPEN = """
let focused = document.activeElement;
while (focused?.shadowRoot) focused = focused.shadowRoot.activeElement;
if (focused?.localName === "input") return true;
if (Date.now() > (window.again ?? 0)) {  // a click before the script has run is lost
  document.querySelector(".md-search__button").click();
  window.again = Date.now() + 3000;
}
return false;
"""
"""Open the search, and return whether its field has the focus; it is in a shadow root."""

_DIALOG = """
const roots = [...document.querySelectorAll("*")].map((one) => one.shadowRoot).filter(Boolean);
return roots.map((root) => root.innerHTML).join();
"""


# ---- How it is built


@pytest.mark.parametrize("module", [sources, versions])
def test_the_examples_of_the_docstrings_hold(module: object) -> None:
    assert doctest.testmod(importlib.import_module(module.__name__)).failed == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="b.html">', "a.html: b.html: no such page"),
        ('<a href="/a.html">', "a.html: /a.html: no such page"),
        ('<img src="b.png">', "a.html: b.png: no such page"),
        ('<a href="#b">', "a.html: #b: no such anchor"),
        ('<script src="https://example.org/x.js">', "a.html: fetches https://example.org/x.js"),
        ('<link rel="stylesheet" href="//example.org/x">', "a.html: fetches //example.org/x"),
    ],
)
def test_what_is_wrong_with_a_link_is_named(tmp_path: Path, body: str, problem: str) -> None:
    page = tmp_path / "a.html"
    page.write_text(f'<a href="#here" id="here"><a href="https://example.org">{body}')
    assert link_check.problems(tmp_path) == [problem]


def test_a_dead_anchor_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_page(folder: Path) -> Path:
        (folder / "pages").mkdir()
        (folder / "pages/index.md").write_text("# Start\n\n[nowhere](#nowhere)\n")
        config = folder / "zensical.toml"
        config.write_text('[project]\nsite_name = "x"\ndocs_dir = "pages"\nsite_dir = "built"\n')
        return config

    monkeypatch.setattr(build, "staged", one_page)
    with pytest.raises(build.Broken, match="nowhere"):
        build.build(tmp_path / "site", tmp_path / "stage")
    assert not (tmp_path / "site").exists()


def test_links_lead_to_where_their_targets_stand_on_the_site() -> None:
    needed: list[str] = []
    text = "[a](../../jobs/digits.yaml) [b](slurm.md#x) [c](https://x.org)\n```\n[a](slurm.md)\n```"
    assert sources.adapted("docs/how-to/check.md", text, "how-to/check.md", needed.append) == (
        "[a](../files/jobs/digits.yaml.md) [b](slurm.md#x) [c](https://x.org)\n"
        "```\n[a](slurm.md)\n```"
    )
    assert needed == ["jobs/digits.yaml", "docs/how-to/slurm.md"]


def test_a_pipe_in_the_code_of_a_table_is_a_pipe() -> None:
    row = "| `a\\|b` | c\\|d |"
    assert sources.adapted("README.md", row, "index.md", print) == "| `a|b` | c\\|d |"


def test_a_notebook_becomes_text_code_and_what_the_cells_have_shown(tmp_path: Path) -> None:
    table = '<div>\n<style scoped>\n  p {}\n</style>\n<table border="1" class="dataframe">\n'
    picture = "aGVsbG8="
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": "three ``` ticks\n"},
        {
            "output_type": "display_data",
            "metadata": {},
            "data": {"text/html": f"{table}\n\n  <tr></table></div>", "text/plain": "x"},
        },
        {
            "output_type": "execute_result",
            "execution_count": 1,
            "metadata": {},
            "data": {"image/png": picture, "text/plain": "x"},
        },
    ]
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": "# Title"},
        {
            "cell_type": "code",
            "metadata": {},
            "source": "run()",
            "execution_count": 1,
            "outputs": outputs,
        },
    ]
    whole = {"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": cells}
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps(whole))
    assert notebook.markdown(path, tmp_path / "one") == (
        "# Title\n\n```python\nrun()\n```\n\n"
        '<div class="output" markdown>\n\n````text\nthree ``` ticks\n````\n\n</div>\n\n'
        '<div class="output">\n<div>\n<table>\n<tr></table></div>\n</div>\n\n'
        "![What the cell shows](one/0.png)\n"
    )
    assert (tmp_path / "one/0.png").read_bytes() == b"hello"


def test_latest_leads_to_the_newest_version(tmp_path: Path) -> None:
    for version in ("0.9.0", "0.10.0rc1", "0.10.0", "0.2.0"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "index.html").write_text(version)
        versions.write(tmp_path, version)
    assert (tmp_path / "latest/index.html").read_text() == "0.10.0"
    assert json.loads((tmp_path / "versions.json").read_text()) == [
        "0.10.0",
        "0.10.0rc1",
        "0.9.0",
        "0.2.0",
    ]
    assert link_check.problems(tmp_path) == []
