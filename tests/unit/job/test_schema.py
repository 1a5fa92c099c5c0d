"""The JSON Schema: complete, committed, and of one mind with the loader."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import toolkit
from tests.support.any_job import JOBS
from toolkit.cli import cli
from toolkit.errors import InputError
from toolkit.job.spec import JobSpec

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / "docs" / "reference" / "job.schema.json"
SCHEMA = toolkit.json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
JOB_FILES = sorted((ROOT / "jobs").glob("*.yaml"))


def properties(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every property that a file may have, at every level."""
    for name, found in schema.get("properties", {}).items():
        yield f"{path}.{name}", found
    for name, found in schema.get("$defs", {}).items():
        yield from properties(found, f"{path}.{name}")


def test_the_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_every_key_at_every_level_is_described() -> None:
    found = dict(properties(SCHEMA))
    assert list(found) == [
        ".version",
        ".name",
        ".module",
        ".script",
        ".command",
        ".args",
        ".image",
        ".workdir",
        ".resources",
        ".time_limit",
        ".env",
        ".stop",
        ".retries",
        ".start",
        ".stall_timeout",
        ".log_pattern",
        ".log_rank",
        ".notify",
        ".secrets",
        ".sbatch",
        ".mounts",
        ".kubernetes",
        ".sweep",
        ".after",
        ".KubernetesOptions.workload",
        ".KubernetesOptions.queue",
        ".KubernetesOptions.priority_class",
        ".KubernetesOptions.patches",
        ".Mount.source",
        ".Mount.target",
        ".Mount.read_only",
        ".NodeRange.min",
        ".NodeRange.max",
        ".Notify.events",
        ".Notify.webhook",
        ".Notify.webhook_file",
        ".Notify.command",
        ".Patch.kind",
        ".Patch.merge",
        ".Patch.json",
        ".Resources.nnodes",
        ".Resources.nproc_per_node",
        ".Resources.gpus_per_node",
        ".Resources.cpus_per_node",
        ".Resources.memory",
        ".Resources.shm",
        ".Retries.in_job",
        ".Retries.requeue",
        ".Retries.preemptions",
        ".Retries.no_progress",
        ".Secret.secret",
        ".Secret.key",
        ".Secret.file",
        ".Stop.grace",
        ".Stop.protect_children",
        ".Sweep.grid",
        ".Sweep.zip",
        ".Sweep.list",
        ".Sweep.max_running",
    ]
    for name, schema in found.items():
        assert schema.get("description", "").endswith("."), name
        assert "title" not in schema, name
    for name, schema in SCHEMA["$defs"].items():
        assert (schema["description"].endswith("."), schema["additionalProperties"]) == (
            True,
            False,
        ), name


def test_the_committed_schema_is_the_printed_one() -> None:
    """`toolkit schema > docs/reference/job.schema.json` writes it again."""
    printed = CliRunner().invoke(cli, ["schema"], catch_exceptions=False)
    assert printed.exit_code == 0
    assert COMMITTED.read_text() == printed.output
    assert json.loads(printed.output) == SCHEMA


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.stem)
def test_committed_job_files_name_the_schema_and_fulfil_it(path: Path) -> None:
    first, _, _ = path.read_text().partition("\n")
    mark, _, target = first.partition("$schema=")
    assert mark == "# yaml-language-server: "
    assert (path.parent / target).resolve() == COMMITTED
    VALIDATOR.validate(yaml.safe_load(path.read_text()))


def agrees(data: Any) -> bool:
    """Return whether a job is good, and fail unless schema and loader say the same."""
    errors = [error.message for error in VALIDATOR.iter_errors(data)]
    try:
        JobSpec.model_validate(data)
    except (pydantic.ValidationError, InputError) as error:
        assert errors, f"only the loader refuses {data}: {error}"
        return False
    assert not errors, f"only the schema refuses {data}: {errors}"
    return True


JOB: dict[str, Any] = {"name": "a", "module": "m"}


@pytest.mark.parametrize(
    "more",
    [
        {"module": None, "script": "s"},
        {"module": None, "command": ["c", "-x"]},
        {"script": None, "command": None, "time_limit": None, "image": None},
        {"args": []},
        {"args": ["", "-x", "no"]},
        {"args": ["--lr", 0.01, 3]},
        {"env": {}, "secrets": [], "mounts": []},
        {"secrets": ["A", "B"]},
        {"secrets": {"A": None, "B": {"secret": "s", "key": "k"}}},
        {"secrets": {"A": {"file": "~/k"}, "B": {"file": "/k", "key": None}}},
        {"sbatch": {"reservation": "x", "exclusive": True, "nice": 5, "comment": None}},
        {"sbatch": {"gres": "nvme:1,shard:2", "constraint": "a100&nvlink"}},
        {"time_limit": "1-02:03:04"},
        {"resources": {"memory": "1.5 TiB", "shm": None, "cpus_per_node": None}},
        {"mounts": [{"source": "claim:a.b", "target": "/a b"}]},
        {"sweep": {"grid": {"--a.b": ["x", 1, 0.5, True], "env.B": ["", 2]}, "max_running": 3}},
        {"sweep": {"zip": {"--a": [1, 2], "--b": [1, 2]}, "list": [{}, {"--c": False}]}},
        {"sweep": None, "after": ["x", {"any": "slurm://c/1"}, {"fail": "y", "ok": None}]},
    ],
)
def test_good_jobs_are_good_to_both(more: dict[str, Any]) -> None:
    assert agrees(JOB | more)


