"""Python functions on every rank of a group of pods, whose disks nobody else sees."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit
from hypothesis import given
from hypothesis import strategies as st

import toolkit
from tests import calls
from tests.cluster import FakeKubernetes
from tests.conftest import ROOT
from toolkit.executors.deliver import CHUNK, LIMIT, MARK, left_here, lines_of
from toolkit.executors.in_pods import files_in
from toolkit.pods import FILE_MARK

NAMES = st.sampled_from(["outcome.json", "function/attempt-0/rank-1.pkl"])


@given(content=st.binary(max_size=3 * CHUNK).map(lambda part: part * 3), name=NAMES)
def test_a_file_comes_out_of_a_log_as_it_went_in(content: bytes, name: str) -> None:
    if name == "outcome.json":
        content = json.dumps({"status": "done", "reason": content.hex()}).encode()
    lines = [f"[worker-0] {line}" for line in lines_of(name, content)]
    assert max(map(len, lines)) < 16 * 1024
    assert files_in(["what a rank prints", *lines, "more"]) == {name: content}


def test_of_two_starts_in_one_log_the_later_one_counts_and_of_outcomes_the_heavier_one() -> None:
    name, outcome = "function/attempt-0/rank-0.pkl", "outcome.json"
    first, second = b"a" * 2 * CHUNK, b"b" * 2 * CHUNK
    torn = list(lines_of(name, b"c" * 3 * CHUNK))[:2]
    done, echo = (json.dumps({"status": s, "attempt": 0}).encode() for s in ("done", "retryable"))
    lines = [*torn, *lines_of(name, first), *lines_of(name, second)]
    lines += [*lines_of(outcome, done), *lines_of(outcome, echo)]
    assert files_in(lines) == {name: second, outcome: done}


def test_a_file_that_no_rank_can_have_left_is_not_written(tmp_path: Path) -> None:
    for name in ("../../evil", "function/attempt-0/../../evil", "/etc/passwd", "job.yaml"):
        assert files_in(lines_of(name, b"x")) == {}


def test_a_result_too_large_for_a_log_is_told_as_the_failure_of_its_rank() -> None:
    (name, content), *more = files_in(
        lines_of("function/attempt-2/rank-3.pkl", b"x" * (LIMIT + 1))
    ).items()
    said = json.loads(content)["message"]["extraInfo"]
    assert (name, more, said["rank"]) == ("function/attempt-2/rank-3.error.json", [], 3)
    assert "return less, or write it to a volume" in said["py_callstack"]


def test_the_launcher_knows_the_mark_of_such_lines() -> None:
    assert all(line.startswith(FILE_MARK) for line in lines_of("outcome.json", b"{}"))
    assert FILE_MARK.startswith(MARK)


def test_a_pod_tells_of_its_own_ranks_only(tmp_path: Path) -> None:
    folder = tmp_path / "function/attempt-0"
    folder.mkdir(parents=True)
    for rank, host in enumerate(("run-worker-0", "run-worker-1")):
        streams = tmp_path / "logs/attempt-0" / host / "x"
        streams.mkdir(parents=True)
        (folder / f"logs-{rank}").symlink_to(f"../../logs/attempt-0/{host}/x")
        (folder / f"rank-{rank}.pkl").write_bytes(pickle.dumps(rank))
    found = dict(left_here(tmp_path, "run-worker-1", 0))
    assert found == {"function/attempt-0/rank-1.pkl": pickle.dumps(1)}


# ---- In pods


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeKubernetes]:
    with FakeKubernetes(auto_run=True) as found:
        config = found.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(config))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.chdir(ROOT)  # where the ranks find tests.calls
        yield found


def executor(workload: str = "Job", **more: Any) -> toolkit.KubernetesExecutor:
    profile = toolkit.KubernetesProfile(name="k8s", workload=workload)
    parameters = {"nodes": 2, "image": "train:1", "env": {"OMP_NUM_THREADS": "1"}, **more}
    return toolkit.KubernetesExecutor(profile, **parameters)


@pytest.mark.parametrize("workload", ["Job", "PyTorchJob"])
def test_every_rank_calls_the_function_and_what_it_returns_comes_back(
    server: FakeKubernetes, workload: str
) -> None:
    mine = 10  # travels with the function
    job = executor(workload).submit(lambda scale: (mine * scale, calls.gather(scale)["sum"]), 2)
    assert job.results() == [(20, 6.0), (20, 6.0)]
    assert (job.state, job.result(), job.task(1).result()) == ("COMPLETED", (20, 6.0), (20, 6.0))
    assert toolkit.attach(job.uri).results() == job.results()
    (payload,) = server.objects_of("ConfigMap")
    (owner,) = payload["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == (workload, job.run.name)


def test_the_first_rank_to_fail_is_told_with_its_trace(server: FakeKubernetes) -> None:
    job = executor(retries={"requeue": 0}).submit(calls.fail_on, 1)
    with pytest.raises(submitit.core.utils.FailedJobError) as error:
        job.results()
    assert "rank 1" in str(error.value)
    assert "ArithmeticError" in str(error.value)
    assert job.state == "FAILED"
    assert not any(FILE_MARK in line for line in job.run.logs())
    assert "rank 1: ArithmeticError: rank 1 cannot do this" in job.run.status().reason


def test_a_call_that_no_configmap_holds_is_refused_before_anything_is_made(
    server: FakeKubernetes,
) -> None:
    with pytest.raises(toolkit.PlanError, match="a ConfigMap holds"):
        executor().map_array(len, [b"1", b"x" * 2**20])
    assert server.requests == []
