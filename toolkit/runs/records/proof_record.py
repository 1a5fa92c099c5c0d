"""`proof.json`: the record of `train` about its proof that a run trains as one process does."""

from pathlib import Path

from toolkit.runs.records.record_version import require_known
from toolkit.text import control, untrusted

_LONGEST = 500
"""Character limit of a displayed reason."""


def exceptions_of(folder: Path) -> str | None:
    """Return the accepted differences to one process, or why the proof is missing.

    None if the run trains as one process does, or has no record.

    Raises:
        NewerFormat: the record has an unknown version.
    """
    try:
        content = untrusted.read_json(folder / "proof.json")
    except (OSError, ValueError):
        return None
    record = require_known(untrusted.mapping(content), "proof.json")
    names = [one for one in untrusted.sequence(record.get("accepted")) if isinstance(one, str)]
    missing = record.get("missing")
    if isinstance(missing, str) and missing:
        text = f"none: {missing}"
    elif names:
        text = f"equal to one process, except for accepted differences: {', '.join(names)}"
    else:
        return None
    return control.printable(untrusted.shortened(text, _LONGEST))
