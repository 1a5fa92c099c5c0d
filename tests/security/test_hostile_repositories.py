"""No program that the configuration of a cloned or unpacked project names is run by our git."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.errors import LauncherError
from toolkit.runs.records import git_commands, provenance
from toolkit.slurm.login.ssh_host import working_tree


def git(folder: Path, *words: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "protocol.file.allow=always")
    done = subprocess.run(
        ["git", *own, "-C", folder, *words], check=True, capture_output=True, text=True
    )
    return done.stdout


def repository(folder: Path) -> Path:
    """Return a repository with a change of a file that is committed."""
    folder.mkdir()
    (folder / "train.py").write_text("lr = 1\n")
    (folder / ".gitattributes").write_text("*.py filter=f diff=d\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    (folder / "train.py").write_text("lr = 2\n")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return repository(tmp_path / "project")


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program that leaves the file `ran`."""
    made = tmp_path / "program"
    made.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    made.chmod(0o755)
    return str(made)


def configure(name: str) -> Callable[[Path, str], None]:
    return lambda folder, program: void(git(folder, "config", name, program))


def void(_: object) -> None:
    pass


def hook(folder: Path, program: str) -> None:
    shutil.copy(program, folder / ".git/hooks/post-index-change")


def hooks_path(folder: Path, program: str) -> None:
    (folder / "hooks").mkdir()
    shutil.copy(program, folder / "hooks/post-index-change")
    git(folder, "config", "core.hooksPath", "hooks")


def included(folder: Path, program: str) -> None:
    (folder / ".git/more").write_text(f'[filter "f"]\n\tclean = {program}\n\trequired = true\n')
    git(folder, "config", "include.path", "more")


def worktree_config(folder: Path, program: str) -> None:
    git(folder, "config", "extensions.worktreeConfig", "true")
    (folder / ".git/config.worktree").write_text(f'[filter "f"]\n\tclean = {program}\n')


def odd_name(folder: Path, program: str) -> None:
    (folder / ".gitattributes").write_text("*.py filter=f=g\n")
    config = folder / ".git/config"
    config.write_text(f'{config.read_text()}[filter "f=g"]\n\tclean = {program}\n')


def partial_clone(folder: Path, program: str) -> None:
    """An object is missing; git would fetch it from the remote, by the remote's program."""
    origin = repository(folder.parent / "origin")
    blob = git(folder, "rev-parse", "HEAD:train.py").strip()
    (folder / ".git/objects" / blob[:2] / blob[2:]).unlink()
    for key, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": str(origin),
        "remote.origin.uploadpack": program,
    }.items():
        git(folder, "config", key, value)


def submodule(folder: Path, program: str) -> None:
    inner = repository(folder.parent / "inner")
    git(folder, "submodule", "--quiet", "add", str(inner), "part")
    git(folder, "commit", "--quiet", "-m", "part")
    (folder / "part/train.py").write_text("lr = 3\n")
    for key in ("core.fsmonitor", "filter.f.clean"):
        git(folder / "part", "config", key, program)


HOSTILE = {
    "file system monitor": configure("core.fsmonitor"),
    "clean filter": configure("filter.f.clean"),
    "filter process": configure("filter.f.process"),
    "included filter": included,
    "filter of the worktree": worktree_config,
    "filter with an odd name": odd_name,
    "external diff": configure("diff.external"),
    "diff driver": configure("diff.d.command"),
    "text conversion": configure("diff.d.textconv"),
    "hook": hook,
    "path of hooks": hooks_path,
    "missing objects": partial_clone,
    "submodule": submodule,
}


NOT_RECORDED = {"filter with an odd name", "missing objects"}
"""Git cannot tell the changes without what it is not allowed to run."""


