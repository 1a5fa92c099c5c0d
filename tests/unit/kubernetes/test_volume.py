"""Files of a run directory on the claim: in and out through a pod that is there for a moment."""

import hashlib
import io
import itertools
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import toolkit
from tests.conftest import Until
from tests.fakes.kubernetes import FakeKubernetes, Fault
from tests.support.told_operation import told_operation
from tests.unit.kubernetes.site import Site, every_workload, runtime
from toolkit.errors import LauncherError
from toolkit.job.kubernetes_options import Workload
from toolkit.kubernetes import KubernetesRun, volume
from toolkit.kubernetes.client import exec
from toolkit.kubernetes.client.connection import Away, Denied
from toolkit.kubernetes.run import KubernetesPoint
from toolkit.kubernetes.volume import (
    CHUNK,
    TRANSFER_LABEL,
    _Received,
    fetch,
    placed,
    run_dir_of,
    transfer,
    transfer_pod,
)
from toolkit.kubernetes.workloads import KINDS, Object
from toolkit.planning.pods import RUN_LABEL

SITE: Mapping[str, Any] = {
    "service_account": "training",
    "image_pull_secrets": ["registry"],
    "node_selector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "priority_class": "low",
    "gang_scheduler": "volcano",
    "one_pod_per_node": True,
    "secret": "keys",
    "mounts": [{"source": "claim:data", "target": "/data"}],
}


@pytest.fixture
def server() -> Iterator[FakeKubernetes]:
    with FakeKubernetes(auto_run=True, restricted=True) as found:
        found.apply(runtime())
        yield found


@pytest.fixture
def site(server: FakeKubernetes, tmp_path: Path) -> Site:
    return Site(server, {"HOME": str(tmp_path)}, "Job")


def rendered(site: Site, **job: Any) -> Object:
    """Return the object that makes the pods of a run called `t`."""
    return site.shown("t", **job)[-1]


def open_transfer(site: Site) -> Any:
    return transfer(site.launcher._cluster, KINDS["Job"], rendered(site))


def files_below(server: FakeKubernetes) -> list[str]:
    """Return all that lies on the claim."""
    claim = server.root / "claims/runs"
    return sorted(str(path.relative_to(claim)) for path in claim.rglob("*"))


def pods(server: FakeKubernetes) -> list[str]:
    return [str(pod["metadata"]["name"]) for pod in server.objects_of("Pod")]


