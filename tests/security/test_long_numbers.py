"""Numbers of thousands of digits, which Python refuses to convert, in what others have written."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import toolkit
from tests.conftest import ROOT
from tests.support.asked_slurm import CONFIG, sinfo
from toolkit.errors import RunNotFound
from toolkit.kubernetes.failure import ContainerOutput, first_failure
from toolkit.kubernetes.pods import attempt_of, index_of, last_words, short_name
from toolkit.profile.detect import discover
from toolkit.runs.run import Run

LONG = "9" * 5000

SCRIPT = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks={tasks} --ntasks-per-node=1 --gpus-per-node={gpus} --time=1:00:00
#SBATCH --signal={signal}
export MASTER_ADDR=localhost
all=(a b)
echo "${{all[{index}]}}"
srun --nodes={nodes} torchrun --nnodes={nnodes} --nproc-per-node={workers} \
  --rdzv-backend=c10d --rdzv-endpoint=localhost:{port} train.py
"""
SMALL = {
    "nodes": "2",
    "tasks": "2",
    "gpus": "8",
    "signal": "B:USR1@60",
    "index": "1",
    "nnodes": "2",
    "workers": "8",
    "port": "29500",
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, LONG) for name in SMALL if name != "signal"),
        ("nodes", f"{LONG}-{LONG}"),
        ("nnodes", f"1:{LONG}"),
        ("gpus", f"a100:{LONG}(S:0)"),
        ("signal", f"B:USR1@{LONG}"),
        ("signal", f"{LONG}@60"),
    ],
)
def test_a_batch_script(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / "job.sbatch"
    file.write_text(SCRIPT.format(**SMALL | {name: text}))
    rules = {finding.rule for finding in toolkit.check(file)}
    assert "localhost-master" in rules


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spec.completions", LONG),
        ("spec.template.spec.containers.0.resources.limits", {"nvidia.com/gpu": LONG}),
        ("spec.template.spec.containers.0.args", ["torchrun", f"--nproc-per-node={LONG}", "a.py"]),
        ("spec.template.spec.containers.0.args", ["torchrun", f"--nnodes={LONG}", "a.py"]),
    ],
)
def test_a_manifest(tmp_path: Path, key: str, value: Any) -> None:
    (job,) = (
        one
        for one in yaml.safe_load_all((ROOT / "k8s/examples/digits-job.yaml").read_text())
        if one["kind"] == "Job"
    )
    *path, last = (int(word) if word.isdecimal() else word for word in key.split("."))
    at = job
    for word in path:
        at = at[word]
    at[last] = value
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    for finding in toolkit.check(file):
        assert str(finding)


def test_a_key_of_a_job_file_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: t\nmodule: train\n")
    with pytest.raises(toolkit.InputError):
        toolkit.load(file, [f"nosuch:{LONG}=1", f"resources.nnodes={LONG}", f"a:{LONG}=2"])


def test_the_label_of_a_pod() -> None:
    labels = {
        "batch.kubernetes.io/job-completion-index": LONG,
        "jobset.sigs.k8s.io/restart-attempt": LONG,
    }
    pod = {"metadata": {"name": "t-0-abcde", "labels": labels}}
    assert index_of(pod) == ("", 0, "t-0-abcde")
    assert short_name(pod) == "node-0"
    assert attempt_of(pod) is None


def test_a_line_that_a_rank_has_printed() -> None:
    text = f"[rank {LONG}] ValueError: a\n[rank 1] ValueError: b\n"
    assert "rank 1: ValueError: b" in str(last_words(text))


def test_a_failure_that_a_pod_has_printed() -> None:
    log = f"E0101 00:00:00.0 7 t.py:9] failed (exitcode: {LONG}) local_rank: {LONG} (pid: 1) of x"
    lines = [(1.0, f"[rank {LONG}] ValueError: a"), (2.0, log), (3.0, "[rank 1] ValueError: b")]
    failure = first_failure(
        [
            ContainerOutput(
                pod="node-0", attempt=0, exit_code=1, reason="Error", ended=4.0, lines=lines
            )
        ]
    )
    assert failure is not None
    assert LONG not in failure.message


def test_the_number_of_a_point() -> None:
    points = [SimpleNamespace(name=f"s/{name}") for name in ("a", "b")]
    sweep: Any = SimpleNamespace(points=points, name="s", uri="slurm://c/7")
    assert Run.point(sweep, "1") == Run.point(sweep, "b") == points[1]
    with pytest.raises(RunNotFound, match="has no point"):
        Run.point(sweep, LONG)


def test_what_scontrol_and_sinfo_say() -> None:
    answers = {
        "scontrol": f"{CONFIG.format('c')}KillWait = {LONG} sec\nSLURM_VERSION = {LONG}.{LONG}\n",
        "sinfo": sinfo(f"gpu*|up|1:00:00|{LONG}|{LONG}|{LONG}|gpu:a:{LONG}\n"),
    }
    found = discover(ask=lambda argv: answers.get(argv[0]))
    assert found.slurm is not None
    assert found.slurm.kill_wait_s is None
    (partition,) = found.slurm.partitions
    assert (partition.nodes, partition.cpus, partition.gpus) == (0, None, 0)
