"""Which files belong to a project: what git knows or would take, as it lies there."""

import subprocess
from pathlib import Path

import pytest

from toolkit.errors import LauncherError
from toolkit.slurm.login.ssh_host import working_tree


def git(folder: Path, *words: str) -> None:
    own = [
        "-c",
        "user.name=me",
        "-c",
        "user.email=me@example.org",
        "-c",
        "protocol.file.allow=always",
    ]
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    write(folder, "kept", "deleted", "moved/a", "sub/x", ".gitignore")
    (folder / ".gitignore").write_text("data/\n*.ckpt\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")
    return folder


def test_what_is_there_and_not_ignored_belongs_to_the_project(project: Path) -> None:
    write(project, "new", "data/big", "x.ckpt", "d\u00e9j\u00e0 vu/with 'quotes'\nand lines")
    (project / "deleted").unlink()
    (project / "gone").symlink_to("nowhere")
    tree = working_tree(project / "sub")
    assert tree.root == project
    wanted = {".gitignore", "kept", "moved/a", "sub/x", "new", "gone"}
    assert set(tree.names) == wanted | {"d\u00e9j\u00e0 vu/with 'quotes'\nand lines"}


def test_repositories_within_are_asked_for_their_own_files(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    write(other, "lib.py", ".gitignore")
    (other / ".gitignore").write_text("secret\n")
    git(other, "add", "-A")
    git(other, "commit", "-qm", "all")
    git(project, "submodule", "add", "-q", str(other), "vendor/lib")
    git(project, "submodule", "add", "-q", str(other), "vendor/empty")
    git(project, "submodule", "deinit", "-f", "vendor/empty")
    write(project, "vendor/lib/new", "vendor/lib/secret", "own/repo/file")
    git(project / "own/repo", "init", "-q")
    names = set(working_tree(project).names)
    below = {name for name in names if name.startswith(("vendor/", "own/"))}
    assert below == {
        "vendor/lib/lib.py",
        "vendor/lib/.gitignore",
        "vendor/lib/new",
        "own/repo/file",
    }


def test_a_folder_that_became_a_link_is_a_link(project: Path, tmp_path: Path) -> None:
    write(tmp_path, "elsewhere/a")
    (project / "moved/a").unlink()
    (project / "moved").rmdir()
    (project / "moved").symlink_to(tmp_path / "elsewhere")
    names = working_tree(project).names
    assert "moved" in names
    assert "moved/a" not in names


def test_too_much_is_refused_with_the_biggest_files(project: Path) -> None:
    for name, size in (("a.bin", 3 << 20), ("b.bin", 5 << 20)):
        with (project / name).open("w") as file:
            file.truncate(size)
    tree = working_tree(project)
    tree.require_small(None)
    with pytest.raises(LauncherError) as refused:
        tree.require_small(1 << 20)
    said = str(refused.value)
    assert "holds 8 MiB that git does not ignore, more than the 1MiB that are taken" in said
    assert "the biggest: b.bin (5 MiB), a.bin (3 MiB), " in said
    assert ".gitignore" in said and "code_limit" in said


def test_without_a_repository_the_way_out_is_said(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"not a git repository.*`git init` there"):
        working_tree(tmp_path)
