"""What `make release` makes of a commit."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent


def release(checkout: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [checkout / "distribution/release.sh"],
        env={**os.environ, "BIN": str(BIN)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A commit of the files as they are now."""
    folder = tmp_path / "checkout"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
            (folder / name).chmod((ROOT / name).stat().st_mode)
    who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    for argv in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "As it is"]):
        subprocess.run(["git", *argv], cwd=folder, check=True)
    return folder


def test_what_is_in_no_commit_is_not_released(checkout: Path) -> None:
    (checkout / "README.md").write_text("another\n")
    done = release(checkout)
    assert (done.returncode, done.stderr) == (
        1,
        "release: there are changes that are in no commit; commit them, or put them aside\n",
    )
    assert not (checkout / "dist").exists()


def test_a_release_is_wheel_sdist_sbom_and_checksums(checkout: Path) -> None:
    pytest.importorskip("twine", reason="tests/peers.sh installs what releases need")
    done = release(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {path.name: path.read_bytes() for path in (checkout / "dist").iterdir()}
    sums = files.pop("SHA256SUMS").decode().splitlines()
    assert sums == [f"{hashlib.sha256(files[name]).hexdigest()}  {name}" for name in sorted(files)]
    (wheel,) = (checkout / "dist").glob("*.whl")
    (sdist,) = (checkout / "dist").glob("*.tar.gz")
    assert set(files) == {wheel.name, sdist.name, "sbom.cdx.json"}
    sbom = json.loads(files["sbom.cdx.json"])
    assert sbom["bomFormat"] == "CycloneDX"
    assert sbom["metadata"]["component"]["name"] == "torch-deploy-toolkit"
    names = {component["name"].lower() for component in sbom["components"]}
    assert {"click", "jinja2", "pydantic", "pyyaml"} <= names
    assert not {"pip", "torch", "pytest"} & names
    # The files of the archive are as old as the commit, so that the same commit makes the same.
    asked = ["git", "log", "-1", "--format=%cd", "--date=format-local:%Y-%m-%d %H:%M"]
    environ = {**os.environ, "TZ": "UTC"}
    when = subprocess.run(asked, cwd=checkout, env=environ, capture_output=True, text=True)
    dates = {info.date_time for info in zipfile.ZipFile(wheel).infolist()}
    assert {"{}-{:02}-{:02} {:02}:{:02}".format(*date) for date in dates} == {when.stdout.strip()}
