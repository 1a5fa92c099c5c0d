"""Make `schemas/*.json` from CustomResourceDefinitions, as `kubectl get crd NAME -o yaml` shows.

`python -m tests.fakes.kubernetes.make_schemas FILE…`: without descriptions, and with repeated parts
once, under `$defs`.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "schemas"
WORTH = 200
"""From how many characters on a part that is there twice gets a name."""


def slim(schema: Any) -> Any:
    """Return a schema without its descriptions."""
    if isinstance(schema, dict):
        found = {k: slim(v) for k, v in schema.items()}
        return {k: v for k, v in found.items() if not (k == "description" and isinstance(v, str))}
    return [slim(one) for one in schema] if isinstance(schema, list) else schema


def share(schema: Any) -> Any:
    """Return a schema in which equal parts are one, under `$defs`."""
    seen: Counter[str] = Counter()
    names: dict[str, str] = {}
    parts: dict[str, Any] = {}

    def count(part: Any) -> None:
        for one in part.values() if isinstance(part, dict) else part:
            if isinstance(one, dict | list):
                if isinstance(one, dict) and one.get("type") in ("object", "array"):
                    seen[json.dumps(one)] += 1
                    if seen[json.dumps(one)] > 1:
                        continue
                count(one)

    def named(part: Any, key: str) -> Any:
        if isinstance(part, list):
            return [named(one, key) for one in part]
        if not isinstance(part, dict):
            return part
        text = json.dumps(part)
        if seen[text] < 2 or len(text) < WORTH:
            return {k: named(v, key if k == "items" else k) for k, v in part.items()}
        if text not in names:
            taken = sum(name.rstrip("0123456789") == key for name in names.values())
            names[text] = f"{key}{taken + 1 if taken else ''}"
            parts[names[text]] = {k: named(v, k) for k, v in part.items()}
        return {"$ref": f"#/$defs/{names[text]}"}

    count(schema)
    return named(schema, "root") | {"$defs": parts}


def main() -> None:
    """Write one file for each definition that is named on the command line."""
    for file in sys.argv[1:]:
        crd = yaml.load(Path(file).read_text(), Loader=yaml.CSafeLoader)
        (version,) = crd["spec"]["versions"]
        schema = share(slim(version["schema"]["openAPIV3Schema"]))
        text = json.dumps(schema, separators=(",", ":"))
        (FOLDER / f"{crd['spec']['names']['plural']}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
