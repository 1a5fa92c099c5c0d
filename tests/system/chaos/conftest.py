"""The undisturbed run."""

import json
from collections.abc import Callable

import pytest

from tests.conftest import PATIENCE_S, Cluster, Until
from tests.support.slurm_site import Site
from tests.system.chaos.frame import STEPS, Trial, submit


@pytest.fixture(scope="session")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """What two ranks compute when nothing happens to them."""
    trial = submit(Site(cluster, tmp_path_factory.mktemp("reference")), pace=0)
    trial.wait()
    assert json.loads((trial.run_dir / "outcome.json").read_text())["step"] == STEPS
    return trial


@pytest.fixture
def until(until: Until, site: Site) -> Until:
    """Wait as all tests do; where that fails, the story of the runs explains why."""

    def wait(condition: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
        until(condition, what, limit_s, seen=site.story)

    return wait


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster, until: Until) -> object:
    """Insist at the end that no job has left anything alive on any node."""
    yield
    cluster.slurm("scancel", "--user=root")
    until(lambda: json.loads(cluster("ps", "--json")) == [], "no process is left on any node")
