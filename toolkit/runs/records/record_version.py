"""The version of what runs write: a record of another one is refused in one line."""

from typing import Any

from toolkit.errors import NewerFormat
from toolkit.text import untrusted

VERSION = 1
"""The version that is read; see docs/reference/formats.md."""


def require_known(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a record of the file `name`, if its version is known; one without a version is of 1.

    Raises:
        NewerFormat: it is of another version, and its keys may mean anything.
    """
    if (version := record.get("version", VERSION)) != VERSION:
        number = untrusted.whole(version)
        shown = "no known version" if number is None else f"version {number}"
        raise NewerFormat(
            f"{name} is of {shown}, and this toolkit reads {VERSION}; upgrade the toolkit"
        )
    return record
