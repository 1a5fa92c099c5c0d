"""The schemas of what runs write: true of real files, of the source and of the page, and strict."""

import ast
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.conftest import ROOT
from tests.support.record_schemas import NAMES, SCHEMAS, VALIDATORS, faults_of
from train.rundir.files import VERSION as OURS
from train.rundir.files import Outcome
from train.telemetry import Telemetry

RUN = ROOT / "tests/data/recorded-run"
OUTCOME = json.loads((RUN / "outcome.json").read_text())
EVENTS = [json.loads(line) for line in (RUN / "events.jsonl").read_text().splitlines()]
METRICS = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
MANIFEST = json.loads(next(RUN.rglob("manifest.json")).read_text())
START, EPOCH = EVENTS[0], EVENTS[-2]
ALTERNATIVES = {
    part["if"]["properties"]["event"]["const"]: part["then"] for part in SCHEMAS["event"]["allOf"]
}


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_valid_and_has_its_version(name: str) -> None:
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:torch-deploy-toolkit:schema:{name}:{OURS}"
    assert schema["properties"]["version"] == {"const": OURS}


def test_a_recorded_run_fulfils_them() -> None:
    assert faults_of(RUN) == []


# ---- Strict: each fault that is planted is found


def changed(record: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy in which the value at a path is another one; REMOVED removes the key."""
    new = copy.deepcopy(record)
    inner: Any = new
    *keys, last = path.split("/")
    for key in keys:
        inner = inner[int(key)] if isinstance(inner, list) else inner[key]
    if value is REMOVED:
        del inner[last]
    else:
        inner[last] = value
    return new


REMOVED = object()
FIRST = "rank-00000.safetensors"


@pytest.mark.parametrize(
    ("name", "record", "path", "value"),
    [
        *(("outcome", OUTCOME, key, REMOVED) for key in OUTCOME),
        ("outcome", OUTCOME, "version", 2),
        ("outcome", OUTCOME, "status", "finished"),
        ("outcome", OUTCOME, "step", "6"),
        ("outcome", OUTCOME, "step", -1),
        ("outcome", OUTCOME, "rank", 0.5),
        ("outcome", OUTCOME, "metrics/loss", "1.8"),
        ("outcome", OUTCOME, "reasons", ""),
        *(("event", START, key, REMOVED) for key in ("version", "time", "event", "step")),
        ("event", START, "version", 2),
        ("event", START, "event", "begin"),
        ("event", START, "world_size", REMOVED),
        ("event", START, "world_size", 0),
        ("event", START, "micro_batch", 4),
        ("event", START, "layout/tp", "1"),
        ("event", START, "seconds", 1.0),
        ("event", EVENTS[1], "nodes/0/ranks", REMOVED),
        ("event", EVENTS[1], "packages_differ", [0.5]),
        ("event", EVENTS[2], "phases/import", 1.0),
        ("event", EVENTS[2], "began", None),
        ("event", EVENTS[3], "stall_second", 1.0),
        ("event", EVENTS[3], "stall_seconds", REMOVED),
        ("event", EVENTS[3], "checkpoint", "/abs/step-00000004"),
        ("event", EVENTS[5], "seconds", 1.0),
        ("event", EPOCH, "second", 1.0),
        ("event", EPOCH, "test_loss", "1.7"),
        ("event", EPOCH, "epoch", "1"),
        ("event", EVENTS[-1], "loss", [1.0]),
        *(("metric", METRICS[0], key, REMOVED) for key in ("version", "time", "attempt", "step")),
        ("metric", METRICS[0], "step", 1.5),
        ("metric", METRICS[0], "loss", "2.3"),
        ("metric", METRICS[0], "count", 1),
        ("metric", METRICS[0], "note", "text"),
        ("metric", METRICS[0], "seconds", -1.0),
        ("checkpoint-manifest", MANIFEST, "files", {}),
        ("checkpoint-manifest", MANIFEST, "files/state.json", REMOVED),
        ("checkpoint-manifest", MANIFEST, f"files/{FIRST}/sha256", "5DF7"),
        ("checkpoint-manifest", MANIFEST, f"files/{FIRST}/bytes", "151040"),
        ("checkpoint-manifest", MANIFEST, "files/evil.pkl", {"bytes": 1, "sha256": "0" * 64}),
        ("checkpoint-manifest", MANIFEST, "samples_seen", REMOVED),
        ("checkpoint-manifest", MANIFEST, "version", 2),
    ],
)
def test_a_planted_fault_is_found(name: str, record: dict[str, Any], path: str, value: Any) -> None:
    assert VALIDATORS[name].is_valid(record)
    assert not VALIDATORS[name].is_valid(changed(record, path, value))


def test_a_fault_in_a_file_is_found_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        f'{json.dumps(START)}\n{{"torn\n{json.dumps(changed(START, "device", 1))}\n'
    )
    assert faults_of(tmp_path)[0] == "events.jsonl:3: $.device: 1 is not of type 'string'"


# ---- True of the source


def test_the_outcome_has_the_fields_of_the_source() -> None:
    fields = {"version", "time", *Outcome.__dataclass_fields__}
    schema = SCHEMAS["outcome"]
    assert (set(schema["required"]), set(schema["properties"])) == (fields, fields)


def calls_of_event() -> Iterator[tuple[str, ast.Call]]:
    """Yield the event and the call of each `.event("NAME", …)` in `train/`."""
    for path in sorted((ROOT / "train").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", "") == "event"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                yield str(node.args[0].value), node


def test_each_event_of_the_source_is_described_with_its_fields() -> None:
    seen = set()
    for event, call in calls_of_event():
        seen.add(event)
        described = ALTERNATIVES[event].get("properties", {}).keys()
        named = {word.arg for word in call.keywords if word.arg is not None} - {"step"}
        assert named <= described, event
        if not any(word.arg is None for word in call.keywords):  # no `**more`
            assert named == described, event
    assert seen == set(SCHEMAS["event"]["properties"]["event"]["enum"]) == set(ALTERNATIVES)


def test_a_copied_script_writes_what_they_describe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAIN_RUN_DIR", str(tmp_path))
    telemetry = Telemetry()
    telemetry.ready()
    telemetry.step(1, loss=0.5)
    for what in ("evaluation", "checkpoint"):
        with telemetry.during(what):
            pass
    assert faults_of(tmp_path) == []
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 5


# ---- True of the page


def test_the_page_has_each_event_with_its_fields() -> None:
    page = (ROOT / "docs/reference/run-directory.md").read_text()
    _, _, section = page.partition("\n## events.jsonl\n")
    table = section.partition("\n### ")[0]
    told = {
        event: set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", fields)))
        for event, fields in re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", table, re.MULTILINE)
    }
    described = {name: {*part.get("properties", {})} for name, part in ALTERNATIVES.items()}
    phases = ALTERNATIVES["ready"]["properties"]["phases"]["propertyNames"]["enum"]
    figures = {"loss", "test_accuracy", "test_loss"}
    assert told == {
        **described,
        "ready": {*described["ready"], *phases},
        "epoch": described["epoch"] | figures,
        "done": figures,
    }
