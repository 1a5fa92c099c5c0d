"""A fake cluster for each kind of workload; or the real one, for tests that hold there, too."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.kubernetes import FakeKubernetes
from tests.fakes.kubernetes.real import ClusterUnderTest, FakeCluster, RealCluster, is_real
from tests.unit.kubernetes.live import Live
from tests.unit.kubernetes.site import Site, runtime
from toolkit.job.kubernetes_options import Workload


@pytest.fixture(autouse=True)
def where_it_holds(request: pytest.FixtureRequest) -> None:
    """Skip tests that prove nothing about a real cluster."""
    if is_real() and not request.node.get_closest_marker("any_cluster"):
        pytest.skip("needs what only the fake cluster can do, or no cluster at all")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


@pytest.fixture
def server() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as fake:
        fake.apply(runtime())
        yield fake


@pytest.fixture
def site(server: FakeKubernetes, environ: dict[str, str], workload: Workload) -> Site:
    return Site(server, environ, workload)


@pytest.fixture(scope="session")
def lent() -> Iterator[RealCluster | None]:
    """The real cluster; at the end of the session nothing of ours is left there."""
    if not is_real():
        yield None
        return
    with contextlib.closing(RealCluster(os.environ)) as cluster:
        yield cluster


@pytest.fixture
def cluster(
    lent: RealCluster | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ClusterUnderTest]:
    """A cluster whose pods really run, under Pod Security "restricted" where it is the fake."""
    if lent is not None:
        try:
            yield lent
        finally:
            lent.clean()
        return
    with FakeCluster(auto_run=True, restricted=True, kueue=True) as fake:
        fake.apply(runtime())
        monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig(tmp_path / "kubeconfig")))
        yield fake


@pytest.fixture
def live(cluster: ClusterUnderTest, workload: Workload) -> Live:
    if why := cluster.lacks(workload):
        pytest.skip(why)
    return Live(cluster, workload)
