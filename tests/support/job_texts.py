"""Job files as texts: read as `load` reads them, or refused with the message for the user."""

import pytest

from toolkit.errors import InputError, SpecError
from toolkit.job.loader import validate
from toolkit.job.spec import JobSpec
from toolkit.text.yaml_reader import read_document

FULL = """\
name: full
module: package.train
args: [--task, digits, --epochs, "10", "", "-1", "no"]
image: registry.example/train@sha256:0123
resources: {nnodes: 2, nproc_per_node: 8, gpus_per_node: 8, cpus_per_node: 96, memory: 64GiB, shm: 1500MB}
time_limit: 4:00:00
env: {LR: "1e-3", EMPTY: "", TEXT: !!str no}
stop: {grace: 2m}
retries: {in_job: 3, requeue: 2}
secrets: {WANDB_API_KEY: null, HF_TOKEN: {secret: hugging.face, key: token_1}}
mounts: [{source: /data, target: /data, read_only: true}, {source: claim:runs, target: /x}]
"""  # noqa: E501


def read(text: str) -> JobSpec:
    """Read a job file's text, as `load` does."""
    return validate(JobSpec, read_document(text, "job.yaml"), SpecError)


def refusal(text: str) -> str:
    with pytest.raises(InputError) as caught:
        read(text)
    return str(caught.value)


def of_job(more: str) -> str:
    """Return why a job with `more` from its third line on is refused."""
    return refusal(f"name: a\nmodule: m\n{more}\n")
