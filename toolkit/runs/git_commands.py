"""Questions to git about a project that others may have written.

The configuration of a repository can name programs. None of them is run: neither its file system
monitor, hooks, filters and diff drivers, nor what would fetch missing objects. Git itself refuses a
repository of another user, but not one from an archive that you have unpacked, and not a folder of
a clone that is laid out as a bare repository.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

_SETTINGS = (
    "core.fsmonitor=false",
    f"core.hooksPath={os.devnull}",
    "safe.bareRepository=explicit",  # git 2.38 and newer
)

_KEPT = (
    "GIT_CEILING_DIRECTORIES",
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_NOSYSTEM",
    "GIT_CONFIG_SYSTEM",
    "GIT_DISCOVERY_ACROSS_FILESYSTEM",
)
"""Variables that say neither which repository is read nor which programs are run."""

_OF_THE_USER = ("system", "global")
"""The scopes of git's configuration that no repository writes."""

_FILTER = r"^filter\..*\.(clean|smudge|process|required)$"


def run_git(
    folder: Path, *words: str, settings: Sequence[str] = (), limit_s: float | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Run a command of git in a folder and return its outputs and its exit status.

    Args:
        folder: Where git looks for the repository.
        words: The command, which changes nothing.
        settings: Further `key=value` of the configuration.
        limit_s: How long git may take.

    Raises:
        OSError: git is not installed.
        subprocess.TimeoutExpired: it has taken longer.
    """
    options = [word for setting in (*_SETTINGS, *settings) for word in ("-c", setting)]
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in _KEPT
    }
    # Objects that a partial clone lacks are not fetched.
    environ |= {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
    return subprocess.run(
        # Without locks: a `git commit` in another terminal must not fail because of a question.
        ["git", "--no-pager", "--no-optional-locks", *options, "-C", folder, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=limit_s,
        env=environ,
    )


def without_filters(folder: Path, *, limit_s: float | None = None) -> list[str]:
    """Return the settings with which git runs no filter that a repository configures.

    Filters convert the content of files when git compares it. Those of your own configuration, such
    as Git LFS, are kept.

    Raises:
        OSError: git is not installed.
        subprocess.SubprocessError: git gives no answer that can be used.
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
