"""The files of a git working tree, as they lie there: committed or not, but not ignored."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.text.quantities import format_size

__all__ = ["WorkingTree", "working_tree"]

LIMIT_BYTES = 2**30
"""The default limit of a project's size in bytes."""

_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class WorkingTree:
    """A repository's files."""

    root: Path
    """The top of the repository."""

    names: tuple[str, ...]
    """Files and symbolic links below it, those of submodules included."""

    def require_small(self, limit_bytes: int | None) -> None:
        """Refuse a project that is too large to be code.

        Raises:
            LauncherError: there is more; the biggest files are named.
        """
        limit = LIMIT_BYTES if limit_bytes is None else limit_bytes
        sizes = {name: (self.root / name).lstat().st_size for name in self.names}
        if (whole := sum(sizes.values())) <= limit:
            return
        biggest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:_NAMED]
        shown = ", ".join(f"{name} ({_about(sizes[name])})" for name in biggest)
        raise LauncherError(
            f"{self.root} holds {_about(whole)} that git does not ignore, more than the "
            f"{format_size(limit)} that are taken for code; the biggest: {shown}. Write data into "
            ".gitignore and bring it there yourself, or set code_limit in the profile"
        )


def working_tree(folder: Path) -> WorkingTree:
    """Return the repository that `folder` is in.

    Raises:
        LauncherError: git is not installed, or the folder is not a repository.
    """
    try:
        top = _git(folder, "rev-parse", "--show-toplevel")
    except FileNotFoundError:
        why = "git is not in PATH, and only git knows what belongs to a project"
        raise LauncherError(why) from None
    if top.returncode != 0:
        message = os.fsdecode(top.stderr).strip().partition("\n")[0].removeprefix("fatal: ")
        raise LauncherError(
            f"{folder}: {message}. Which files belong to the project is asked of git: `git init` "
            "there (what .gitignore names stays here), or submit from the login node"
        )
    root = Path(os.fsdecode(top.stdout).rstrip("\n"))
    return WorkingTree(root=root, names=tuple(dict.fromkeys(_files(root, ""))))


def _files(root: Path, below: str) -> Iterator[str]:
    """Yield the files of the repository `below` the root, and of those within it."""
    listed = _git(root / below, "ls-files", "-z", "-co", "--exclude-standard")
    if listed.returncode != 0:
        raise LauncherError(f"git ls-files in {root / below}: {os.fsdecode(listed.stderr).strip()}")
    for entry in os.fsdecode(listed.stdout).split("\0"):
        name = str(Path(below, entry))
        path = root / name
        if not entry or _through_link(root, name) or not os.path.lexists(path):
            continue  # deleted, or replaced by a link, and git has not been told
        if path.is_symlink() or not path.is_dir():
            yield name
        elif (path / ".git").exists():  # a submodule, or a repository that nobody has added
            yield from _files(root, name)


def _through_link(root: Path, name: str) -> bool:
    parents = Path(name).parents
    return any((root / parent).is_symlink() for parent in list(parents)[:-1])


def _git(folder: Path, *words: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["git", "-C", folder, *words], capture_output=True, check=False)


def _about(size_bytes: int) -> str:
    """Return a size for people.

    >>> _about(1_300_000_000), _about(2048)
    ('1.2 GiB', '2 KiB')
    """
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.2g} {unit}" if size < 10 else f"{size:.0f} {unit}"
