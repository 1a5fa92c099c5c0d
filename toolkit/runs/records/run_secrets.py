"""The secrets of runs: each must be set before a run is submitted, and is masked in its output.

Salted hashes of the values stay in the state folder (see toolkit/text/secret_scan.py), so that the
values are still masked in logs when the variables are no longer set. Such a hash reveals nothing
about a random token. An easily guessed password could be found from its hash, so only the owner can
enter the folder.
"""

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, LauncherError, Problem
from toolkit.planning import LaunchPlan
from toolkit.planning.plans import refusal
from toolkit.runs.records.state_dir import append, state_folder
from toolkit.text import secret_scan, untrusted
from toolkit.text.secret_scan import Mark, Mask, marks_of
from toolkit.text.yaml_reader import read_document

_JOB_BYTES = 5 << 20
_SECRET_BYTES = 1 << 16
_BYTES = 1 << 22
_MOST = 5_000
"""Limit of marks in the file; a token has seven. Beyond it, the older half is removed."""

_LONGEST = 1 << 16
_SALT_BYTES = 16


def require_secrets(plan: LaunchPlan, environ: Mapping[str, str] = os.environ) -> None:
    """Make sure that the job's secrets from this machine are available.

    A file that is missing here may be on the node; the script checks again. Hashes of the values
    are kept.

    Raises:
        LauncherError: a variable is not set, or other users can read a file.
    """
    for problem in secret_problems(plan, environ):
        raise LauncherError(problem.message)
    values = {name: environ[name] for name in plan.exported_secrets}
    for name, path in _secret_files(plan, environ):
        with contextlib.suppress(OSError):
            values[name] = untrusted.read_text(path.resolve(), limit=_SECRET_BYTES).rstrip("\n")
    remember(values, environ)


def secret_problems(plan: LaunchPlan, environ: Mapping[str, str] = os.environ) -> Iterator[Problem]:
    """Yield the problems of the secrets that the job takes from this machine."""
    if missing := [name for name in plan.exported_secrets if not environ.get(name)]:
        message = f"secrets are not set here: {', '.join(missing)}; export them first"
        yield refusal("secrets-unset", message, "secrets")
    for name, path in _secret_files(plan, environ):
        if path.is_file() and path.stat().st_mode & 0o077:
            message = f"secret {name}: others may read {path}; chmod 600 it"
            yield refusal("secret-file-open", message, *("secrets", name))


def _secret_files(plan: LaunchPlan, environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    for name, written in plan.secret_files.items():
        at_home = written.startswith("~/")
        yield name, Path(environ.get("HOME", "/"), written[2:]) if at_home else Path(written)


# ---- Masks


def mask_of(run_dir: Path | None, environ: Mapping[str, str] = os.environ) -> Mask:
    """Return the mask of a run's secrets, from variables and files, or from kept hashes."""
    if run_dir is not None and not os.path.exists(f"{run_dir}/job.yaml"):  # noqa: PTH110  # any name
        run_dir = run_dir.parent  # a point of a sweep
    try:
        text = untrusted.read_text(run_dir / "job.yaml", limit=_JOB_BYTES) if run_dir else ""
        data = read_document(text, "job.yaml").data if "secrets" in text else None
    except (InputError, OSError):
        data = None
    places = data.get("secrets") if isinstance(data, dict) else None
    marks = tuple(stored_marks(environ))
    if not isinstance(places, dict | list) or not places:
        return _mask_of_all(tuple(environ.items()), marks)
    variables = dict(environ)
    for name, place in places.items() if isinstance(places, dict) else ():
        file = place.get("file") if isinstance(place, dict) else None
        if isinstance(name, str) and isinstance(file, str) and "\0" not in file:
            with contextlib.suppress(OSError, RuntimeError):  # no such home, or a symlink loop
                path = Path(file).expanduser().resolve()
                variables[name] = untrusted.read_text(path, limit=_SECRET_BYTES).rstrip("\n")
    names = [name for name in places if isinstance(name, str)]
    return Mask(secret_scan.values_of(variables, names=names), marks)


@functools.lru_cache(maxsize=4)
def _mask_of_all(variables: tuple[tuple[str, str], ...], marks: tuple[Mark, ...]) -> Mask:
    """Return a mask of the secrets among variables, shared by all runs of a list."""
    return Mask(secret_scan.values_of(dict(variables)), marks)


def redacted(
    lines: Iterator[str], run_dir: Path | None, environ: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Yield `lines`, with `***NAME***` instead of every secret known here."""
    mask = mask_of(run_dir, environ)
    for line in lines:
        yield mask.hide(line)


# ---- Hashes in the state folder


def remember(secrets: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> None:
    """Store the marks of variables' values, once each; a full disk does not stop a submission."""
    if not secrets:
        return
    path, before = _path(environ), stored_marks(environ)
    salt = before[-1].salt if before else os.urandom(_SALT_BYTES)
    there = {(mark.name, mark.digest) for mark in before}
    with contextlib.suppress(OSError):
        if len(before) > _MOST:
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            newer = "".join(f"{_line(mark)}\n" for mark in before[-_MOST // 2 :])
            untrusted.write_bytes(draft, newer.encode())
            draft.replace(path)
        for name, value in secret_scan.values_of(secrets, names=secrets):
            for mark in marks_of(name, value, salt):
                if (name, mark.digest) in there:
                    break  # its first form is the value itself
                append(path, _line(mark))


def stored_marks(environ: Mapping[str, str] = os.environ) -> list[Mark]:
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
    return tuple(mark for line in lines if (mark := _mark(untrusted.mapping(line))) is not None)


def _mark(data: Mapping[str, Any]) -> Mark | None:
    name = data.get("name")
    length = untrusted.whole(data.get("length"), least=1, most=_LONGEST)
    start = untrusted.whole(data.get("start"), most=0xFFFF)
    try:
        salt, digest = (bytes.fromhex(str(data.get(key))) for key in ("salt", "digest"))
    except ValueError:
        return None
    if length is None or start is None or not isinstance(name, str):
        return None
    if not 0 < len(salt) <= 64:  # as much as a hash takes for its key
        return None
    return Mark(name=name, length=length, salt=salt, start=start, digest=digest)


def _line(mark: Mark) -> str:
    return json.dumps(asdict(mark) | {"salt": mark.salt.hex(), "digest": mark.digest.hex()})


def _path(environ: Mapping[str, str]) -> Path:
    return state_folder(environ) / "masked.jsonl"
