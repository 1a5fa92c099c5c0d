"""Profiles and templates that are found rather than named: whose they are decides.

Another user's files are made by root (`chown`): these tests need root, as the gate has it.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT
from toolkit.errors import ProfileError
from toolkit.profile import configuration_folder, load_profile, origin_notes
from toolkit.runs.records.state_dir import state_folder
from toolkit.text.own_files import user_folder, why_not_own

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


def plant(folder: Path, *, kind: str = "local", owner: int = NOBODY) -> Path:
    """Let a user leave a profile with a template in a folder; return the profile's file."""
    made = [
        folder / "slurm",
        folder / "slurm/profiles",
        folder / "slurm/t",
        folder / "slurm/t/local",
    ]
    for one in made:
        one.mkdir(0o755)
    profile = folder / "slurm/profiles/local.yaml"
    profile.write_text(f"kind: {kind}\ntemplates_dir: ../t\n")
    template = folder / "slurm/t/local/run.sh.j2"
    template.write_text("#!/bin/bash\nid >PLANTED\n")
    for one in (*made, profile, template):
        os.chown(one, owner, owner)
    return profile


def project(folder: Path) -> Path:
    """Make a project of one's own, without profiles."""
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text("name: a\nscript: train.py\n")
    (folder / "train.py").write_text("print('trained')\n")
    return folder


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOLKIT, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that all may write, such as /tmp or that of a group."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@needs_root
def test_the_profile_of_another_user_above_the_project_is_passed_over(shared: Path) -> None:
    plant(shared)
    mine = project(shared / "mine/proj")
    done = command(mine, "run", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert not list(shared.rglob("PLANTED"))
    owner = f"{shared}/slurm belongs to another user (nobody)"
    assert f"note: {owner}; it is ignored\n" in done.stderr
    for words in (["check"], ["render", "--to=local"]):
        assert owner in command(mine, words[0], "job.yaml", *words[1:], "--to=local").stderr
    with pytest.raises(ProfileError, match=re.escape(f"not searched: {owner}")):
        load_profile("gpu", folder=mine)


@needs_root
@pytest.mark.parametrize("inside", [False, True], ids=["folder", "repository"])
def test_the_profile_of_another_user_in_the_project_is_refused(shared: Path, inside: bool) -> None:
    planted = plant(shared)
    mine = project(shared / "mine")
    if inside:
        (shared / ".git").mkdir()
    else:
        mine = shared
        (shared / "job.yaml").write_text("name: a\nscript: train.py\n")
    done = command(mine, "run", "job.yaml")
    assert done.returncode == 2
    assert done.stderr == (
        f"{shared}/slurm belongs to another user (nobody), so others could decide what runs in "
        f"your name; look at it, then make it yours, or name the file: --to {planted}\n"
    )
    assert toolkit.load_profile(str(planted)).templates_dir  # named, it is taken


@needs_root
@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_profile_above_the_project_that_others_may_write_is_refused(
    shared: Path, mode: int
) -> None:
    planted = plant(shared, owner=0)
    mine = project(shared / "mine")
    assert load_profile("local", folder=mine).templates_dir
    os.chown(planted, 1, 100)  # the group "users"
    planted.chmod(0o644)
    with pytest.raises(ProfileError, match="belongs to another user"):
        load_profile("local", folder=mine)
    os.chown(planted, 0, 100)
    planted.chmod(mode)
    with pytest.raises(ProfileError, match=rf"can be written by others \(mode {mode:o}\)"):
        load_profile("local", folder=mine)
    # A team writes the project's own profiles, as it writes the job files.
    assert load_profile("local", folder=shared).templates_dir


@needs_root
def test_templates_of_another_user_are_refused(shared: Path) -> None:
    plant(shared, owner=0)
    template = shared / "slurm/t/local/run.sh.j2"
    os.chown(template, NOBODY, NOBODY)
    for folder in (shared, project(shared / "mine")):
        with pytest.raises(ProfileError, match=r"run\.sh\.j2 belongs to another"):
            load_profile("local", folder=folder)


@needs_root
def test_a_repository_of_another_user_is_none(shared: Path) -> None:
    """An empty file called `.git` must not make a folder that others may write the project."""
    planted = plant(shared, owner=0)
    planted.chmod(0o666)
    mine = project(shared / "mine")
    git = shared / ".git"
    git.touch()
    os.chown(git, NOBODY, NOBODY)
    with pytest.raises(ProfileError, match="can be written by others"):
        load_profile("local", folder=mine)


def test_a_list_of_further_users_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x"
    file.touch()
    file.chmod(0o664)
    assert why_not_own(file) == "" or os.getuid() != 0

    def listed(path: Path, name: str, *, follow_symlinks: bool) -> bytes:
        assert (name, follow_symlinks) == ("system.posix_acl_access", False)
        return b"a list"

    monkeypatch.setattr(os, "getxattr", listed)
    assert "can be written by others" in why_not_own(file)


def test_the_search_ends_at_the_top_of_the_repository(tmp_path: Path) -> None:
    plant(tmp_path, owner=os.getuid())
    inner = tmp_path / "repository/jobs"
    inner.mkdir(parents=True)
    assert load_profile("local", folder=inner).templates_dir
    (tmp_path / "repository/.git").mkdir()
    assert load_profile("local", folder=inner).templates_dir is None


def test_a_profile_that_is_not_the_projects_own_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config"
    yours = config / "torch-deploy-toolkit/profiles/local.yaml"
    yours.parent.mkdir(parents=True)
    yours.write_text("kind: local\n")
    environ = {"XDG_CONFIG_HOME": str(config)}
    here = tmp_path / "above/project"
    here.mkdir(parents=True)
    assert origin_notes("slurm", folder=here, environ=environ) == ()
    assert origin_notes("local", folder=here, environ=environ) == (f"profile 'local' is {yours}",)
    above = plant(tmp_path / "above", owner=os.getuid())
    assert origin_notes("local", folder=here, environ=environ) == (f"profile 'local' is {above}",)
    (hidden,) = origin_notes("local", folder=tmp_path / "above", environ=environ)
    assert hidden == f"profile 'local' is {above}, not yours in {yours}"
    assert origin_notes(str(above), folder=here, environ=environ) == ()
    (yours.parents[1] / "default").write_text("profiles/local.yaml\n")
    (default,) = origin_notes(str(yours), folder=here, environ=environ)
    assert default == f"the default profile is {yours}"


@needs_root
def test_the_sandbox_of_another_user_is_not_entered(shared: Path) -> None:
    """`make submit-slurm` puts the programs of a sandbox that is found before all others."""
    planted = shared / ".sandbox/bin"
    planted.mkdir(parents=True)
    (planted / "sbatch").write_text("#!/bin/sh\nid >PLANTED\n")
    mine = project(shared / "mine")
    sandbox = [str(ROOT / "slurm/sandbox/sandbox"), "env"]

    def answer(folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(sandbox, cwd=folder, capture_output=True, text=True, check=False)

    assert str(planted.parent) in answer(mine).stderr
    for folder in (planted.parent, planted):
        os.chown(folder, NOBODY, NOBODY)
    assert str(planted.parent) not in answer(mine).stderr
    refused = answer(shared)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith(
        "is not yours, and its programs would run; name another with --dir\n"
    )


@needs_root
def test_a_default_profile_of_another_user_is_refused(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    folder = tmp_path / "torch-deploy-toolkit"
    (folder / "profiles").mkdir(parents=True)
    (folder / "profiles/x.yaml").write_text("kind: local\n")
    (folder / "default").write_text("profiles/x.yaml\n")
    name = toolkit.default_profile(environ=environ)
    assert name is not None
    assert load_profile(name, environ=environ).name == "x"
    os.chown(folder / "profiles/x.yaml", NOBODY, NOBODY)
    with pytest.raises(ProfileError, match="belongs to another user"):
        load_profile(name, environ=environ)


def test_a_group_of_one_user_may_write(tmp_path: Path) -> None:
    """Many systems give each user a group of the same name, and umask 002."""
    file = tmp_path / "x"
    file.touch()
    file.chmod(0o664)
    if os.getuid() == 0:  # whose group is root
        assert why_not_own(file) == ""
    file.chmod(0o666)
    assert "can be written by others (mode 666)" in why_not_own(file)
    link = tmp_path / "link"
    link.symlink_to(file)
    assert why_not_own(link) == ""
    assert why_not_own(tmp_path / "missing") == ""


@pytest.mark.parametrize("kind", ["CONFIG", "CACHE", "STATE"])
def test_relative_homes_are_ignored(kind: str) -> None:
    real = user_folder(kind, {})
    assert real.is_absolute()
    assert user_folder(kind, {"HOME": "relx", f"XDG_{kind}_HOME": "relx"}) == real
    assert user_folder(kind, {"HOME": "/h", f"XDG_{kind}_HOME": "relx"}).is_relative_to("/h")
    assert user_folder(kind, {f"XDG_{kind}_HOME": "/x"}) == Path("/x/torch-deploy-toolkit")
    assert configuration_folder({"HOME": "/h"}) == Path("/h/.config/torch-deploy-toolkit")
    assert state_folder({"XDG_STATE_HOME": "/proc/x"}) == Path("/proc/x/torch-deploy-toolkit")
