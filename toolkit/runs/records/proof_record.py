"""What `train` has recorded of its proof that a run trains as one process does: `proof.json`."""

from pathlib import Path

from toolkit.runs.records.record_version import require_known
from toolkit.text import control, untrusted

_LONGEST = 500
"""Characters of a reason that are shown."""


def exceptions_of(folder: Path) -> str | None:
    """Return which differences to one process are accepted, or why there is no proof.

    None where the run trains as one process does, or has recorded nothing.

    Raises:
        NewerFormat: the record is of a version that is not known here.
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
        text = f"equal to one process, but for accepted differences: {', '.join(names)}"
    else:
        return None
    return control.printable(untrusted.shortened(text, _LONGEST))
