"""Python functions on every rank of a group of pods, without a shared disk."""

import json
import os
import pickle
import secrets
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit
import yaml
from hypothesis import given
from hypothesis import strategies as st
from submitit.core.utils import DelayedSubmission

import toolkit
from tests.conftest import ROOT, Until
from tests.fakes.kubernetes import FakeKubernetes, Fault
from tests.support import calls
from tests.unit.kubernetes.site import runtime
from toolkit.functions import payload, pod_results
from toolkit.functions.payload import files_of
from toolkit.functions.pod_results import CHUNK, LIMIT, LONGEST, MARK, left_here
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.workloads import PAYLOAD_LIMIT, too_large
from toolkit.planning.pods import FILE_MARK

KEY = "ab" * 32


def lines_of(name: str, content: bytes, room: int = LIMIT, *, key: str = KEY) -> Iterator[str]:
    return pod_results.lines_of(name, content, room, key=key)


def files_in(lines: Iterable[str], key: str = KEY) -> dict[str, bytes]:
    return payload.files_in(lines, key)


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


def test_of_a_file_too_large_for_a_log_its_size_is_told() -> None:
    name = "function/attempt-2/rank-3.pkl"
    assert files_in(lines_of(name, b"x" * (LIMIT + 1))) == {f"{name}.size": b"%d" % (LIMIT + 1)}
    assert files_in(lines_of(name, b"x" * LIMIT)) == {name: b"x" * LIMIT}
    assert files_in(lines_of(name, b"12345", room=4)) == {f"{name}.size": b"5"}


def test_the_launcher_knows_the_mark_of_such_lines() -> None:
    assert all(line.startswith(FILE_MARK) for line in lines_of("outcome.json", b"{}"))
    assert FILE_MARK.startswith(MARK)


@pytest.mark.parametrize("key", ["cd" * 32, ""])
def test_what_a_rank_prints_is_never_taken_for_a_result(key: str) -> None:
    """Such as a sample of the data, or the answer of a server, that holds such lines."""
    name = "function/attempt-999/rank-0.pkl"
    (true,) = lines_of(name, b"true")
    (forged,) = lines_of(name, b"forged", key="cd" * 32)
    code = true.rpartition(" ")[2]
    hostile = [
        forged,
        f"{forged.rpartition(' ')[0]} {code}",
        true.replace("rank-0", "rank-1"),
        true.replace("1/1", "1/2"),
        f"printed: {true}",
        f"{true} and more",
        f"{MARK} outcome.json 1/1 eA==",
        f"{MARK} {name} 1/1 gASVBQAAAAAAAACMAWGULg==",
        f"{MARK} outcome.json {'9' * 5000}/{'9' * 5000} eA== {code}",
        f"{MARK} outcome.json 1/1 {'0' * 64} e== {code}",
        f"{MARK} {name} too-large {'9' * 5000} {code}",
    ]
    assert files_in(hostile) == {}
    assert files_in([*hostile, f"[pod] {true}", *hostile]) == {name: b"true"}
    assert files_in([true], key) == {}


@pytest.mark.parametrize("outcome", [b"x", b"[]", b"null", b"[" * 10**5, b'{"attempt": "x"}'])
def test_an_outcome_that_is_none_weighs_nothing(outcome: bytes) -> None:
    done = json.dumps({"status": "done", "attempt": 0, "restart": 0}).encode()
    lines = [*lines_of("outcome.json", done), *lines_of("outcome.json", outcome)]
    assert files_in(lines) == {"outcome.json": done}


def test_parts_of_two_files_of_one_name_are_not_mixed() -> None:
    name = "function/attempt-0/rank-0.pkl"
    first, second = (list(lines_of(name, c * 2 * CHUNK)) for c in (b"a", b"b"))
    assert files_in([first[0], second[1]]) == {}
    assert files_in([first[0], second[1], first[1]]) == {name: b"a" * 2 * CHUNK}


def leave(folder: Path, ranks: dict[int, str]) -> None:
    """Leave results of ranks as their hosts do."""
    attempt = folder / "function/attempt-0"
    attempt.mkdir(parents=True)
    for rank, host in ranks.items():
        streams = folder / "logs/attempt-0" / host / f"x{rank}"
        streams.mkdir(parents=True)
        (attempt / f"logs-{rank}").symlink_to(f"../../logs/attempt-0/{host}/x{rank}")
        (attempt / f"rank-{rank}.pkl").write_bytes(pickle.dumps(rank))


def test_a_pod_tells_of_its_own_ranks_only(tmp_path: Path) -> None:
    leave(tmp_path, {0: "run-worker-0", 1: "run-worker-1"})
    found = dict(left_here(tmp_path, "run-worker-1", 0))
    assert found == {"function/attempt-0/rank-1.pkl": pickle.dumps(1)}


