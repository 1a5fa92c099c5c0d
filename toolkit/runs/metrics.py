"""The curves of a run: what `metrics.jsonl` holds, one row per step."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.text import untrusted

__all__ = ["figures", "read_metrics", "table"]

Row = dict[str, Any]

_BYTES = 1 << 30
"""How much of the curves is read: those of millions of steps."""

_NOT_SHOWN = ("version",)
_HIDDEN = ("version", "time", "attempt", "restart")


def read_metrics(run_dir: Path) -> list[Row]:
    """Return one row per step, in the order of the steps; none where nothing was measured.

    Training and evaluation records of a step make one row. Steps that were made again after a
    failure count once: a new start voids what earlier ones have written from its first step on.
    """
    rows: dict[int, Row] = {}
    newest = (0, 0)
    for record in _records(run_dir / "metrics.jsonl"):
        start = (_number(record, "attempt"), _number(record, "restart"))
        step = _number(record, "step")
        if start > newest:
            newest = start
            rows = {earlier: row for earlier, row in rows.items() if earlier < step}
        shown = {key: value for key, value in record.items() if key not in _NOT_SHOWN}
        rows[step] = rows.get(step, {}) | shown
    return [rows[step] for step in sorted(rows)]


def table(rows: Sequence[Row]) -> Any:
    """Return rows as a pandas DataFrame where pandas is installed, else as they are."""
    if importlib.util.find_spec("pandas") is None:
        return list(rows)
    import pandas

    return pandas.DataFrame(list(rows))


def figures(metrics: Mapping[str, Any]) -> str:
    """Return the figures of a step as one line."""
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in metrics.items()
        if key not in _HIDDEN
    )


def _records(path: Path) -> list[Mapping[str, Any]]:
    # Lines may be torn by a kill, or just being written.
    records = map(untrusted.mapping, untrusted.lines_of_json(path, limit=_BYTES))
    return [record for record in records if untrusted.whole(record.get("step")) is not None]


def _number(record: Mapping[str, Any], key: str) -> int:
    return untrusted.whole(record.get(key)) or 0