@pytest.mark.parametrize("how", HOSTILE)
def test_no_program_of_a_repository_is_run(
    how: str, project: Path, program: str, tmp_path: Path
) -> None:
    HOSTILE[how](project, program)
    (tmp_path / "ran").unlink(missing_ok=True)
    provenance.collect(project)
    with_files = working_tree(project)
    assert not (tmp_path / "ran").exists()
    assert "train.py" in with_files.names
    for words in (("status", "--porcelain"), ("diff", "HEAD")):  # git by itself runs it
        subprocess.run(["git", "-C", project, *words], capture_output=True, check=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("how", sorted(HOSTILE.keys() - NOT_RECORDED))
def test_the_changes_of_a_hostile_repository_are_still_recorded(
    how: str, project: Path, program: str
) -> None:
    HOSTILE[how](project, program)
    (project / "train.py").write_text("lr = 4\n")
    made = provenance.collect(project)["git"]
    assert made["dirty"] and "+lr = 4" in made["diff"]


def test_a_folder_of_a_clone_is_no_repository_because_it_looks_like_one(
    project: Path, program: str, tmp_path: Path
) -> None:
    """A folder with HEAD, objects, refs and config can be committed."""
    bare = project / "data"
    git(tmp_path, "init", "--quiet", "--bare", str(bare))
    (bare / "train.py").touch()
    for key, value in (("core.bare", "false"), ("core.worktree", "."), ("core.fsmonitor", program)):
        git(tmp_path, "config", "--file", str(bare / "config"), key, value)
    assert "git" not in provenance.collect(bare)
    with pytest.raises(LauncherError, match="bare"):
        working_tree(bare)
    assert not (tmp_path / "ran").exists()
    subprocess.run(["git", "-C", bare, "status"], capture_output=True, check=False)
    assert (tmp_path / "ran").exists()


def test_variables_name_neither_another_repository_nor_a_program(
    project: Path, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = repository(tmp_path / "other")
    git(other, "commit", "--quiet", "-a", "-m", "second")
    for name, value in {
        "GIT_DIR": str(other / ".git"),
        "GIT_WORK_TREE": str(other),
        "GIT_INDEX_FILE": str(other / ".git/index"),
        "GIT_EXTERNAL_DIFF": program,
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": program,
    }.items():
        monkeypatch.setenv(name, value)
    made = provenance.collect(project)["git"]
    assert working_tree(project).root == project
    for name in list(os.environ):
        if name.startswith("GIT_"):
            monkeypatch.delenv(name)
    assert made["commit"] == git(project, "rev-parse", "HEAD").strip()
    assert "+lr = 2" in made["diff"]
    assert not (tmp_path / "ran").exists()


def test_filters_of_your_own_configuration_are_run(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Git LFS's, for example, each of its files would count as changed."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    git(project, "config", "--global", "filter.f.clean", "sed s/2/1/")
    assert provenance.collect(project)["git"]["dirty"] is False


# ---- `.git` that leads to another repository of yours


def by_configuration(project: Path, private: Path) -> None:
    git(project, "config", "core.worktree", str(private))


def by_file(project: Path, private: Path) -> None:
    shutil.rmtree(project / ".git")
    (project / ".git").write_text(f"gitdir: {private}/.git\n")


def by_link(project: Path, private: Path) -> None:
    shutil.rmtree(project / ".git")
    (project / ".git").symlink_to(private / ".git")


def by_common_folder(project: Path, private: Path) -> None:
    shutil.rmtree(project / ".git")
    (project / ".git").mkdir()
    shutil.copy(private / ".git/HEAD", project / ".git/HEAD")
    (project / ".git/commondir").write_text(f"{private}/.git\n")


@pytest.mark.parametrize("lead", [by_configuration, by_file, by_link, by_common_folder])
def test_another_repository_is_neither_recorded_nor_copied(
    project: Path, tmp_path: Path, lead: Callable[[Path, Path], None]
) -> None:
    private = repository(tmp_path / "private")
    (private / "train.py").write_text("private\n")
    lead(project, private)
    assert "git" not in provenance.collect(project)
    with pytest.raises(LauncherError, match="points to another repository or working tree"):
        working_tree(project)


def test_worktrees_and_submodules_are_ones_own(project: Path, tmp_path: Path) -> None:
    git(project, "worktree", "add", "--quiet", "-b", "w", str(tmp_path / "worktree"))
    inner = repository(tmp_path / "inner")
    git(project, "submodule", "--quiet", "add", str(inner), "sub")
    (project / "below").mkdir()
    (project / "sub/train.py").write_text("lr = 3\n")
    for folder in (tmp_path / "worktree", project / "sub", project / "below"):
        assert len(provenance.collect(folder)["git"]["commit"]) == 40, folder
    assert "train.py" in working_tree(tmp_path / "worktree").names


def test_an_endless_answer_is_cut(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_commands, "_ANSWER_BYTES", 10)
    assert "git" not in provenance.collect(project)
    with pytest.raises(subprocess.SubprocessError, match="prints more than 10 bytes"):
        git_commands.run_git(project, "log")
