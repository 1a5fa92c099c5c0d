"""The schemas of what runs write, and what they find in a run directory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

REFERENCE = Path(__file__).parents[2] / "docs/reference"
NAMES = ("outcome", "event", "metric", "checkpoint-manifest")
SCHEMAS: dict[str, dict[str, Any]] = {
    name: json.loads((REFERENCE / f"{name}.schema.json").read_text()) for name in NAMES
}
VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, schema in SCHEMAS.items()}

_MOST_LINES = 300
"""How many lines of a file are looked at, half of them at its end."""


def faults_of(run_dir: Path) -> list[str]:
    """Return what the schemas find in the files of a run directory, each with its place."""
    return [
        f"{place}: {error.json_path}: {error.message}"
        for name, place, record in _records(run_dir)
        for error in VALIDATORS[name].iter_errors(record)
    ]


def _records(run_dir: Path) -> Iterator[tuple[str, str, Any]]:
    manifests = run_dir.glob("checkpoints/attempt-*/step-*[0-9]/manifest.json")
    whole = [("outcome", run_dir / "outcome.json")]
    whole += [("checkpoint-manifest", path) for path in sorted(manifests)]
    for name, path in whole:
        if path.is_file():
            yield name, str(path.relative_to(run_dir)), json.loads(path.read_text())
    for name in ("event", "metric"):
        path = run_dir / f"{name}s.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        for number, line in enumerate(lines, start=1):
            if _MOST_LINES // 2 < number <= len(lines) - _MOST_LINES // 2:
                continue
            try:
                record = json.loads(line)
            except ValueError:  # torn by a kill
                continue
            yield name, f"{path.name}:{number}", record
