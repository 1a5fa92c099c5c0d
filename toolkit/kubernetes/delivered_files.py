"""Lines of a pod's log by which a call hands over files: distinguished from the ranks' own output.

Each carries an HMAC over its content, with a key that only this run's pods and the submitting
client have. So no line that a rank prints, such as a sample of the data or the answer of a server,
is taken for a result. functions/pod_results.py writes them.
"""

import base64
import binascii
import contextlib
import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from toolkit.planning.pods import FILE_MARK
from toolkit.text import untrusted

_FORM = re.compile(
    rf"(?:\[[^\]\s]{{1,253}}\] )?{FILE_MARK}(?P<content>(?P<name>[\w./-]{{1,200}}) "
    r"(?:(?P<number>[0-9]{1,4})/(?P<count>[0-9]{1,4}) (?P<digest>[0-9a-f]{64}) "
    r"(?P<chunk>[A-Za-z0-9+/]{0,16000}={0,2})|too-large (?P<size>[0-9]{1,15})))"
    r" (?P<code>[0-9a-f]{64})",
    re.ASCII,
)
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)


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


def signed(line: str, key: str) -> re.Match[str] | None:
    """Return the fields of a line that the pods with this key have written; None for any other."""
    if not key or FILE_MARK not in line or (match := _FORM.fullmatch(line)) is None:
        return None
    code = hmac.new(bytes.fromhex(key), match["content"].encode(), hashlib.sha256).hexdigest()
    return match if hmac.compare_digest(code, match["code"]) else None


def whole_files(lines: Iterable[str], key: str) -> Iterator[tuple[str, bytes | int]]:
    """Yield the files that are whole, each with its bytes, or its size where it was too large.

    They are named by their paths in the run directory. A container that was started again hands
    over its files again: a name may come several times.
    """
    incomplete: dict[tuple[str, str], dict[int, bytes]] = {}
    for line in lines:
        if (match := signed(line, key)) is None:
            continue
        name, digest = match["name"], match["digest"]
        if match["size"]:
            yield name, int(match["size"])
            continue
        parts = incomplete.setdefault((name, digest), {})
        with contextlib.suppress(binascii.Error):
            parts[int(match["number"])] = base64.b64decode(match["chunk"], validate=True)
        if len(parts) == int(match["count"]):
            content = b"".join(parts[number] for number in sorted(parts))
            del incomplete[name, digest]
            if hashlib.sha256(content).hexdigest() == digest:
                yield name, content