@pytest.mark.parametrize(
    "more",
    [
        {"name": None},
        {"name": "A"},
        {"name": "x" * 33},
        {"module": None},
        {"module": ""},
        {"module": "a/b"},
        {"script": "s"},
        {"module": None, "script": "-s"},
        {"module": None, "script": ""},
        {"module": None, "command": []},
        {"module": None, "command": [""]},
        {"module": None, "command": ["-c"]},
        {"module": None, "command": "c"},
        {"args": "x"},
        {"args": None},
        {"args": [True]},
        {"image": ""},
        {"image": "a b"},
        {"resources": None},
        {"resources": {"nnodes": 0}},
        {"resources": {"nnodes": "2"}},
        {"resources": {"nnodes": True}},
        {"resources": {"nodes": 2}},
        {"resources": {"memory": 64}},
        {"resources": {"memory": "64G"}},
        {"resources": {"memory": " 64GiB"}},
        {"resources": {"memory_bytes": "64GiB"}},
        {"time_limit": "4"},
        {"time_limit": ""},
        {"time_limit": "4:00"},
        {"time_limit": 240},
        {"time_limit_s": "4h"},
        {"stop": {"grace": None}},
        {"retries": {"in_job": -1}},
        {"env": ["A"]},
        {"env": {"A": 1}},
        {"env": {"A-B": "x"}},
        {"env": {"RANK": "x"}},
        {"env": {"PET_X": "x"}},
        {"secrets": "A"},
        {"secrets": ["A", "A"]},
        {"secrets": ["A-B"]},
        {"secrets": ["RANK"]},
        {"secrets": [None]},
        {"secrets": {"A": "x"}},
        {"secrets": {"A": {"secret": "s"}}},
        {"secrets": {"A": {"secret": "S", "key": "k"}}},
        {"secrets": {"A": {"secret": "s", "key": ""}}},
        {"secrets": {"SLURM_A": None}},
        {"secrets": {"A": {"file": "k"}}},
        {"secrets": {"A": {"file": "/k", "secret": "s", "key": "k"}}},
        {"secrets": {"A": {}}},
        {"sbatch": ["hold"]},
        {"sbatch": {"hold": "yes"}},
        {"sbatch": {"hold": False}},
        {"sbatch": {"comment": True}},
        {"sbatch": {"comment": ""}},
        {"sbatch": {"comment": "a\tb"}},
        {"sbatch": {"comment": ["a"]}},
        {"sbatch": {"nodes": 2}},
        {"sbatch": {"foo": "x"}},
        {"sbatch": {"gres": "nvme:1,gpu:2"}},
        {"sweep": []},
        {"sweep": {}},
        {"sweep": {"grid": {}, "list": [], "max_running": 2}},
        {"sweep": {"grid": {"--a": []}}},
        {"sweep": {"grid": {"--a": "x"}}},
        {"sweep": {"grid": {"--a": [None]}}},
        {"sweep": {"grid": {"--a": [["x"]]}}},
        {"sweep": {"grid": {"-a": [1]}}},
        {"sweep": {"grid": {"nnodes": [1]}}},
        {"sweep": {"grid": {"env.RANK": [1]}}},
        {"sweep": {"zip": {"env.A": [True]}}},
        {"sweep": {"list": [{"env.A": False}]}},
        {"sweep": {"list": {"--a": 1}}},
        {"sweep": {"grid": {"--a": [1]}, "max_running": 0}},
        {"sweep": {"grid": {"--a": [1]}, "max": 1}},
        {"after": "x"},
        {"after": [""]},
        {"after": [{}]},
        {"after": [{"ok": "a", "any": "b"}]},
        {"after": [{"then": "a"}]},
        {"mounts": ["/a"]},
        {"mounts": [{"source": "a", "target": "/a"}]},
        {"mounts": [{"source": "/a", "target": "a"}]},
        {"mounts": [{"source": "claim:A", "target": "/a"}]},
        {"mounts": [{"source": "/a"}]},
        {"mounts": [{"source": "/a", "target": "/a", "read_only": "true"}]},
        {"mounts": [{"source": "/a", "target": "/a", "readonly": True}]},
    ],
)
def test_bad_jobs_are_bad_to_both(more: dict[str, Any]) -> None:
    assert not agrees(JOB | more)


def paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where something stands in `data`."""
    entries = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from paths(value, (*path, key))


VALUES = st.one_of(
    st.sampled_from([None, True, 0, -1, 1, 1.5, "", "x", "-x", "X", "/x", "claim:x"]),
    st.sampled_from(["4h", "64GiB", "1G", "1:30", "train", "a b", "RANK"]),
    st.sampled_from([[], ["x"], [1], [None], [{"source": "/x", "target": "/x"}]]),
    st.sampled_from([{}, {"X": "x"}, {"RANK": "x"}, {"a b": "x"}, {"X": None}, {"x": 1}]),
    st.sampled_from([{"secret": "s", "key": "k"}, {"nnodes": 2}, {"grace": "4h"}]),
    st.sampled_from([{"file": "/k"}, {"file": "k"}, {"hold": True}, {"nodes": 1}]),
)


@settings(deadline=None, max_examples=100)
@given(data=JOBS)
def test_every_good_job_is_good_to_the_schema(data: dict[str, Any]) -> None:
    assert agrees(data)
    assert agrees(JobSpec.model_validate(data).as_written())


@settings(deadline=None, max_examples=400)
@given(data=JOBS, value=VALUES, choice=st.data())
def test_a_job_with_any_value_changed_is_judged_alike(
    data: dict[str, Any], value: Any, choice: st.DataObject
) -> None:
    path = choice.draw(st.sampled_from(sorted(paths(data), key=repr)))
    changed = copy.deepcopy(data)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    assume(inner[path[-1]] != value)
    inner[path[-1]] = value
    agrees(changed)
