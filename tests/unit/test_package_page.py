"""The page of the package on an index: README.md and the addresses beside it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hatch_build import absolute_links
from tests.conftest import ROOT
from toolkit import __version__

NEEDED = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "toolkit/__init__.py")
SOMEWHERE = "https://host.example/owner/name"


def metadata(folder: Path, repository: str) -> dict[str, Any]:
    """Return the core metadata of the project, with the address of its repository filled in."""
    for name in NEEDED:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    pyproject = folder / "pyproject.toml"
    text, changes = re.subn(
        r'^repository = ".*?"', f'repository = "{repository}"', pyproject.read_text(), flags=re.M
    )
    assert changes == 1
    pyproject.write_text(text)
    argv = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def links(markdown: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", markdown)


@pytest.mark.parametrize("repository", [SOMEWHERE, f"{SOMEWHERE}/"])
def test_links_and_addresses_lead_to_the_files_of_this_version(
    repository: str, tmp_path: Path
) -> None:
    found = metadata(tmp_path, repository)
    tag = f"v{__version__}"
    assert found["urls"] == {
        "Homepage": SOMEWHERE,
        "Documentation": f"{SOMEWHERE}/blob/{tag}/docs/index.md",
        "Changelog": f"{SOMEWHERE}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{SOMEWHERE}/issues",
        "Source": SOMEWHERE,
    }
    text = found["readme"]["text"]
    local = links((ROOT / "README.md").read_text())
    expected = [
        f"{SOMEWHERE}/{'raw' if path.endswith('.svg') else 'blob'}/{tag}/{path}" for path in local
    ]
    assert links(text) == expected
    assert len(text.splitlines()) == len((ROOT / "README.md").read_text().splitlines())


def test_without_a_repository_links_stay_as_they_are(tmp_path: Path) -> None:
    found = metadata(tmp_path, "")
    assert not found.get("urls")
    assert found["readme"]["text"] == (ROOT / "README.md").read_text()


def test_addresses_and_anchors_stay_as_they_are() -> None:
    text = "[a](https://a.example/b) [b](#b) [c](c.md#d) ![e](f/g.png)"
    assert absolute_links(text, SOMEWHERE, "v1") == (
        f"[a](https://a.example/b) [b](#b) [c]({SOMEWHERE}/blob/v1/c.md#d) "
        f"![e]({SOMEWHERE}/raw/v1/f/g.png)"
    )
