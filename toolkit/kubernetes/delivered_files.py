"""Lines of a pod's log by which a call hands over files: distinguished from the ranks' own output.

Each carries an HMAC over its content, with a key that only this run's pods and the submitting
client have. So no line that a rank prints, such as a sample of the data or the answer of a server,
is taken for a result. functions/pod_results.py writes them.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.planning.pods import FILE_MARK
from toolkit.text import untrusted

__all__ = ["FilePart", "files_of_parts", "is_delivery", "key_of", "part_of", "parts_of"]

_FORM = re.compile(
    rf"(?:\[[^\]\s]{{1,253}}\] )?{FILE_MARK}(?P<said>(?P<name>[\w./-]{{1,200}}) "
    r"(?:(?P<number>[0-9]{1,4})/(?P<count>[0-9]{1,4}) (?P<digest>[0-9a-f]{64}) "
    r"(?P<chunk>[A-Za-z0-9+/]{0,16000}={0,2})|too-large (?P<size>[0-9]{1,15})))"
    r" (?P<code>[0-9a-f]{64})",
    re.ASCII,
)
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """The content of one line."""

    name: str
    """Of the file, by its path in the run directory."""

    number: int = 0
    """Which part of the file, from 1; 0 where the file was too large."""

    count: int = 0
    """How many parts there are."""

    digest: str = ""
    """The SHA-256 of the whole file."""

    chunk: bytes = b""
    """The part's bytes."""

    size: int = 0
    """How large the file is, where it was too large for the log."""


def is_delivery(line: str) -> bool:
    """Whether a line has the form of a delivery, authentic or not."""
    return FILE_MARK in line and _FORM.fullmatch(line) is not None


def key_of(run_dir: Path | None) -> str:
    """Return the key of a call's run; empty where it has none."""
    if run_dir is None:
        return ""
    try:
        call = untrusted.read_json(run_dir / "function/call.json", below=run_dir)
    except (OSError, ValueError):
        return ""
    key = untrusted.mapping(call).get("key")
    return key if isinstance(key, str) and _KEY.fullmatch(key) else ""


def part_of(line: str, key: str) -> FilePart | None:
    """Return the content of a line; None for one that this run's pods have not written."""
    if not key or FILE_MARK not in line or (match := _FORM.fullmatch(line)) is None:
        return None
    code = hmac.new(bytes.fromhex(key), match["said"].encode(), hashlib.sha256).hexdigest()
    if not hmac.compare_digest(code, match["code"]):
        return None
    if match["size"]:
        return FilePart(name=match["name"], size=int(match["size"]))
    try:
        chunk = base64.b64decode(match["chunk"], validate=True)
    except binascii.Error:
        return None
    return FilePart(
        name=match["name"],
        number=int(match["number"]),
        count=int(match["count"]),
        digest=match["digest"],
        chunk=chunk,
    )


def parts_of(lines: Iterable[str], key: str) -> Iterator[FilePart]:
    """Yield what the lines say that this run's pods have written."""
    return (part for line in lines if (part := part_of(line, key)) is not None)


def files_of_parts(parts: Iterable[FilePart]) -> Iterator[tuple[str, bytes | int]]:
    """Yield the files that are whole, each with its bytes, or its size where it was too large.

    A container that was started again hands over its files again: a name may come several times.
    """
    begun: dict[tuple[str, str], dict[int, bytes]] = {}
    for part in parts:
        if not part.number:
            yield part.name, part.size
            continue
        kept = begun.setdefault((part.name, part.digest), {})
        kept[part.number] = part.chunk
        if len(kept) == part.count:
            content = b"".join(kept[number] for number in sorted(kept))
            del begun[part.name, part.digest]
            if hashlib.sha256(content).hexdigest() == part.digest:
                yield part.name, content
