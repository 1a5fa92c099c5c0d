"""Nodes that lose their power, and nodes that only lose their cable and go on."""

import time
from collections.abc import Iterator

import pytest

from tests.conftest import Cluster, Until
from tests.support.slurm_site import Site, nodes_of, output
from tests.system.chaos.frame import Trial, submit, unharmed

pytestmark = pytest.mark.slurm

SLOW_S = 0.6
"""Per step: so slow that a job is not done before Slurm, on a busy machine, starts it elsewhere."""


@pytest.fixture
def node2(cluster: Cluster) -> Iterator[str]:
    """Give a node that may be harmed; put it back to work at the end."""
    yield "node2"
    # Sooner than by itself: Slurm seldom pings a node that was down.
    cluster("power-off", "node2")
    cluster("power-on", "node2")


@pytest.mark.slow
@pytest.mark.usefixtures("site")
def test_a_node_without_power_costs_its_jobs_a_start_whether_it_was_their_first_or_their_last(
    cluster: Cluster, site: Site, reference: Trial, until: Until, node2: str
) -> None:
    last = submit(site, pace=SLOW_S)
    first = submit(site, "sbatch.exclude=node1", pace=SLOW_S)
    for trial in (last, first):
        until(trial.saved, "a first checkpoint")
    assert nodes_of(cluster, last.run) == ["node1", node2]
    assert nodes_of(cluster, first.run) == [node2, "node3"]
    cluster("power-off", node2)
    for trial in (last, first):
        until(lambda trial=trial: trial.events("resume", attempt=1), "it runs elsewhere")
        unharmed(trial, reference, until)
        assert (trial.attempt(0) / "failing_node").read_text() == f"{node2}\n"
    # KillWait (5 s) may end its script before it can say so; Slurm itself has queued it again.
    assert last.reasons()[0].startswith(f"node_failure: down: {node2}"), last.reasons()
    assert first.reasons()[0] == f"lost: the batch script was killed; down: {node2}"


@pytest.mark.slow
def test_a_node_without_a_cable_trains_on_and_harms_nothing(
    cluster: Cluster, site: Site, reference: Trial, until: Until, node2: str
) -> None:
    """Split brain: `alone` has all its ranks behind the cut cable, `torn` one of two."""
    torn = submit(site, pace=SLOW_S)
    alone = submit(
        site,
        *("resources.nnodes=1", "resources.nproc_per_node=2", "sbatch.exclude=node1"),
        pace=SLOW_S,
    )
    for trial in (torn, alone):
        until(trial.saved, "a first checkpoint")
    assert nodes_of(cluster, torn.run) == ["node1", node2]
    assert nodes_of(cluster, alone.run) == [node2]
    cluster("cut", node2)
    cut_off = time.time()
    until(lambda: alone.events("resume", attempt=1), "it runs elsewhere, too")
    assert nodes_of(cluster, alone.run) == ["node3"]
    assert any(e["time"] > cut_off for e in alone.events("checkpoint", attempt=0))
    until(lambda: alone.reasons()[0].startswith("lost: "), "its loss is noted")
    until(lambda: not alone.processes_of(attempt=0), "the fenced copy has ended by itself")
    said = "attempt 0 ended: fenced: attempt 1 has taken over; not queued again"
    until(lambda: said in output(alone.run), "so has its script, which knows why")
    cluster("heal", node2)
    for trial in (torn, alone):
        until(lambda trial=trial: trial.events("resume", attempt=1), "it runs elsewhere")
        unharmed(trial, reference, until)
        assert len(trial.reasons()) == 2, trial.reasons()
    assert alone.reasons()[0] == f"lost: the batch script was killed; down: {node2}"
    assert torn.reasons()[0].startswith(f"node_failure: down: {node2}"), torn.reasons()
