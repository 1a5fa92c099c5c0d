"""Another Debian's Slurm: fetched by this machine's apt, unpacked into a folder, never installed.

`up --slurm FOLDER` lays the folder over /usr in every machine of the sandbox, with the C library
that its programs need; the machine's own programs run with the newer library just as well.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .state import SandboxError

PACKAGES = (
    *("slurmctld", "slurmd", "slurmdbd", "slurm-client"),
    *("slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin"),
    *("libc6", "libdbus-1-3", "libhwloc15", "libjson-c5", "libjwt2", "liblua5.1-0", "liblz4-1"),
    *("libhttp-parser2.9", "libnuma1", "libreadline8t64", "libtinfo6", "libyaml-0-2"),
)
"""Slurm of Debian 13 and newer, and the libraries that it needs newer than Debian 12 has them."""

APT = Path("/etc/apt")


def fetch(suite: str, folder: Path) -> str:
    """Unpack a suite's Slurm, unless the folder has it; return the sentence for the user."""
    folder = folder.resolve()
    if (folder / "usr").is_dir():
        return f"{folder} is there"
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise SandboxError("no apt-get here: another Slurm can be fetched on Debian only", status=2)
    unpack(suite, folder, PACKAGES)
    return f"unpacked {suite}'s Slurm into {folder}"


def unpack(suite: str, folder: Path, packages: Sequence[str]) -> None:
    """Unpack packages of another Debian into a folder, which is whole or not there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch") as name:
        work = Path(name)
        options = _own_apt(work, suite)
        _run(["apt-get", *options, "-qq", "update"], work)
        _run(["apt-get", *options, "-qq", "download", *packages], work)
        for package in sorted(work.glob("*.deb")):
            _run(["dpkg", "-x", str(package), str(work / "unpacked")], work)
        (work / "unpacked").rename(folder)  # last, so that an existing folder is complete


def require(folder: Path) -> Path:
    """Return the absolute path of a folder that `fetch` has made."""
    path = folder.resolve()
    if not (path / "usr").is_dir():
        raise SandboxError(f"no Slurm in {path}; run `sandbox fetch trixie {folder}`", status=2)
    if re.search(r"[:,\\]", str(path)):
        raise SandboxError(f"{path}: an overlay cannot hold this path; choose another", status=2)
    return path


def _own_apt(work: Path, suite: str) -> list[str]:
    """Give apt a state of its own, with this machine's mirror and another suite."""
    for part in ("lists/partial", "cache/archives/partial", "sources"):
        (work / part).mkdir(parents=True)
    files = sorted([*APT.glob("sources.list"), *APT.glob("sources.list.d/*")])
    mirrors = 0
    for path in files:
        if path.suffix in (".list", ".sources"):
            text = other_suite(path.read_text(), suite, deb822=path.suffix == ".sources")
            (work / "sources" / path.name).write_text(text)
            mirrors += bool(text)
    if not mirrors:
        raise SandboxError(f"{APT} names no mirror of Debian from which to fetch", status=2)
    (work / "status").touch()
    places = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": work / "sources",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "root",
    }
    return [word for key, value in places.items() for word in ("-o", f"{key}={value}")]


def other_suite(text: str, suite: str, *, deb822: bool) -> str:
    """Return apt's sources with another suite, of those alone that hold this Debian itself."""
    here = codename()
    if not deb822:
        lines = re.findall(rf"^(deb (?:\[.*?\] )?\S+) {here} (.*)$", text, re.MULTILINE)
        return "".join(f"{start} {suite} {parts}\n" for start, parts in lines)
    parts = []
    for part in re.split(r"\n\s*\n", text):
        suites = re.search(r"^Suites:(.*)$", part, re.MULTILINE)
        if suites and here in suites[1].split():
            parts.append(part.replace(suites[0], f"Suites: {suite}"))
    return "\n\n".join(parts)


def codename() -> str:
    """Return the name of the Debian that runs here."""
    text = Path("/etc/os-release").read_text()
    found = re.search(r"^VERSION_CODENAME=(\w+)", text, re.MULTILINE)
    return found[1] if found else ""


def _run(argv: list[str], folder: Path) -> None:
    done = subprocess.run(
        argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise SandboxError(f"{argv[0]} failed: {done.stderr.strip()}", status=2)
