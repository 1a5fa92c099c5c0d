"""A fake cluster for each kind of workload."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import FakeKubernetes
from tests.k8s.site import Site, runtime
from toolkit.kubernetes_options import Workload


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
