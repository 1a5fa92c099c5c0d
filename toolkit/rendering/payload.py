"""The supervisor as one file that scripts and manifests carry: a zip archive that Python executes.

The archive holds the sources of `toolkit/supervisor` as they are, and the same sources give the
same bytes.
"""

import base64
import functools
import hashlib
import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from toolkit.errors import InputError

FILE = "supervisor.pyz"
"""Its name where it is mounted or unpacked."""

MOST_BYTES = 4 << 20
"""Of a script or manifest that is read, and of the sources in it."""

_CARRIED = re.compile(r"^(?P<before>.*?)(?P<base64>UEsD[A-Za-z0-9+/]{1000,}={0,2})$", re.MULTILINE)
"""A zip archive in base64, which ends a line."""

_MAIN = """\
import sys

from supervisor.__main__ import main

sys.exit(main())
"""


class Payload:
    """The supervisor as templates see it; it is packed when a template first needs it."""

    @functools.cached_property
    def _archive(self) -> bytes:
        return archive()

    @property
    def sha256(self) -> str:
        """Of the archive, in hexadecimal digits."""
        return hashlib.sha256(self._archive).hexdigest()

    @property
    def base64(self) -> str:
        """The archive, on one line."""
        return base64.b64encode(self._archive).decode()


class Carried(NamedTuple):
    """The supervisor that a script or manifest carries."""

    sha256: str
    sources: Mapping[str, bytes]
    """By path in the archive."""

    is_ours: bool
    """Whether it is that of this version of the toolkit, byte by byte."""


PAYLOAD = Payload()
"""The supervisor of this version of the toolkit."""


def archive() -> bytes:
    """Return the archive: `python3 -Iu supervisor.pyz ROLE …` runs it."""
    folder = Path(__file__).parent.parent / "supervisor"
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".sh"))
    sources = {f"supervisor/{path.relative_to(folder)}": path.read_bytes() for path in paths}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for name, source in {"__main__.py": _MAIN.encode(), **sources}.items():
            # Always the same date and rights, so that only the sources decide.
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            file.writestr(entry, source)
    return packed.getvalue()


def folded(text: str) -> str:
    """Return a script or manifest for people: a comment in place of the archive.

    >>> folded("  supervisor.pyz: UEsD" + "A" * 2000)
    '  # supervisor.pyz: 2,004 characters of base64, which only a file or a pipe gets'
    """

    def comment(found: "re.Match[str]") -> str:
        before = found["before"]
        indent = " " * (len(before) - len(before.lstrip(" ")))
        name = before.strip(" #:") or "the supervisor"
        size = len(found["base64"])
        return f"{indent}# {name}: {size:,} characters of base64, which only a file or a pipe gets"

    return _CARRIED.sub(comment, text)


def carried_supervisor(path: Path) -> Carried:
    """Return the supervisor that a rendered script or manifest carries.

    Raises:
        InputError: it cannot be read, or carries none.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_BYTES)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    found = _CARRIED.search(text)
    if found is None:
        raise InputError(
            f"{path}: carries no supervisor; its script or pods use one that is installed"
        )
    try:
        content = base64.b64decode(found["base64"], validate=True)
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            if sum(entry.file_size for entry in file.infolist()) > MOST_BYTES:
                raise InputError(f"{path}: the archive unpacks to more than {MOST_BYTES:,} bytes")
            sources = {entry.filename: file.read(entry) for entry in file.infolist()}
    except (ValueError, zipfile.BadZipFile, RuntimeError, EOFError) as error:
        raise InputError(f"{path}: the archive cannot be read: {error}") from None
    if strange := [
        name for name in sources if not re.fullmatch(r"[a-z_]+(/[a-z_]+)*\.(py|sh)", name)
    ]:
        raise InputError(f"{path}: the archive is none of ours: it holds {strange[0]!r}")
    return Carried(hashlib.sha256(content).hexdigest(), sources, content == archive())
