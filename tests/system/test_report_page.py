"""The report in a real browser: drawn without a complaint, for every screen, and for paper."""

import base64
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import toolkit
from tests.conftest import Until
from tests.support.browser import chromium, log_of
from tests.support.told_run import ToldRun, run_at
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.views.goodput import Goodput

PHASES = {"start": 4.0, "imports": 3.0, "process_group": 1.0, "setup": 2.0, "restore": 0.5}


def recorded(folder: Path, *, name: str, lr: float, steps: int = 3000) -> ToldRun:
    """Return a run of two attempts, as `train` records one."""
    folder.mkdir()
    with (folder / "events.jsonl").open("w") as events, (folder / "metrics.jsonl").open("w") as log:
        for attempt, first, at in ((0, 1, 5.0), (1, steps // 2, 2000.0)):
            row = {"version": 1, "attempt": attempt, "restart": 0}
            start = {"event": "start", "step": 0, "world_size": 4, "global_batch": 64}
            ready = {"event": "ready", "step": 0, "began": at, "phases": PHASES}
            at += sum(PHASES.values())
            events.write(json.dumps({**row, "time": at, **start}) + "\n")
            events.write(json.dumps({**row, "time": at, **ready}) + "\n")
            for step in range(first, steps // 2 + 200 if attempt == 0 else steps + 1):
                at += 1
                figures = {"loss": 2 / (1 + lr * step), "lr": lr, "samples_per_s": 64.0}
                log.write(json.dumps({**row, "time": at, "step": step, **figures}) + "\n")
    watchdog = folder / "logs/attempt-1/watchdog"
    watchdog.mkdir(parents=True)
    with (watchdog / "ranks.jsonl").open("w") as file:
        for at in range(2030, 3000, 30):
            waits = [[rank, 0.02 if rank == 2 else 0.2 + at % 7 / 100, "n1"] for rank in range(4)]
            file.write(json.dumps({"version": 1, "time": at, "waits": waits}) + "\n")
    for name_of_file, at, text in (
        ("attempt-0/reason", 1720, "preempted: Slurm has taken the nodes; queued again"),
        ("attempt-1/since", 2000, "0"),
    ):
        path = folder / "logs" / name_of_file
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{text}\n")
        os.utime(path, (at, at))
    (folder / "outcome.json").write_text(json.dumps({"status": "done", "steps": steps}))
    (folder / "job.yaml").write_text(f"name: {name}\nargs: [--lr, '{lr}']\n")
    run = run_at(folder, name=name)
    run.told = RunStatus(state=RunState.SUCCEEDED)
    return run


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToldRun:
    return recorded(tmp_path_factory.mktemp("runs") / "run", name="digits-1", lr=0.1)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, run: ToldRun) -> dict[str, Path]:
    """A report of one run, and one of three."""
    folder = tmp_path_factory.mktemp("pages")
    others = [recorded(folder / f"run-{n}", name=f"digits-{n}", lr=0.01 * n) for n in (2, 3)]
    runs: list[Run] = [run, *others]
    return {
        "one": run.report().save(folder / "one.html"),
        "three": toolkit.report(runs).save(folder / "three.html"),
    }


def shown(browser: Chrome, page: Path, *, width: int = 1280, dark: bool = False) -> None:
    """Show a page on a screen of a width."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())


def complaints(browser: Chrome) -> list[Any]:
    return [entry["message"] for entry in log_of(browser, "browser")]


def requests(browser: Chrome) -> list[str]:
    """Return what the browser has asked for since the last question."""
    entries = log_of(browser, "performance")
    messages = (json.loads(entry["message"])["message"] for entry in entries)
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("page", ["one", "three"])
def test_a_page_is_drawn_without_a_complaint_and_asks_for_nothing(
    browser: Chrome, pages: dict[str, Path], page: str, width: int, dark: bool
) -> None:
    browser.get("about:blank")
    complaints(browser), requests(browser)
    shown(browser, pages[page], width=width, dark=dark)
    assert complaints(browser) == []
    assert requests(browser) == [pages[page].as_uri()]
    plots = browser.find_elements(By.CSS_SELECTOR, ".plot[data-curve]")
    assert [plot.get_attribute("data-curve") for plot in plots] == ["loss", "lr", "samples_per_s"]
    inked = browser.execute_script(_INKED)
    assert len(inked) == 4, "three curves; the ranks of one run, or what differs between three"
    assert all(count > 50 for count in inked), "each canvas has lines in colour"
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(wide) == 0, "nobody needs to scroll aside"
    background = "return getComputedStyle(document.body).backgroundColor"
    bright = sum(map(int, browser.execute_script(background)[4:-1].split(",")))
    assert (bright < 200) is dark


_INKED = """
return [...document.querySelectorAll("canvas")].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) {
    const [r, g, b, a] = data.slice(at, at + 4);
    if (a > 128 && Math.max(r, g, b) - Math.min(r, g, b) > 60) count += 1;
  }
  return count;
});
"""


def test_the_numbers_on_the_page_are_those_of_the_run(
    browser: Chrome, pages: dict[str, Path], run: ToldRun
) -> None:
    shown(browser, pages["one"])
    goodput: Goodput = run.goodput()
    rows = browser.execute_script(
        "return [...document.querySelectorAll('.goodput tbody tr')].map((row) =>"
        " [row.cells[0].innerText.trim(), Number(row.cells[2].dataset.seconds)])"
    )
    assert dict(rows) == {name: s for name, s in goodput.seconds.items() if s > 0}
    figures = browser.find_element(By.CSS_SELECTOR, ".figures").text.split("\n")
    assert figures[:2] == ["goodput", f"{goodput.share:.1%}"]
    assert "3000 of 3000" in figures
    assert str(goodput.steps_again) == figures[figures.index("steps made again") + 1] == "200"


def test_the_pointer_reads_a_value_of_the_run(
    browser: Chrome, pages: dict[str, Path], run: ToldRun
) -> None:
    shown(browser, pages["one"])
    by_step = {row["step"]: row["loss"] for row in run.metrics().to_dict("records")}
    read = browser.execute_script(
        "const over = document.querySelector('.plot[data-curve=loss] .u-over');"
        "const box = over.getBoundingClientRect();"
        "over.dispatchEvent(new MouseEvent('mousemove', {bubbles: true,"
        " clientX: box.left + box.width / 2, clientY: box.top + 20}));"
        "return new Promise((done) => setTimeout(() => done("
        " [...document.querySelectorAll('.plot[data-curve=loss] .u-value')]"
        "  .map((cell) => cell.textContent)), 200));"
    )
    step, loss = int(read[0]), float(read[1])
    assert 1000 < step < 2000
    assert loss == pytest.approx(by_step[step], rel=1e-4)


MARKS = """
const { left, width } = document.querySelector('.plot[data-curve=loss] .u-over')
  .getBoundingClientRect();
