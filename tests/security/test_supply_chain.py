"""The pinned versions are installed, also of the tools of the build."""

import re
import tomllib
from importlib.metadata import distributions, requires

from tests.conftest import ROOT


def named(text: str) -> str:
    """A package's name as indexes compare names, from a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", text)
    assert found, text
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all("==" in line for line in lines if not line.startswith("#"))
    found = (line.partition("==") for line in lines if not line.startswith("#"))
    return {named(name): version for name, _, version in found}


def test_all_that_the_project_needs_is_installed_in_the_version_that_is_pinned() -> None:
    known = {named(d.metadata["Name"]): d for d in distributions()}
    # The wheel of torch for GPUs pins its libraries itself.
    by_torch = {named(need) for need in requires("torch") or () if "==" in need}
    wanted, seen = ["torch-deploy-toolkit"], set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen or name not in known:
            continue
        seen.add(name)
        wanted += [named(need) for need in known[name].requires or ()]
    assert {"torch", "click", "pytest", "submitit"} <= seen
    pinned = pins()
    versions = {
        name: known[name].version.partition("+")[0]
        for name in seen - by_torch - {"torch-deploy-toolkit", "pip"}  # pip comes with Python
    }
    assert versions == {name: pinned.get(name) for name in versions}


def test_what_builds_the_project_is_pinned_too() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pinned = pins()
    assert needs == [f"{named(need)}=={pinned[named(need)]}" for need in needs]
