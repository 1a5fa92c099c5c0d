"""The JSON Schema of profiles: complete, committed, and of one mind with the loader."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

import toolkit
from tests.conftest import ROOT
from toolkit.cli import cli
from toolkit.errors import ProfileError

COMMITTED = ROOT / "docs/reference/profile.schema.json"
SCHEMA = toolkit.profile_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
PROFILES = sorted(
    [
        *ROOT.glob("slurm/profiles/*.yaml"),
        *ROOT.glob("k8s/profiles/*.yaml"),
        *ROOT.glob("tests/data/profiles/*.yaml"),
    ]
)


def test_the_schema_is_valid_and_has_its_version() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$id"] == "urn:torch-deploy-toolkit:schema:profile:1"
    assert toolkit.json_schema()["$id"] == "urn:torch-deploy-toolkit:schema:job:1"


def test_the_committed_schema_is_the_printed_one() -> None:
    printed = CliRunner().invoke(cli, ["schema", "profile"], catch_exceptions=False)
    assert COMMITTED.read_text() == printed.output
    assert json.loads(printed.output) == SCHEMA


def test_every_key_is_described_and_no_other_is_taken() -> None:
    assert {"LocalProfile", "SlurmProfile", "KubernetesProfile"} < SCHEMA["$defs"].keys()
    for name, part in SCHEMA["$defs"].items():
        assert (part["description"].endswith("."), part["additionalProperties"]) == (
            True,
            False,
        ), name
        for key, about in part["properties"].items():
            assert about.get("description", "").endswith("."), f"{name}.{key}"
            assert "title" not in about, f"{name}.{key}"


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profiles_fulfil_it(path: Path) -> None:
    VALIDATOR.validate(yaml.safe_load(path.read_text()))


def agrees(data: dict[str, Any], folder: Path) -> bool:
    """Return whether a profile is good, and fail unless schema and loader say the same."""
    path = folder / "site.yaml"
    path.write_text(json.dumps(data))
    errors = [error.message for error in VALIDATOR.iter_errors(data)]
    try:
        toolkit.load_profile(str(path))
    except ProfileError as error:
        assert errors, f"only the loader refuses {data}: {error}"
        return False
    assert not errors, f"only the schema refuses {data}: {errors}"
    return True


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "local"},
        {"kind": "local", "version": 1, "node": {"memory": "1.5TiB", "gpus": None}},
        {"kind": "local", "price": {"rank_hour": 2}, "notify": {"command": "cat"}},
        {"kind": "slurm", "via": "ssh me@login", "remote_dir": "~/x", "code_limit": "2GiB"},
        {"kind": "slurm", "switches": {"count": 2}, "sbatch": {"hint": "nomultithread"}},
        {"kind": "slurm", "kill_wait": "45s", "modules": ["cuda"], "prolog": ["a\tb"]},
        {"kind": "kubernetes", "topology": {"key": "a.b/zone", "required": True}},
        {"kind": "kubernetes", "resources": {"rdma/hca": 1}, "node_selector": {"a": ""}},
        {"kind": "kubernetes", "patches": [{"merge": {"spec": None}}], "ttl": "7d"},
    ],
)
def test_good_profiles_are_good_to_both(data: dict[str, Any], tmp_path: Path) -> None:
    assert agrees(data, tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"kind": "pbs"},
        {"kind": None},
        {"kind": "local", "version": 2},
        {"kind": "local", "version": "1"},
        {"kind": "local", "partition": "gpu"},
        {"kind": "local", "runs_dir": "~/runs"},
        {"kind": "local", "runs_dir": "/scratch/$USER/runs"},
        {"kind": "local", "templates_dir": ""},
        {"kind": "local", "price": {}},
        {"kind": "local", "price": {"rank_hour": "2"}},
        {"kind": "local", "env": {"RANK": "0"}},
        {"kind": "local", "node": {"gpus": -1}},
        {"kind": "slurm", "namespace": "a"},
        {"kind": "slurm", "exclusive": "true"},
        {"kind": "slurm", "kill_wait": 30},
        {"kind": "slurm", "switches": {"count": 0}},
        {"kind": "slurm", "sbatch": {"nodes": 2}},
        {"kind": "slurm", "modules": "cuda"},
        {"kind": "kubernetes", "topology": {"key": "zone", "required": "true"}},
        {"kind": "kubernetes", "topology": {"key": "zone", "required": 1}},
        {"kind": "kubernetes", "topology": {"required": True}},
        {"kind": "kubernetes", "workload": "Pod"},
        {"kind": "kubernetes", "resources": {"hca": 1}},
        {"kind": "kubernetes", "node_selector": {"a b": "c"}},
        {"kind": "kubernetes", "node_selector": {"a": 1}},
        {"kind": "kubernetes", "run_as_user": "1000"},
        {"kind": "kubernetes", "tolerations": [{"operator": "Exist"}]},
    ],
)
def test_bad_profiles_are_bad_to_both(data: dict[str, Any], tmp_path: Path) -> None:
    assert not agrees(data, tmp_path)


def patterns(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from (text for key, text in part.items() if key == "pattern")
        yield from part.get("patternProperties", {})
        for inner in part.values():
            yield from patterns(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from patterns(inner)


@pytest.mark.parametrize(
    "path", sorted(COMMITTED.parent.glob("*.schema.json")), ids=lambda path: path.stem
)
def test_editors_can_read_every_pattern(path: Path) -> None:
    """They are of JavaScript, which knows no escape of what needs none, and no named groups."""
    for pattern in patterns(json.loads(path.read_text())):
        assert set(re.findall(r"\\([^\w\s])", pattern)) <= set("^$\\.*+?()[]{}|/-"), pattern
        assert "(?P" not in pattern, pattern
