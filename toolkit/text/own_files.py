"""The user's own files: their location, and whether other users could have written them."""

import grp
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_FOLDERS = {"CONFIG": ".config", "CACHE": ".cache", "STATE": ".local/state"}


def user_folder(kind: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the toolkit's folder of a kind: CONFIG, CACHE or STATE.

    Relative paths in `XDG_…_HOME` and `HOME` are ignored (XDG Base Directory Specification): they
    would depend on the current folder.
    """
    named, home = environ.get(f"XDG_{kind}_HOME", ""), environ.get("HOME", "")
    if not named.startswith("/"):
        named = f"{home if home.startswith('/') else _registered_home()}/{_FOLDERS[kind]}"
    return Path(named, "torch-deploy-toolkit")


def _registered_home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container's user without a name
        return "/"


def why_not_own(*paths: Path, by_owner_alone: bool = False) -> str:
    """Return why other users could have written one of these files or folders; else "".

    They must belong to this user or to root, as git requires for a repository. Unless
    `by_owner_alone`, their mode must deny writing to others. A group may write if the user is its
    only member: many systems have one group per user (umask 002). For a link, its owner counts,
    because the owner has chosen the target.
    """
    trusted = {os.geteuid(), 0}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        trusted.add(int(os.environ["SUDO_UID"]))
    for path in paths:
        try:
            info = path.lstat()
        except FileNotFoundError:
            continue  # the reader of the file reports it
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        if info.st_uid not in trusted:
            return f"{path} belongs to another user ({_user(info.st_uid)})"
        if by_owner_alone or stat.S_ISLNK(info.st_mode):
            continue
        by_group = info.st_mode & stat.S_IWGRP and not (
            _is_private(info.st_gid, info.st_uid) and not _has_acl(path)
        )
        if by_group or info.st_mode & stat.S_IWOTH:
            return f"{path} can be written by others (mode {stat.S_IMODE(info.st_mode):o})"
    return ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"id {uid}"


def _has_acl(path: Path) -> bool:
    """Whether an ACL names other users or groups; the mode then shows their maximum access."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access", follow_symlinks=False))
    except (AttributeError, OSError):  # not Linux; without lists
        return False


def _is_private(gid: int, uid: int) -> bool:
    """Whether a group is a user's private group: named after the user, and without members."""
    if gid == uid == 0:
        return True
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return (
        user.pw_gid == gid and group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}
    )


def create(path: Path) -> IO[bytes]:
    """Create a file that only its owner can write, whatever the umask; open it to read and write.

    Raises:
        OSError: it exists, even as a link, or cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o644), "wb+", buffering=0)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, writable only by their owner, whatever the umask.

    Raises:
        OSError: one of them cannot be created.
    """
    for folder in (*reversed(path.absolute().parents), path):
        folder.mkdir(0o755, exist_ok=True)
