"""Queries to git about an untrusted project.

The configuration of a repository can name programs. None of them is run: no file system monitor,
hook, filter or diff driver, and no program that fetches missing objects. Git itself refuses another
user's repository, but not one from an archive that you have unpacked, and not a folder of a clone
with the layout of a bare repository.
"""

import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from toolkit.text import untrusted

_SETTINGS = (
    "core.fsmonitor=false",
    f"core.hooksPath={os.devnull}",
    "safe.bareRepository=explicit",  # git 2.38 and newer
    "core.bigFileThreshold=1m",  # no diff of larger files: it needs a multiple of their size
)

_ANSWER_BYTES = 64 << 20
"""Byte limit of an answer."""

_ERROR_BYTES = 1 << 16

_KEPT = (
    "GIT_CEILING_DIRECTORIES",
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_NOSYSTEM",
    "GIT_CONFIG_SYSTEM",
    "GIT_DISCOVERY_ACROSS_FILESYSTEM",
)
"""Variables that are kept: they select neither a repository nor programs to run."""

_BEGIN, _END = "--==begin", "--==end"
"""Markers around an answer: rev-parse prints unknown options unchanged."""

_OF_THE_USER = ("system", "global")
"""The scopes of git's configuration that a repository cannot write."""

_FILTER = r"^filter\..*\.(clean|smudge|process|required)$"


def run_git(
    folder: Path, *words: str, settings: Sequence[str] = (), limit_s: float | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Run a git command in a folder and return its outputs and its exit status.

    Args:
        folder: The folder where git looks for the repository.
        words: The command, which must be read-only.
        settings: Further `key=value` pairs of the configuration.
        limit_s: The time limit of git.

    Raises:
        OSError: git is not installed.
        subprocess.SubprocessError: git exceeded the time limit or the size limit of an answer.
    """
    options = [word for setting in (*_SETTINGS, *settings) for word in ("-c", setting)]
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in _KEPT
    }
    # Missing objects of a partial clone are not fetched.
    environ |= {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
    # Without locks: a `git commit` in another terminal must not fail because of a query.
    argv = ["git", "--no-pager", "--no-optional-locks", *options, "-C", os.fspath(folder), *words]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environ
        ) as process,
    ):
        assert process.stdout is not None
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(limit_s or threading.TIMEOUT_MAX, end)
        timer.daemon = True
        timer.start()
        try:
            output = process.stdout.read(_ANSWER_BYTES + 1)
            if len(output) > _ANSWER_BYTES:
                process.kill()
                raise subprocess.SubprocessError(f"git prints more than {_ANSWER_BYTES} bytes")
            process.wait()
        finally:
            timer.cancel()
        if is_late.is_set():
            raise subprocess.TimeoutExpired(argv, limit_s or 0.0)
        errors.seek(0)
        return subprocess.CompletedProcess(
            argv, process.returncode, output, errors.read(_ERROR_BYTES)
        )


def rev_parse(folder: Path, *words: str, limit_s: float | None = None) -> str:
    """Return the answer of `git rev-parse`, without the output of a git wrapper around it.

    Raises:
        OSError: git is not installed.
        subprocess.SubprocessError: git refuses, or gives no answer.
    """
    done = run_git(folder, "rev-parse", _BEGIN, *words, _END, limit_s=limit_s)
    done.check_returncode()
    text = os.fsdecode(done.stdout).replace("\r\n", "\n")
    answer, end, _ = text.partition(f"{_BEGIN}\n")[2].rpartition(f"\n{_END}\n")
    if not end:
        raise subprocess.SubprocessError("git rev-parse gives no answer")
    return answer


def without_filters(folder: Path, *, limit_s: float | None = None) -> list[str]:
    """Return the settings that disable the filters configured by a repository.

    Filters convert file contents when git compares them. Filters in the user's configuration, such
    as Git LFS, stay enabled.

    Raises:
        OSError: git is not installed.
        subprocess.SubprocessError: git gives no usable answer.
    """
    words = ("config", "-z", "--show-scope", "--name-only", "--get-regexp", _FILTER)
    done = run_git(folder, *words, limit_s=limit_s)
    if done.returncode not in (0, 1):  # 1: there are none
        done.check_returncode()
    fields = os.fsdecode(done.stdout).split("\0")[:-1]
    settings: dict[str, None] = {}
    for scope, key in zip(fields[::2], fields[1::2], strict=True):
        if scope not in _OF_THE_USER:
            name = re.sub(r"\.\w+$", "", key)
            if "=" in name:  # cannot be named on a command line
                raise subprocess.SubprocessError(f"a filter called {name!r}")
            settings |= {f"{name}.{word}=": None for word in ("clean", "smudge", "process")}
            settings[f"{name}.required=false"] = None
    return list(settings)


def is_own_tree(folder: Path, *, limit_s: float | None = None) -> bool:
    """Whether git reads only the repository that contains a folder.

    `.git` can be a file or contain settings that point to another repository or working tree of
    yours, such as a private one; its changes would be recorded.

    Raises:
        OSError: git is not installed.
        subprocess.SubprocessError: the folder is in no repository.
    """
    words = ("--show-toplevel", "--absolute-git-dir")
    top, git = map(Path, rev_parse(folder, *words, limit_s=limit_s).split("\n", 1))
    entry = top / ".git"
    if not folder.resolve().is_relative_to(top):
        return False
    if entry.is_dir() and not entry.is_symlink():
        return git == entry and not (git / "commondir").exists()
    # For a worktree or a submodule, the repository also names the folder.
    try:
        back = untrusted.read_text(git / "gitdir").strip()
        return Path(back) == entry
    except OSError:
        tree = run_git(folder, "config", "--file", str(git / "config"), "core.worktree")
        named = os.fsdecode(tree.stdout).strip()
        return bool(named) and (git / named).resolve() == top
