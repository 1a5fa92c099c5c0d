"""Launchers that other packages bring by entry points."""

from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT
from toolkit import launcher_plugins

TOY = ROOT / "tests/support/toy_launcher"


def brought(folder: Path, monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    """Install a package with these entry points."""
    info = folder / "site/odd-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    text = "\n".join([f"[{launcher_plugins.GROUP}]", *lines])
    (info / "entry_points.txt").write_text(text + "\n")
    monkeypatch.syspath_prepend(folder / "site")
    for cached in (launcher_plugins.kinds, launcher_plugins.plugin):
        cached.cache_clear()
        monkeypatch.setattr(launcher_plugins, cached.__name__, cached)


def profile(folder: Path, kind: str, more: str = "") -> toolkit.Profile:
    (folder / "site.yaml").write_text(f"kind: {kind}\n{more}")
    return toolkit.load_profile(str(folder / "site.yaml"))


def test_a_kind_that_no_package_brings_is_refused_with_those_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought(tmp_path, monkeypatch, pbs="odd:PBS")
    with pytest.raises(toolkit.ProfileError, match="kind: 'pbz' is not a choice; did you mean 'pb"):
        profile(tmp_path, "pbz")


def test_a_package_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought(tmp_path, monkeypatch, pbs="no_such_module:PBS")
    with pytest.raises(toolkit.ProfileError, match="kind 'pbs': no_such_module:PBS cannot be loa"):
        profile(tmp_path, "pbs")


def test_no_package_takes_the_place_of_a_built_in_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought(tmp_path, monkeypatch, slurm="no_such_module:Slurm")
    assert isinstance(profile(tmp_path, "slurm"), toolkit.SlurmProfile)


def test_a_plan_is_rendered_by_the_package_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TOY)
    launcher_plugins.kinds.cache_clear()
    job = toolkit.JobSpec(name="probe", module="train")
    plan = toolkit.plan(job, profile(tmp_path, "toy", "spool: /spool\n"))
    here = toolkit.plan(job, toolkit.LocalProfile(name="site"))
    lines = toolkit.render(plan).splitlines()
    (own,) = {*lines} - {*toolkit.render(here).splitlines()}
    assert own.startswith("  --again=99  # the exit status of an attempt")
    launcher_plugins.kinds.cache_clear()