def test_a_failure_comes_before_all_results_with_no_more_words_than_people_read(
    tmp_path: Path,
) -> None:
    leave(tmp_path, {0: "pod", 1: "pod"})
    extra = {"rank": 1, "host": "pod", "time": 1.0, "echo": False}
    said = {"message": "m" * 10**7, "extraInfo": extra | {"py_callstack": "t" * 10**7 + "end"}}
    error = tmp_path / "function/attempt-0/rank-1.error.json"
    error.write_text(json.dumps({"message": said}))
    (name, content), *rest = left_here(tmp_path, "pod", 0)
    assert (name, len(rest)) == ("function/attempt-0/rank-1.error.json", 2)
    told = json.loads(content)["message"]
    assert told["message"] == "m" * LONGEST
    assert told["extraInfo"] == extra | {"py_callstack": "t" * (LONGEST - 3) + "end"}


def test_a_pod_prints_no_more_than_its_node_keeps(tmp_path: Path) -> None:
    leave(tmp_path, dict.fromkeys(range(4), "pod"))
    names = [f"function/attempt-0/rank-{rank}.pkl" for rank in range(4)]
    for name, mib in zip(names, (3, 2, 2, 1), strict=True):
        (tmp_path / name).write_bytes(b"x" * mib * 2**20)
    env = os.environ | {"TRAIN_RUN_DIR": str(tmp_path), "HOSTNAME": "pod"}
    program = tmp_path / "deliver.py"
    program.write_text((ROOT / "toolkit/functions/pod_results.py").read_text())
    (tmp_path / "call.json").write_text(json.dumps({"key": KEY}))
    argv = [sys.executable, str(program)]
    printed = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout
    assert len(printed) < 10 * 2**20
    found = files_in(printed.splitlines())
    sizes = {name: len(content) for name, content in found.items() if name in names}
    assert sizes == {names[0]: 3 * 2**20, names[1]: 2 * 2**20, names[3]: 2**20}
    assert found[f"{names[2]}.size"] == b"%d" % (2 * 2**20)


# ---- In pods


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeKubernetes]:
    # The Training Operator deletes pods of ended jobs at once, which it is free to do.
    with FakeKubernetes(auto_run=True, clean_after_s=0) as found:
        found.apply(runtime())
        config = found.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(config))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.chdir(ROOT)  # where the ranks find tests.support.calls
        yield found


def executor(
    workload: str = "Job", *, claim: str | None = None, **more: Any
) -> toolkit.KubernetesExecutor:
    profile = toolkit.KubernetesProfile(name="k8s", workload=workload, runs_claim=claim)
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
    for made in server.objects_of("ConfigMap"):  # the function, and the supervisor
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == (workload, job.run.name)


def end_apart(wait_s: float) -> int:
    """Return the rank; the last one ends later."""
    from torch import distributed

    rank = distributed.get_rank()
    time.sleep(wait_s * rank)
    print("leaves")
    return rank


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["PyTorchJob", "TrainJob", "JobSet", "Job"])
def test_results_and_logs_are_there_after_each_success(
    server: FakeKubernetes, workload: str
) -> None:
    for wait_s in (30, *[0] * 20):
        job = executor(workload).submit(end_apart, wait_s)
        assert job.results() == [0, 1]
        for rank in (0, 1):
            assert [line[-6:] for line in job.run.logs(ranks=[rank]) if "leaves" in line]


def test_what_is_run_is_what_was_submitted(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Cluster.create
    evil = b64encode(f"open({str(tmp_path / 'came-in')!r}, 'w')".encode()).decode()

    def come_first(self: Cluster, place: Any, body: Any) -> None:
        assert body["immutable"] is True
        known = {key: body["metadata"][key] for key in ("name", "namespace", "labels")}
        data = {**body["binaryData"], "worker.py": evil, "deliver.py": evil}
        server.apply(yaml.safe_dump({**body, "metadata": known, "binaryData": data}))
        create(self, place, body)

    monkeypatch.setattr(Cluster, "create", come_first)
    job = executor(nodes=1).submit(len, b"abc")
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="not hold what"):
        job.result()
    assert job.state == "FAILED"
    assert "does not hold what was submitted" in "".join(job.run.logs())
    assert not (tmp_path / "came-in").exists()


@pytest.mark.slow
def test_a_call_that_is_cut_short_before_its_configmap_is_completed_by_whoever_looks(
    server: FakeKubernetes,
) -> None:
    server.faults = [Fault(method="POST", path=".*/configmaps", status=503, times=99)]
    with pytest.raises(toolkit.LauncherError, match="toolkit status"):
        executor(nodes=1).submit(len, b"abc")
    assert server.objects_of("ConfigMap") == []
    server.faults.clear()
    (run,) = toolkit.list_runs()
    assert toolkit.attach(run).result() == 3