return [...document.querySelectorAll('.plot[data-curve=loss] .mark')].map((mark) => {
  const box = mark.getBoundingClientRect();
  return [mark.title, (box.left + box.width / 2 - left) / width];
});
"""


def test_a_mark_in_the_curves_says_why_the_ranks_were_started_again(
    browser: Chrome, pages: dict[str, Path]
) -> None:
    shown(browser, pages["one"])
    ((title, place),) = browser.execute_script(MARKS)
    assert re.fullmatch(
        r"attempt 1, from step 1500: 1 restart: preempted: Slurm has taken the nodes at \d\d:\d\d, "
        "4 min 40 s until the next start",
        title,
    )
    assert place == pytest.approx(0.5, abs=0.01), "step 1500 of 3000"
    assert browser.find_element(By.CSS_SELECTOR, ".marks li").text == title
    browser.find_element(By.CSS_SELECTOR, "input[value=time]").click()
    ((_, place),) = browser.execute_script(MARKS)
    assert place == pytest.approx((2011.5 - 16.5) / (3511.5 - 16.5), abs=0.01)
    box = browser.find_element(By.CSS_SELECTOR, ".plot[data-curve=loss] .u-over")
    drag = ActionChains(browser).move_to_element_with_offset(box, 40, 0)
    drag.click_and_hold().move_by_offset(60, 0).release().perform()
    assert browser.execute_script(MARKS) == [], "none beside the part that is shown"
    shown(browser, pages["three"])
    titles = [title.partition(",")[0] for title, _ in browser.execute_script(MARKS)]
    assert sorted(titles) == [f"lr={lr}: attempt 1" for lr in (0.02, 0.03, 0.1)]
    assert complaints(browser) == []


def test_the_keyboard_changes_the_axes(browser: Chrome, pages: dict[str, Path]) -> None:
    shown(browser, pages["one"])
    label = "return document.querySelector('.plot[data-curve=loss] .u-label').textContent"
    assert browser.execute_script(label).startswith("step")
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    focused = browser.switch_to.active_element
    assert focused.get_attribute("name") == "over"
    focused.send_keys(Keys.ARROW_RIGHT)
    assert browser.execute_script(label).startswith("time")
    browser.switch_to.active_element.send_keys(Keys.TAB)
    browser.switch_to.active_element.send_keys(Keys.SPACE)
    assert browser.find_element(By.NAME, "log").is_selected()
    assert complaints(browser) == []


def test_what_is_drawn_has_a_name_for_people_who_do_not_see_it(
    browser: Chrome, pages: dict[str, Path], until: Until
) -> None:
    shown(browser, pages["three"])
    browser.execute_cdp_cmd("Accessibility.enable", {})
    until(lambda: len(images(browser)) == 4, "the tree is whole", seen=lambda: named(browser))
    assert images(browser)[1].startswith("curve of loss: 3 runs; last values from ")
    for role in ("image", "img", "heading", "checkbox", "radio", "columnheader", "list", "region"):
        assert all(name for r, name in named(browser) if r == role), role
    assert browser.execute_script("return document.documentElement.lang") == "en"


def named(browser: Chrome) -> list[tuple[str, str]]:
    """Return role and name of what a screen reader reads."""
    return [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        if not node.get("ignored")
    ]


def images(browser: Chrome) -> list[str]:
    return [name for role, name in named(browser) if role in ("image", "img")]


@pytest.mark.parametrize("page", ["one", "three"])
def test_a_page_is_printed_with_its_curves(
    browser: Chrome, pages: dict[str, Path], page: str, tmp_path: Path
) -> None:
    shown(browser, pages[page])
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    document = base64.b64decode(printed["data"])
    assert document.startswith(b"%PDF-")
    parts = [part.split(b"endstream")[0] for part in document.split(b"stream\n")[1:]]
    drawn = b"".join(zlib.decompress(part) for part in parts if part.startswith(b"x"))
    assert len(re.findall(rb"^[\d.-]+ [\d.-]+ l$", drawn, re.MULTILINE)) > 1000, "lines of curves"
    assert complaints(browser) == []


_BOXES = """
return [...document.querySelectorAll(".plot")].map((plot) => {
  const [inner, outer] = [plot.querySelector("canvas"), plot].map((e) => e.getBoundingClientRect());
  return [inner.right - outer.right, outer.right];
});
"""


@pytest.mark.parametrize("page", ["one", "three"])
def test_curves_are_as_wide_as_their_columns_on_paper(
    browser: Chrome, pages: dict[str, Path], page: str
) -> None:
    """A canvas keeps its size in pixels: one from a wide screen would cover its neighbour."""
    shown(browser, pages[page], dark=True)
    before = browser.execute_script(_BOXES)
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    boxes = browser.execute_script(_BOXES)
    assert len(boxes) == 4
    assert all(beyond <= 0 and right <= 718 for beyond, right in boxes), (
        boxes
    )  # A4 less its margins
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(_BOXES) == before
