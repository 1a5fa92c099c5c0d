"""The tests of `make test-cluster` run on a cluster that is reached by a kubeconfig alone.

The cluster is the fake one, so that the adapter for real clusters (tests/fakes/kubernetes/real.py)
talks to a server that answers as real ones were observed to.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.fakes.kubernetes import FakeKubernetes, cluster_under_test
from tests.support.rendered import manifest

KINDS = ("PyTorchJob", "TrainJob", "JobSet", "Job", "Pod", "NetworkPolicy", "Service", "ConfigMap")


@pytest.fixture
def server() -> Iterator[FakeKubernetes]:
    with FakeKubernetes(auto_run=True, namespaces=("training",), restricted=True) as fake:
        yield fake


@pytest.fixture
def environ(server: FakeKubernetes, tmp_path: Path) -> dict[str, str]:
    return {
        "KUBECONFIG": str(server.kubeconfig(tmp_path / "kubeconfig")),
        "TOOLKIT_TEST_CLUSTER": "1",
        "TOOLKIT_TEST_IMAGE": "localhost/train:1",
    }


def left(server: FakeKubernetes) -> list[str]:
    return [one["metadata"]["name"] for kind in KINDS for one in server.objects_of(kind)]


def a_job(name: str, tag: str) -> str:
    """Return a manifest of pods that nothing can run."""
    text = manifest(
        {"name": tag, "image": "registry.invalid/nobody:1"}, {"namespace": "training"}, "Job"
    )
    return text.replace(f"  name: {tag}\n", f"  name: {name}\n")


def test_what_a_test_made_is_deleted_when_it_fails_and_what_others_made_is_not(
    server: FakeKubernetes, environ: dict[str, str]
) -> None:
    with cluster_under_test(environ=environ) as other:
        other.apply(a_job(f"{other.tag}-theirs", other.tag))
        before = left(server)
        assert before
        with pytest.raises(ZeroDivisionError), cluster_under_test(environ=environ) as cluster:
            server.apply(a_job(f"{cluster.tag}-mine", cluster.tag))  # by the toolkit, say
            assert len(left(server)) == 2 * len(before)
            _ = 1 / 0
        assert left(server) == before
    assert left(server) == []


def test_files_of_the_claim_are_read_and_run_directories_are_removed(
    server: FakeKubernetes, environ: dict[str, str]
) -> None:
    claim = server.root / "claims/runs"
    with cluster_under_test(environ=environ) as cluster:
        assert cluster.image == "localhost/train:1"
        for name in (cluster.tag, "somebodys"):
            (claim / f"{name}-1").mkdir()
            (claim / f"{name}-1/outcome.json").write_text('{"a": true}\n')
        assert cluster.read(f"{cluster.tag}-1/outcome.json") == '{"a": true}\n'
        with pytest.raises(FileNotFoundError, match="none"):
            cluster.read(f"{cluster.tag}-1/none")
    assert [one.name for one in claim.iterdir()] == ["somebodys-1"]
    assert left(server) == []


def test_an_image_that_cannot_be_had_is_told_once_for_all_tests(
    server: FakeKubernetes, environ: dict[str, str]
) -> None:
    image = {"TOOLKIT_TEST_IMAGE": "registry.invalid/train:1"}
    with cluster_under_test(environ=environ | image) as cluster:
        for _ in range(2):
            with pytest.raises(AssertionError, match=r"registry.invalid/train:1: ErrImagePull: "):
                _ = cluster.image
        asked = [path for method, path, _ in server.requests if method == "POST"]
        assert asked == ["/api/v1/namespaces/training/pods"]


def test_what_the_cluster_lacks_is_the_reason_why_a_test_is_skipped(
    environ: dict[str, str], tmp_path: Path
) -> None:
    with cluster_under_test(environ=environ) as cluster:
        assert cluster.lacks("JobSet") == ""
        assert "kubectl apply -n training -k k8s/base/trainer" in cluster.lacks("TrainJob")
    with FakeKubernetes(namespaces=("training",), without=("jobset.x-k8s.io",)) as bare:
        file = bare.kubeconfig(tmp_path / "bare")
        environ |= {"KUBECONFIG": str(file), "TOOLKIT_TEST_IMAGE": ""}
        with cluster_under_test(environ=environ) as poor:
            assert poor.lacks("JobSet") == "the JobSet controller is not installed on this cluster"
            with pytest.raises(pytest.skip.Exception, match="TOOLKIT_TEST_IMAGE names no image"):
                _ = poor.image


def test_a_real_cluster_that_is_not_named_is_not_taken_for_the_fake_one() -> None:
    with (
        pytest.raises(AssertionError, match="set KUBECONFIG"),
        cluster_under_test(environ={"TOOLKIT_TEST_CLUSTER": "1"}),
    ):
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A cluster in a process of its own: its kubeconfig, and where its volumes lie."""
    file = tmp_path / "kubeconfig"
    argv = [sys.executable, "-m", "tests.fakes.kubernetes", "--kubeconfig", str(file)]
    with subprocess.Popen(
        [*argv, "--namespace", "lent"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            said = re.search(r"volumes in (\S+)", process.stdout.readline())
            assert said is not None
            yield file, Path(said[1])
        finally:
            process.terminate()


@pytest.mark.slow
def test_tests_run_on_a_cluster_that_is_lent_and_leave_nothing_there(
    served: tuple[Path, Path],
) -> None:
    file, volumes = served
    environ = {**os.environ, "KUBECONFIG": str(file), "TOOLKIT_TEST_CLUSTER": "1"}
    environ |= {"TOOLKIT_TEST_NAMESPACE": "lent", "TOOLKIT_TEST_IMAGE": "localhost/train:1"}
    # Quick tests, one training, and tests that are skipped on real clusters.
    chosen = "JobSet and not (a_lost or writes or followed) or secret or queue_that_is_not"
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    files = [
        f"tests/unit/kubernetes/test_{name}.py" for name in ("any_cluster", "training", "standing")
    ]
    done = subprocess.run(
        [*argv, *files], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed, \d+ skipped", done.stdout)
    assert passed is not None and int(passed[1]) > 10, done.stdout
    reasons = {line.partition(": ")[2] for line in re.findall("SKIPPED .*", done.stdout)}
    assert reasons == {"needs what only the fake cluster can do, or no cluster at all"}
    assert list((volumes / "claims/runs").iterdir()) == []