def test_a_call_whose_configmap_is_refused_leaves_nothing(server: FakeKubernetes) -> None:
    server.forbid("configmaps", "create")
    with pytest.raises(toolkit.LauncherError, match="configmaps"):
        executor().submit(len, b"abc")
    assert [kind for kind in ("Job", "Pod", "Service") if server.objects_of(kind)] == []
    assert list(toolkit.list_runs()) == []


@pytest.mark.slow
def test_the_first_rank_to_fail_is_told_with_its_trace(server: FakeKubernetes) -> None:
    job = executor(retries={"requeue": 0}).submit(calls.fail_on, 1)
    with pytest.raises(submitit.core.utils.FailedJobError) as error:
        job.results()
    assert "rank 1" in str(error.value)
    assert "ArithmeticError" in str(error.value)
    assert job.state == "FAILED"
    assert not any(FILE_MARK in line for line in job.run.logs())
    assert "rank 1: ArithmeticError: rank 1 cannot do this" in job.run.status().reason


def test_a_call_that_no_configmap_holds_is_refused_where_there_is_no_claim(
    server: FakeKubernetes,
) -> None:
    with pytest.raises(toolkit.PlanError, match="a ConfigMap holds 1008KiB; name a runs_claim"):
        executor().map_array(len, [b"1", b"x" * 2**20])
    assert server.requests == []


def pods(server: FakeKubernetes) -> list[str]:
    return [str(pod["metadata"]["name"]) for pod in server.objects_of("Pod")]


@pytest.mark.parametrize("more", [0, 1])
def test_a_call_of_just_the_limit_is_in_the_configmap_and_a_larger_one_on_the_claim(
    server: FakeKubernetes, until: Until, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = executor(claim="runs")
    monkeypatch.setattr(secrets, "token_hex", lambda count: "ab" * count)

    def files(size: int) -> dict[str, bytes]:
        job = ours._job(ours.parameters, len)
        return files_of(job, DelayedSubmission(len, b"x" * size), delivered=True)

    size = PAYLOAD_LIMIT - sum(map(len, files(2**19).values())) + 2**19 + more
    wanted = files(size)
    assert sum(map(len, wanted.values())) == PAYLOAD_LIMIT + more
    server.refuse_pods = "only those that somebody makes"
    job = ours.submit(len, b"x" * size)
    found = server.objects_of("ConfigMap")
    (payload,) = (one for one in found if "supervisor.pyz" not in one["binaryData"])
    mounted = {f"function/{k}": b64decode(v) for k, v in payload["binaryData"].items()}
    claim = server.root / "claims/runs" / job.run.name
    placed = {str(f.relative_to(claim)): f.read_bytes() for f in claim.rglob("*") if f.is_file()}
    assert mounted | placed == wanted
    assert placed == too_large(wanted)
    assert list(placed) == ["function/call.pkl"] * more
    assert job.submission().args == (b"x" * size,)
    until(lambda: not pods(server), "no pod is left")


@pytest.mark.slow
def test_large_arguments_and_results_travel_by_the_claim(
    server: FakeKubernetes, until: Until
) -> None:
    data, extra = os.urandom(5 * 2**20), 2**20

    def twice(data: bytes) -> tuple[int, bytes]:
        from torch import distributed

        return distributed.get_rank(), data + data[:extra]

    server.faults = [Fault(path=".*/exec", cut=9)]  # then it is sent again
    job = executor(claim="runs").submit(twice, data)
    until(lambda: len(pods(server)) == 2, "the transfer's pod is gone")
    job.wait()
    server.forbid("pods/exec", "get")
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="Role training-transfer"):
        job.results()
    server._forbidden.clear()
    server.requests.clear()
    assert job.results() == [(rank, data + data[:extra]) for rank in (0, 1)]
    assert job.task(1).result() == (1, data + data[:extra])
    made = [path for method, path, _ in server.requests if method == "POST"]
    assert len(made) == 1  # for both ranks
    until(lambda: len(pods(server)) == 2, "the transfers' pods are gone")
    assert not any("transfer" in name for name in pods(server))


def test_a_call_whose_arguments_cannot_be_brought_to_the_claim_leaves_nothing(
    server: FakeKubernetes, until: Until
) -> None:
    server.forbid("pods/exec", "create")
    with pytest.raises(toolkit.LauncherError, match="Role training-transfer"):
        executor(claim="runs").submit(len, b"x" * 2**20)
    until(lambda: not pods(server), "no pod is left")
    assert [kind for kind in ("Job", "ConfigMap", "Service") if server.objects_of(kind)] == []
    assert list(toolkit.list_runs()) == []


def test_a_large_result_without_a_claim_is_told_with_the_way_out(server: FakeKubernetes) -> None:
    job = executor(nodes=1).submit(lambda: b"x" * (LIMIT + 1))
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="name a runs_claim"):
        job.result()
