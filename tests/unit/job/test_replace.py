"""`JobSpec.replace`: a job file's job with other values, from Python."""

from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import ROOT
from toolkit.job.spec import Resources


@pytest.fixture
def job() -> toolkit.JobSpec:
    return toolkit.load(ROOT / "jobs/digits.yaml")


def test_a_replaced_job_is_the_one_that_a_changed_file_gives(
    job: toolkit.JobSpec, tmp_path: Path
) -> None:
    changed = job.replace(
        args=["--task", "digits"], time_limit="2h", **{"resources.nnodes": 4, "stop.grace": "30s"}
    )
    text = (ROOT / "jobs/digits.yaml").read_text()
    for old, new in (
        ('[--task, digits, --epochs, "10"]', "[--task, digits]"),
        ("30m", "2h"),
        ("nnodes: 2", "nnodes: 4"),
        ("grace: 60s", "grace: 30s"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "job.yaml").write_text(text)
    assert changed == toolkit.load(tmp_path / "job.yaml")
    assert job == toolkit.load(ROOT / "jobs/digits.yaml")  # the job itself stays


def test_none_takes_a_key_back_to_its_default(job: toolkit.JobSpec) -> None:
    assert job.replace(time_limit=None).time_limit_s is None
    assert job.replace(args=None).args == ()
    assert job.replace(**{"resources.cpus_per_node": None}).resources.cpus_per_node is None


def test_a_part_may_be_a_model_of_ours(job: toolkit.JobSpec) -> None:
    assert job.replace(resources=Resources(nnodes=3)).resources == Resources(nnodes=3)
    assert job.replace(sweep={"grid": {"--seed": [1, 2]}}).points[1].args[-1] == "2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"resources.nnode": 4},
            "job 'digits': unknown key 'nnode' under 'resources'; did you mean 'nnodes'?",
        ),
        (
            {"resources.nnodes": "x"},
            "job 'digits': resources.nnodes: must be a whole number, not 'x'",
        ),
        ({"args": [True]}, "job 'digits': args[0]: must be a string, not True"),
        ({"args.9": "x"}, "job 'digits': there is no 'args.9' to set"),
        (
            {"time_limit": 3, "name": "No"},
            "job 'digits': name: 'No' cannot be used; use at most 32 of a-z, 0-9 and '-', a letter "
            "first and no '-' last (Kubernetes allows no other names, and adds to this one)\n"
            "job 'digits': time_limit: '3' has no unit; write 3s, 3m or 3h",
        ),
    ],
)
def test_every_mistake_is_told_at_once(
    job: toolkit.JobSpec, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(toolkit.SpecError) as caught:
        job.replace(**changes)
    assert str(caught.value) == message


def test_a_secret_is_refused_without_being_shown(job: toolkit.JobSpec) -> None:
    token = "ghp_0123456789abcdefghij0123456789abcdef"
    with pytest.raises(toolkit.SpecError, match="a secret is never written down") as caught:
        job.replace(**{"env.API": token})
    assert token not in str(caught.value)
