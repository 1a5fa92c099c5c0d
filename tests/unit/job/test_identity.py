"""A job's identity: it cannot be changed, and does not depend on the formatting of its file."""

from typing import Any

import pydantic
import pytest
import yaml
from hypothesis import example, given, settings

from tests.support.any_job import JOBS
from tests.support.job_texts import FULL, read
from toolkit.job.spec import JobSpec
from toolkit.text.yaml_reader import write_document


def test_a_job_cannot_be_changed() -> None:
    job = read(FULL)
    for part, name in [(job, "name"), (job.resources, "nnodes"), (job.mounts[0], "source")]:
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(part, name, 3)


REWRITTEN = """\
# The same, otherwise written.
secrets: {HF_TOKEN: {key: "token_1", secret: 'hugging.face'}, "WANDB_API_KEY": null}
mounts:
- read_only: True
  target: "/data"
  source: /data
- {target: /x, source: "claim:runs", read_only: false}
retries: {requeue: 2, in_job: 0x3}
stop: {grace: 120s}
env:
  TEXT: 'no'
  EMPTY: ''
  LR: !!str 1e-3
time_limit: 0-04:00:00
resources:
  shm: 1.5GB
  memory: 65536MiB
  cpus_per_node: 96
  gpus_per_node: 8
  nproc_per_node: 8
  nnodes: 2
image: "registry.example/train@sha256:0123"
args:
- --task
- digits
- --epochs
- '10'
- ""
- "-1"
- 'no'
module: package.train
name: full
script:
"""


def test_the_digest_does_not_depend_on_order_and_formatting() -> None:
    assert read(REWRITTEN) == read(FULL)
    assert read(REWRITTEN).digest == read(FULL).digest


def test_the_digest_is_the_same_tomorrow() -> None:
    """It stands in committed examples, so a change of it is a change for users."""
    assert read("name: a\nmodule: m\n").digest == "719e169834ef"
    assert read(FULL).digest == "5a83e9b46ff2"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: full", "name: full2"),
        ("module: package.train", "script: package.train"),
        ("--task, digits", "digits, --task"),
        ('"10", ""', '"10"'),
        ("sha256:0123", "sha256:0124"),
        ("nnodes: 2", "nnodes: 3"),
        ("nproc_per_node: 8", "nproc_per_node: 4"),
        ("gpus_per_node: 8", "gpus_per_node: 9"),
        ("cpus_per_node: 96", "cpus_per_node: 95"),
        ("memory: 64GiB", "memory: 64GB"),
        ("shm: 1500MB", "shm: 1500MiB"),
        ("time_limit: 4:00:00", "time_limit: 4:00:01"),
        ('LR: "1e-3"', 'LR: "1e-4"'),
        ('EMPTY: "", ', ""),
        ("grace: 2m", "grace: 2.01m"),
        ("in_job: 3", "in_job: 2"),
        ("requeue: 2", "requeue: 3"),
        ("WANDB_API_KEY: null,", ""),
        ("WANDB_API_KEY: null,", "WANDB_API_KEY: {secret: s, key: k},"),
        ("key: token_1", "key: token_2"),
        ("source: /data", "source: /dat"),
        ("target: /data", "target: /dat"),
        (", read_only: true", ""),
    ],
)
def test_the_digest_changes_with_everything_that_means_something(old: str, new: str) -> None:
    assert FULL.count(old) == 1
    assert read(FULL.replace(old, new)).digest != read(FULL).digest


@settings(deadline=None, max_examples=150)
@given(data=JOBS)
@example(data={"name": "a", "module": "m", "env": {"A": "a\u2028b\x85c"}})
def test_a_job_written_down_is_read_as_the_same_job(data: dict[str, Any]) -> None:
    job = JobSpec.model_validate(data)
    again = read(write_document(job.as_written()))
    assert (again, again.digest) == (job, job.digest)
    assert JobSpec.model_validate(job.as_written()) == job
    assert yaml.safe_load(write_document(job.as_written())) == job.as_written()
