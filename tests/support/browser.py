"""A headless Chromium that reaches no network."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


@contextmanager
def chromium(folder: Path) -> Iterator[Chrome]:
    """Give a browser whose files are in a folder; skip the test without one, but not in CI."""
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    if None in programs:
        if os.environ.get("CI"):
            pytest.fail("CI must run chromium and chromedriver")
        pytest.skip("needs chromium and chromedriver; see tests/packages.sh")
    options = ChromeOptions()
    options.binary_location = str(programs[0])
    for option in (*_OPTIONS, f"--user-data-dir={folder}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = Chrome(options=options, service=Service(programs[1]))
    try:
        yield browser
    finally:
        browser.quit()


def log_of(browser: Chrome, kind: str) -> list[Any]:
    """Return the entries of a log of the browser since the last question."""
    return list(browser.get_log(kind))
