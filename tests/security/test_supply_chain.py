"""Versions are pinned, also of the tools of the build, and only plain files are tracked."""

import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import distributions

import pytest

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


Graph = Mapping[str, tuple[str, list[str]]]
"""Packages by name: the version, and the names that it requires."""

OF_GPUS = re.compile(r"nvidia-.+|cuda-.+|triton")
"""Libraries that the wheel of torch for GPUs chooses by itself."""


def installed() -> Graph:
    return {
        named(d.metadata["Name"]): (d.version, [named(need) for need in d.requires or ()])
        for d in distributions()
    }


def with_cuda() -> Graph:
    """Return what is installed where pip takes the ordinary wheel of torch from the index."""
    recorded = json.loads((ROOT / "tests/data/torch-cuda-metadata.json").read_text())
    cuda = {name: (about["version"], about["requires"]) for name, about in recorded.items()}
    return {**installed(), **cuda}


@pytest.mark.parametrize("graph", [installed, with_cuda])
def test_all_that_the_project_needs_is_installed_in_the_version_that_is_pinned(
    graph: Callable[[], Graph],
) -> None:
    known = graph()
    # Each name with whether torch needs it.
    waiting, seen = [("torch-deploy-toolkit", False)], set[str]()
    while waiting:
        name, for_torch = waiting.pop()
        if name in seen or name not in known or (for_torch and OF_GPUS.fullmatch(name)):
            continue
        seen.add(name)
        waiting += [(need, for_torch or name == "torch") for need in known[name][1]]
    assert {"torch", "click", "pytest", "submitit", "sympy"} <= seen
    pinned = pins()
    versions = {
        name: known[name][0].partition("+")[0]
        for name in seen - {"torch-deploy-toolkit", "pip"}  # pip comes with Python
    }
    assert versions == {name: pinned.get(name) for name in versions}


def test_the_record_of_the_wheel_for_gpus_is_of_the_pinned_torch() -> None:
    assert with_cuda()["torch"][0] == pins()["torch"]
    assert sum(map(bool, map(OF_GPUS.fullmatch, with_cuda()))) > 10


def test_tracked_files_have_plain_names() -> None:
    """A test that writes into the wrong folder must not leave its files in a commit."""
    done = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    names = done.stdout.split("\0")[:-1]
    assert len(names) > 500
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9._/-]+", name)] == []


def test_what_builds_the_project_is_pinned_too() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pinned = pins()
    assert needs == [f"{named(need)}=={pinned[named(need)]}" for need in needs]