def read_file(run: KubernetesRun, name: str) -> bytes | None:
    """Return a file of the run's run directory; None if it does not exist."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        fetch(run, lambda: [(name, path)])
        return path.read_bytes() if path.exists() else None


# ---- The pod


@every_workload
def test_the_pod_has_what_the_site_asks_of_pods_and_nothing_else_of_the_run(
    tmp_path: Path, workload: Workload
) -> None:
    more: dict[str, Any] = (
        {} if workload != "TrainJob" else {"gang_scheduler": None, "priority_class": None}
    )
    with FakeKubernetes() as server:
        there = Site(server, {"HOME": str(tmp_path)}, workload, **{**SITE, **more})
        found = there.shown("t", resources={"gpus_per_node": 1}, secrets={"HF_TOKEN": None})[-1]
    made = transfer_pod(found, KINDS[workload], word="w")
    container = {
        "name": "transfer",
        "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 3600 & wait"],
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"cpu": "1", "memory": "512Mi"},
        },
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
        "image": "i:1",
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if workload == "TrainJob":
        del container["imagePullPolicy"]  # its runtime has it
    priority = {} if workload == "TrainJob" else {"priorityClassName": "low"}
    assert made == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "t-transfer-w",
            "namespace": "default",
            "labels": {
                "app.kubernetes.io/name": "transfer",
                "app.kubernetes.io/managed-by": "torch-deploy-toolkit",
                TRANSFER_LABEL: "t",
            },
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 3600,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [container],
            "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}],
            "serviceAccountName": "training",
            "imagePullSecrets": [{"name": "registry"}],
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [
                {"key": "nvidia.com/gpu", "operator": "Exists"},
                *(
                    {
                        "key": f"node.kubernetes.io/{taint}",
                        "operator": "Exists",
                        "effect": "NoExecute",
                        "tolerationSeconds": 5,
                    }
                    for taint in ("not-ready", "unreachable")
                ),
            ],
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **priority,
        },
    }
    assert RUN_LABEL not in made["metadata"]["labels"]  # what Services, policies and logs pick


def test_patches_of_a_site_hold_for_it_and_the_run_owns_it_where_there_is_one(site: Site) -> None:
    nodes: dict[str, Any] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}
    spec = {"affinity": nodes | {"podAffinity": {}}, "runtimeClassName": "kata"}
    patch = {"merge": {"spec": {"template": {"spec": spec}}}}
    found = dict(rendered(site, kubernetes={"patches": [patch]}))
    made = transfer_pod(found, KINDS["Job"], word="w")
    assert (made["spec"]["affinity"], made["spec"]["runtimeClassName"]) == (nodes, "kata")
    assert "ownerReferences" not in made["metadata"]
    found["metadata"] = found["metadata"] | {"uid": "u1"}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "t", "uid": "u1"}
    made = transfer_pod(found, KINDS["Job"], word="w")
    assert made["metadata"]["ownerReferences"] == [owner]


@every_workload
def test_the_run_directory_is_where_the_pods_have_it(tmp_path: Path, workload: Workload) -> None:
    with FakeKubernetes() as server:
        there = Site(server, {"HOME": str(tmp_path)}, workload, runs_dir="/a $b/runs")
        assert run_dir_of(there.shown("t")[-1], KINDS[workload]) == "/a $b/runs/t"


def test_without_a_claim_the_way_out_is_named(tmp_path: Path) -> None:
    with FakeKubernetes() as server:
        there = Site(server, {"HOME": str(tmp_path)}, "Job", runs_claim=None)
        found = there.shown("t")[-1]
    with pytest.raises(LauncherError, match=r"in the pods alone .* name a runs_claim"):
        transfer_pod(found, KINDS["Job"], word="w")


# ---- In and out


def test_files_come_back_as_they_went_in_whatever_they_hold_and_are_called(
    site: Site, server: FakeKubernetes
) -> None:
    sizes = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * 2**20 + 3)
    contents = {
        f"a/{size}": bytes(range(256)) * (size // 256) + b"\n" * (size % 256) for size in sizes
    }
    contents['it\'s $HOME/`x` "ü" *.pkl'] = b"\0\xff\r\n"
    with open_transfer(site) as files:
        assert len(pods(server)) == 1
        for name, content in contents.items():
            files.write(name, content)
        for name, content in contents.items():
            assert (server.root / "claims/runs/t" / name).read_bytes() == content
            out = io.BytesIO(b"older and longer")
            assert files.fetch(name, out)
            assert out.getvalue() == content
        assert not files.fetch("a/1/none", out)
        assert not files.fetch("nothing here", out)
        files.write("a/1", b"again")
        assert (server.root / "claims/runs/t/a/1").read_bytes() == b"again"
    assert not any(".part" in name for name in files_below(server))
    assert "a/0" in "".join(files_below(server))


@given(content=st.binary(max_size=300), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_what_comes_is_put_together_however_it_was_cut(content: bytes, cuts: list[int]) -> None:
    digest = hashlib.sha256(content).hexdigest().encode()
    whole = b"%d\n%s%s" % (len(content), content, digest)
    at = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    out = io.BytesIO()
    received = _Received(out)
    for start, end in itertools.pairwise(at):
        received.take(whole[start:end])
    assert received.is_there()
    assert out.getvalue() == content
    for damaged in (whole[:-1], whole[:-1] + b"x", whole + b"x", b""):
        received = _Received(io.BytesIO())
        received.take(damaged)
        with pytest.raises(Away):
            received.is_there()


def test_a_file_that_cannot_be_written_is_told_in_the_words_of_the_pod(
    site: Site, server: FakeKubernetes
) -> None:
    (server.root / "claims/runs").mkdir(parents=True)
    (server.root / "claims/runs/t").write_text("in the way")
    with pytest.raises(LauncherError, match=r"pod t-transfer-.*: .*Not a directory: .*runs/t/x"):  # noqa: SIM117
        with open_transfer(site) as files:
            files.write("x/y", b"z")
    assert files_below(server) == ["t"]


# ---- Connections that break


def test_a_write_that_nobody_waits_for_is_ended_before_its_file_is_removed(
    tmp_path: Path, until: Until
) -> None:
    path = tmp_path / "runs/t/f/x"
    program = [sys.executable, "-I", "-c", volume._PROGRAM.read_text()]
    writer = subprocess.Popen([*program, "write", path, "9", "?"], stdin=subprocess.PIPE)
    until(lambda: list(tmp_path.rglob(".x.part-*")), "it has begun")
    subprocess.run([*program, "remove", path, tmp_path / "runs"], check=True)
    assert writer.wait() == -signal.SIGKILL
    assert list((tmp_path / "runs").iterdir()) == []
    writer.communicate()


def test_a_connection_that_breaks_on_the_way_is_made_again(
    site: Site, server: FakeKubernetes, until: Until
) -> None:
    content = b"0123456789" * 50_000
    with open_transfer(site) as files:
        server.faults = [Fault(path=".*/exec", cut=7), Fault(path=".*/exec")]
        files.write("large", content)
        assert (server.root / "claims/runs/t/large").read_bytes() == content
        until(lambda: files_below(server) == ["t", "t/large"], "what came half is gone")
        server.faults = [Fault(path=".*/exec", cut=0), Fault(path=".*/exec")]
        out = io.BytesIO()
        assert files.fetch("large", out)
        assert out.getvalue() == content
    assert not any(fault.times for fault in server.faults)


def test_a_server_that_never_answers_a_websocket_is_not_waited_for_for_ever(
    site: Site, server: FakeKubernetes, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(exec, "_ANSWER_S", 5)
    never = threading.Event()
    server.faults = [Fault(path=".*/exec", held=never)]
    with open_transfer(site) as files:
        files.write("x", b"y")  # by a connection that is made anew
    assert (server.root / "claims/runs/t/x").read_bytes() == b"y"

    monkeypatch.setattr(exec, "_ANSWER_S", 0.1)
    server.faults = [Fault(path=".*/exec", held=never, times=9)]
    with pytest.raises(Away, match=r"no connection into pod t-\w+-\w+: no answer within 0.1 s"):  # noqa: SIM117
        with open_transfer(site) as files:
            files.write("x", b"z")
    never.set()
    until(lambda: "websocket" not in {one.name for one in threading.enumerate()}, "all are closed")


def test_a_connection_that_always_breaks_is_one_error_and_leaves_nothing(
    site: Site, server: FakeKubernetes, until: Until
) -> None:
    server.faults = [Fault(path=".*/exec", cut=7, times=3)]
    body_ran = False
    with pytest.raises(Away, match=r"lost the connection to pod t-transfer-\w+: .*3 attempts"):  # noqa: SIM117
        with placed(site.launcher._cluster, KINDS["Job"], rendered(site), {"f/x": b"1" * 10**6}):
            body_ran = True
    assert not body_ran
    until(lambda: not pods(server), "the pod is gone")
    assert files_below(server) == []


def test_what_a_failed_submission_has_placed_is_taken_away(
    site: Site, server: FakeKubernetes, until: Until
) -> None:
    kind, job = KINDS["Job"], rendered(site)
    cluster = site.launcher._cluster
    with pytest.raises(KeyboardInterrupt), placed(cluster, kind, job, {"f/x": b"1", "y": b"2"}):
        assert files_below(server) == ["t", "t/f", "t/f/x", "t/y"]
        raise KeyboardInterrupt
    until(lambda: not pods(server), "the pod is gone")
    assert files_below(server) == []
    # Unless it is unknown whether it has failed.
    with pytest.raises(Away), placed(cluster, kind, job, {"y": b"2"}):
        raise Away("no answer")
    assert files_below(server) == ["t", "t/y"]


def test_lost_answers_make_no_second_pod_and_leave_none(
    site: Site, server: FakeKubernetes, until: Until
) -> None:
    made = ".*/pods"
    server.faults = [
        Fault(method="POST", path=made, arrives=True),
        Fault(method="DELETE", status=503),
    ]
    with open_transfer(site) as files:
        files.write("x", b"y")
        assert len(pods(server)) == 1
    until(lambda: not pods(server), "the pod is gone")


# ---- Pods that do not run, rights that are missing


@pytest.mark.parametrize(
    ("resource", "verb"), [("pods", "create"), ("pods/exec", "get"), ("pods/exec", "create")]
)
def test_a_missing_right_is_named_with_the_role_that_has_it(
    site: Site, server: FakeKubernetes, until: Until, resource: str, verb: str
) -> None:
    server.forbid(resource, verb)
    words = f'cannot {verb} resource "{resource}".*Role training-transfer in k8s/base/transfer.yaml'
    with pytest.raises(Denied, match=words), open_transfer(site) as files:
        files.write("x", b"y")
    until(lambda: not pods(server), "the pod is gone")
    assert files_below(server) == []


def test_a_pod_that_never_runs_is_told_with_its_reason_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume, "_PATIENCE", 3)
    with FakeKubernetes() as server:
        there = Site(server, {"HOME": str(tmp_path)}, "Job")
        waiting = {"reason": "ErrImagePull", "message": "no such image"}
        there.launcher._cluster.connection.sleep = lambda _: server.pod_status(
            pods(server)[0], waiting=waiting
        )
        with pytest.raises(LauncherError) as error, open_transfer(there):
            pass
        assert str(error.value).endswith("does not run: ErrImagePull: no such image")
        assert pods(server) == []


def test_who_is_killed_leaves_a_pod_that_ends_by_itself(
    site: Site, server: FakeKubernetes, until: Until
) -> None:
    with open_transfer(site) as files:
        (pod,) = pods(server)
        server.kill(pod)  # as its deadline does
        until(
            lambda: server.object("Pod", pod)["status"]["phase"] in ("Failed", "Succeeded"),
            "it has ended",
        )
        with pytest.raises(LauncherError, match=f"pod {pod} is no longer running"):
            files.write("x", b"y")


# ---- Files of a run


def sleeping(site: Site) -> Any:
    """Submit a run whose pod only waits."""
    container = {"name": "node", "command": ["sh", "-c", "trap 'exit 0' TERM; sleep 300 & wait"]}
    merge = {"spec": {"template": {"spec": {"containers": [container]}}}}
    return site.submit(kubernetes={"patches": [{"merge": merge}]})


def test_a_file_of_a_run_is_read_in_its_own_pod_then_in_one_that_is_made_for_it(
    site: Site, server: FakeKubernetes, until: Until, tmp_path: Path
) -> None:
    run = sleeping(site)
    until(lambda: run.status().state is toolkit.RunState.RUNNING, "it runs")
    kept = server.root / "claims/runs" / run.name / "metrics.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text('{"step": 1}\n')
    assert read_file(run, "metrics.jsonl") == b'{"step": 1}\n'
    assert read_file(run, "nothing") is None
    assert [row["step"] for row in rows_of(run.metrics())] == [1]
    assert not site.asked("POST", "/pods")
    # Its pod ends between the query and the command: the server answers 500.
    server.faults = [Fault(path=".*/exec", status=500, message='container not found ("node")')]
    assert read_file(run, "metrics.jsonl") == b'{"step": 1}\n'
    assert len(site.asked("POST", "/pods")) == 1
    run.cancel()
    until(lambda: not pods(server), "its pods are gone")
    here = tmp_path / "mirror/metrics.jsonl"
    wanted = {"metrics.jsonl": here, "none.pkl": tmp_path / "none.pkl"}
    with told_operation() as told:
        fetch(run, wanted.items)
    assert {what for what, *_ in told} == {"fetching files from the claim"}
    assert (0, None, "a pod starts for it") in [tuple(rest) for _, *rest in told]
    assert (12, 12, "metrics.jsonl, 12 B") in [tuple(rest) for _, *rest in told]
    assert here.read_text() == '{"step": 1}\n'
    assert [path.name for path in tmp_path.rglob("*.pkl*")] == []
    assert len(site.asked("POST", "/pods")) == 2
    until(lambda: not pods(server), "the pods are gone")


def test_a_transfer_is_no_pod_of_the_run(site: Site, server: FakeKubernetes, until: Until) -> None:
    run = sleeping(site)
    until(lambda: run.status().state is toolkit.RunState.RUNNING, "it runs")
    before = run.status(), list(run.logs())
    found = run.cluster.get(run.kind, run.object_name)
    with transfer(run.cluster, run.kind, found):
        assert len(pods(server)) == 2
        assert (run.status(), list(run.logs())) == before
        assert len(run.cluster.pods(run.pod_selector)) == 1
        policy = server.object("NetworkPolicy", f"{run.name}-job")["spec"]["podSelector"][
            "matchLabels"
        ]
        (other,) = (
            pod for pod in server.objects_of("Pod") if "transfer" in pod["metadata"]["name"]
        )
        assert not policy.items() <= other["metadata"]["labels"].items()
    assert run.status().state is toolkit.RunState.RUNNING
    run.cancel()


def test_a_file_of_a_sweeps_point_comes_from_its_own_folder(
    site: Site, server: FakeKubernetes
) -> None:
    server.refuse_pods = "not now"
    run = site.submit(sweep={"grid": {"--lr": ["1", "2"]}})
    for index in range(2):  # so that only the local state has its pods' fields
        server.delete(f"{run.name}-{index}", kind="Job")
    for point in run.parts:
        assert isinstance(point, KubernetesPoint)
        folder = server.root / "claims/runs" / run.name / point.point_name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "note").write_text(point.point_name)
        assert read_file(point, "note") == point.point_name.encode()
        (folder / "metrics.jsonl").write_text(f'{{"step": {point.index + 1}, "loss": 0.5}}\n')
    rows = [dict(row) for row in rows_of(run.metrics())]
    assert [(row["point"], row["--lr"], row["step"]) for row in rows] == [
        (point.name.rpartition("/")[2], lr, step)
        for point, lr, step in zip(run.points, ["1", "2"], [1, 2], strict=True)
    ]


def rows_of(table: Any) -> list[Any]:
    """Return the rows of a table, whether pandas is there or not."""
    return table if isinstance(table, list) else table.to_dict("records")
