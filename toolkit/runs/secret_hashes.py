"""Hashes of the secrets of submitted jobs, in the state folder: see toolkit/text/secret_scan.py.

A salted hash reveals nothing about a random token. A password that is easy to guess could be found
from its hash, so only the owner may enter the folder.
"""

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.errors import LauncherError
from toolkit.runs.state_dir import append, state_folder
from toolkit.text import untrusted
from toolkit.text.secret_scan import Mark, marks_of, values_of

__all__ = ["known", "remember"]

_BYTES = 1 << 22
_MOST = 5_000
"""Marks in the file; a token has seven. The older half is then forgotten."""

_LONGEST = 1 << 16
_SALT_BYTES = 16


def remember(secrets: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> None:
    """Keep the marks of variables' values, unless they are there; a full disk stops no submission.

    Args:
        secrets: Values by variable.
        environ: Where the state folder is looked for.
    """
    if not secrets:
        return
    path, before = _path(environ), known(environ)
    salt = before[-1].salt if before else os.urandom(_SALT_BYTES)
    there = {(mark.name, mark.digest) for mark in before}
    with contextlib.suppress(OSError):
        if len(before) > _MOST:
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            kept = "".join(f"{_line(mark)}\n" for mark in before[-_MOST // 2 :])
            untrusted.write_bytes(draft, kept.encode())
            draft.replace(path)
        for name, value in values_of(secrets, names=secrets):
            for mark in marks_of(name, value, salt):
                if (name, mark.digest) in there:
                    break  # its first form, which is the value itself
                append(path, _line(mark))


def known(environ: Mapping[str, str] = os.environ) -> list[Mark]:
    """Return the marks, the oldest first."""
    try:
        path = _path(environ)
        changed = path.stat()
    except (LauncherError, OSError):
        return []
    return list(_read(path, changed.st_mtime_ns, changed.st_size, changed.st_ino))


@functools.lru_cache(maxsize=2)
def _read(path: Path, *_: int) -> tuple[Mark, ...]:
    lines = untrusted.lines_of_json(path, limit=_BYTES)
    return tuple(mark for line in lines if (mark := _mark(line)) is not None)


def _path(environ: Mapping[str, str]) -> Path:
    return state_folder(environ) / "masked.jsonl"


def _line(mark: Mark) -> str:
    return json.dumps(asdict(mark) | {"salt": mark.salt.hex(), "digest": mark.digest.hex()})


def _mark(line: Any) -> Mark | None:
    data = untrusted.mapping(line)
    name, salt, digest = (data.get(key) for key in ("name", "salt", "digest"))
    length = untrusted.whole(data.get("length"), least=1, most=_LONGEST)
    start = untrusted.whole(data.get("start"), most=0xFFFF)
    if length is None or start is None or not isinstance(name, str):
        return None
    try:
        salt, digest = bytes.fromhex(str(salt)), bytes.fromhex(str(digest))
    except ValueError:
        return None
    if not 0 < len(salt) <= 64:  # as much as a hash takes for its key
        return None
    return Mark(name=name, length=length, salt=salt, start=start, digest=digest)
