"""The supervisor as a single file in scripts and manifests: a zip archive that Python executes.

The archive contains the modules of `toolkit/supervisor` that a kind of site needs, without comments
and docstrings. All other lines keep their numbers: tracebacks name the lines of the sources. All
modules except `__main__.py` are in one table, compressed as a whole. The same sources give the same
bytes.
"""

import base64
import bz2
import functools
import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from toolkit.errors import InputError

if TYPE_CHECKING:
    from toolkit.planning.plans import LaunchPlan

FILE = "supervisor.pyz"
"""File name of the mounted or unpacked archive."""

MAIN, TABLE = "__main__.py", "sources.bz2"
"""Entries of the archive: the main program, `toolkit/supervisor/packed.py`, and other modules."""

MOST_BYTES = 4 << 20
"""Maximum size of a script or manifest to read, and of the sources in it."""

_CARRIED = re.compile(r"^(?P<before>.*?)(?P<base64>UEsD[A-Za-z0-9+/]{1000,}={0,2})$", re.MULTILINE)
"""A zip archive in base64 at the end of a line."""

_OURS = re.compile(r"supervisor(/[a-z_]+)+\.(py|sh)")

_IMPORT = re.compile(r"^ *from (\.+)([\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
_COMMENT = re.compile(r'(?:^ *|  )#[^"\n]*$', re.MULTILINE)
_DOCSTRING = re.compile(
    r'^(?P<indent> *)"""(?:[^"]|"(?!""))*"""$(?=(?P<more>\n+(?P=indent)(?=\S))?)', re.MULTILINE
)
"""A docstring in sources formatted by ruff; a test compares the result with Python's parser."""

ROLES = {"slurm": ("batch", "node"), "kubernetes": ("pod",), "local": ("local",)}
"""The supervisor's roles at each kind of site."""

_ONLY = {"inside.sh": "slurm", "watchdog/trainer_status.py": "kubernetes"}
"""Files for only one kind of site: containers on Slurm, TrainJobs."""

_FEATURES = {
    "elastic": ("elastic.py",),
    "log_pattern": ("watchdog/log_steps.py",),
    "warm": ("watchdog/rank_proxy.py", "watchdog/fork_server.py"),
    "watchdog": ("watchdog/watchdog.py", "watchdog/stragglers.py", "watchdog/rank_watch.py"),
}
"""Files that not all jobs need, by the plan's property."""


class Payload:
    """The supervisor for templates; packed at the first use by a template."""

    def __init__(self, kind: str, features: frozenset[str]) -> None:
        """Prepare the supervisor for a kind of site and the features of a job."""
        self._kind, self._features = kind, features

    @functools.cached_property
    def _archive(self) -> bytes:
        return archive(self._kind, self._features)

    @property
    def sha256(self) -> str:
        """SHA-256 of the archive, in hexadecimal digits."""
        return hashlib.sha256(self._archive).hexdigest()

    @property
    def base64(self) -> str:
        """The archive in base64, on one line."""
        return base64.b64encode(self._archive).decode()


class Carried(NamedTuple):
    """The supervisor that a script or manifest carries."""

    sha256: str
    sources: Mapping[str, str]
    """Source texts, by path in the archive."""

    is_ours: bool
    """Whether it equals this toolkit version's supervisor, byte by byte."""


@functools.cache
def payload(kind: str, features: frozenset[str]) -> Payload:
    """Return this toolkit version's supervisor for a kind of site."""
    return Payload(kind, features)


def payload_of(plan: "LaunchPlan") -> Payload:
    """Return the supervisor for a plan."""
    features = frozenset(name for name in _FEATURES if getattr(plan, name))
    return payload(plan.profile.kind, features)


def archive(kind: str, features: Collection[str] = ()) -> bytes:
    """Return the archive for a kind of site: `python3 -ISu supervisor.pyz ROLE …` runs it."""
    folder = Path(__file__).parent.parent / "supervisor"
    wanted = {folder / "__init__.py", folder / "__main__.py", *folder.glob("*.sh")}
    wanted |= {path for path in folder.glob("watchdog/*") if path.suffix in (".py", ".sh")}
    wanted -= {folder / name for name, only in _ONLY.items() if only != kind}
    unneeded = [names for feature, names in _FEATURES.items() if feature not in features]
    left_out = {folder / name for names in unneeded for name in names}
    wanted -= left_out
    unread = [folder / "notify.py", folder / "supervised.py"]
    unread += [folder / f"{role}.py" for role in ROLES[kind]]
    while unread:
        path = unread.pop()
        if path not in wanted | left_out:
            wanted.add(path)
            unread += _imported(path)
    sources = {f"supervisor/{path.relative_to(folder)}": _bare(path) for path in sorted(wanted)}
    table = bz2.compress("\0".join(map("\n".join, sources.items())).encode())
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name, content in {MAIN: _bare(folder / "packed.py").encode(), TABLE: table}.items():
            # Fixed date and permissions, so that the bytes depend only on the sources. Stored
            # uncompressed: the zlib of some distributions gives different bytes.
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            file.writestr(entry, content)
    return packed.getvalue()


def _is_ours(content: bytes, files: Collection[str]) -> bool:
    """Whether the content is an archive of this toolkit version."""
    has = [name for name, (one, *_) in _FEATURES.items() if f"supervisor/{one}" in files]
    return any(content == archive(kind, has) for kind in ROLES)


def _imported(path: Path) -> Iterator[Path]:
    """Yield the modules of the package that a module imports."""
    for dots, module, names in _IMPORT.findall(path.read_text(encoding="utf-8")):
        folder = path.parents[len(dots) - 1].joinpath(*filter(None, module.split(".")))
        files = [folder.with_suffix(".py"), folder.parent / "__init__.py"]
        if folder.is_dir():
            files = [folder / f"{name}.py" for name in ["__init__", *re.findall(r"\w+", names)]]
        yield from filter(Path.is_file, files)


def _bare(path: Path) -> str:
    """Return a source without comments and docstrings, with the same number of lines."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        source = _COMMENT.sub("", _DOCSTRING.sub(_without, source))
    return source


def _without(docstring: "re.Match[str]") -> str:
    needed = "" if docstring["more"] else f"{docstring['indent']}pass"
    return needed + "\n" * docstring[0].count("\n")


def folded(text: str) -> str:
    """Return a script or manifest for display: a comment replaces the archive.

    >>> folded("  supervisor.pyz: UEsD" + "A" * 2000)
    '  # supervisor.pyz: 2,004 characters of base64, which only a file or a pipe gets'
    """
    return _CARRIED.sub(
        _comment("{:,} characters of base64, which only a file or a pipe gets"), text
    )


def plain(text: str) -> str:
    """Return a script or manifest for review: the supervisor's sources are comments at its end."""
    sources = ""
    for found in _CARRIED.finditer(text):
        for name, source in _sources(base64.b64decode(found["base64"])).items():
            lines = [f"==== {name}", *source.splitlines()]
            sources += "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return _CARRIED.sub(_comment("the sources are below"), text) + sources


def _comment(what: str) -> Callable[["re.Match[str]"], str]:
    def comment(found: "re.Match[str]") -> str:
        before = found["before"]
        indent = " " * (len(before) - len(before.lstrip(" ")))
        name = before.strip(" #:") or "the supervisor"
        return f"{indent}# {name}: {what.format(len(found['base64']))}"

    return comment


def _sources(content: bytes) -> dict[str, str]:
    """Return the sources in an archive, by path.

    Raises:
        ValueError: it is not an archive of the toolkit, or too large.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        names = file.namelist()
        if names != [MAIN, TABLE]:
            raise ValueError(
                "it was not written by this toolkit: it contains "
                f"{', '.join(map(repr, names))[:100]}"
            )
        if sum(entry.file_size for entry in file.infolist()) > MOST_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_BYTES:,} bytes")
        main, packed = map(file.read, names)
    unpacking = bz2.BZ2Decompressor()
    text = unpacking.decompress(packed, MOST_BYTES)
    if not unpacking.eof:
        raise ValueError(f"it is cut short, or unpacks to more than {MOST_BYTES:,} bytes")
    files = [file.partition("\n") for file in text.decode().split("\0")]
    table = {name: source for name, _, source in files}
    if strange := [name for name in table if not _OURS.fullmatch(name)]:
        raise ValueError(f"it was not written by this toolkit: it contains {strange[0]!r}")
    return {MAIN: main.decode(), **table}


def carried_supervisor(path: Path) -> Carried:
    """Return the supervisor that a rendered script or manifest carries.

    Raises:
        InputError: the file cannot be read, or carries no supervisor.
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
        sources = _sources(content)
    except (ValueError, zipfile.BadZipFile, RuntimeError, EOFError, OSError) as error:
        raise InputError(f"{path}: the archive cannot be read: {error}") from None
    return Carried(hashlib.sha256(content).hexdigest(), sources, _is_ours(content, sources))
