"""The format version of run records: a record with another version is refused in one line."""

from typing import Any

from toolkit.errors import NewerFormat
from toolkit.text import untrusted

VERSION = 1
"""The supported version; see docs/reference/formats.md."""


def require_known(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a record of the file `name` if its version is known; the default version is 1.

    Raises:
        NewerFormat: the record has another version, so its keys may have other meanings.
    """
    if (version := record.get("version", VERSION)) != VERSION:
        number = untrusted.whole(version)
        shown = "no known version" if number is None else f"version {number}"
        raise NewerFormat(
            f"{name} is of {shown}, and this toolkit reads {VERSION}; upgrade the toolkit"
        )
    return record
