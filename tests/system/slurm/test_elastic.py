"""Jobs with `nnodes: {min, max}` on a real Slurm cluster: they lose nodes, and get them back."""

import json
import os
import signal
from collections.abc import Iterator

import pytest

import toolkit
from tests.conftest import Cluster, Until
from tests.support.slurm_site import Site, events, failure, nodes_of, output
from toolkit.slurm import SlurmRun

pytestmark = pytest.mark.slurm

ELASTIC = ("resources.nnodes={min: 2, max: 3}", "retries.in_job=5", "stop.grace=20s")


@pytest.fixture
def three(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with three nodes up, so that no other node can replace a lost one."""
    cluster("power-off", "node4", "--wait")
    yield cluster
    cluster("power-on", "node4")


def worlds(run: SlurmRun) -> list[object]:
    """How many ranks there were, start by start."""
    return [event["world_size"] for event in events(run, "start")]


@pytest.mark.slow
def test_a_lost_node_is_done_without_until_it_comes_back(
    three: Cluster, site: Site, until: Until
) -> None:
    run = site.submit_long(*ELASTIC)
    until(lambda: events(run, "checkpoint"), "three nodes train")
    assert worlds(run) == [3]
    three("power-off", "node3")
    until(lambda: worlds(run)[-1] == 2, "two go on")
    until(lambda: "1 of 3 nodes lost; 2 go on" in output(run), "the loss is told")
    assert run.status().state is toolkit.RunState.RUNNING
    three("power-on", "node3")
    until(lambda: worlds(run)[-1] == 3, "it has joined again")
    assert len(events(run, "stopped")) == 1, "the two have stopped with a checkpoint for it"
    steps = events(run, "checkpoint")[-1]["step"]
    until(lambda: events(run, "checkpoint")[-1]["step"] != steps, "three train on")
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    assert run.run_dir is not None
    assert not (run.run_dir / "logs/attempt-1").exists()
    assert json.loads((run.run_dir / "outcome.json").read_text())["status"] == "preempted"
    until(lambda: not three.slurm("squeue", "-h"), "no job waits to join a run that has ended")
    until(lambda: not json.loads(three("ps", "--json")), "no process is left")


@pytest.mark.slow
def test_a_job_whose_first_node_is_lost_is_queued_again_and_goes_on(
    cluster: Cluster, site: Site, until: Until
) -> None:
    """Slurm keeps it, without its batch script and without its rendezvous."""
    run = site.submit_long(*ELASTIC, "retries.requeue=1")
    until(lambda: events(run, "checkpoint"), "three nodes train")
    first, *_ = nodes_of(cluster, run)
    cluster("power-off", first)
    try:
        until(lambda: events(run, "resume"), "it goes on elsewhere")
    finally:
        cluster("power-on", first)
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    (restart,) = run.restarts()
    assert restart.why == f"node failure: {first}, which ran the batch script, is lost"


@pytest.mark.slow
def test_a_node_that_restarts_unnoticed_by_slurm_is_replaced_and_not_waited_for(
    cluster: Cluster, site: Site, until: Until
) -> None:
    run = site.submit_long(*ELASTIC)
    until(lambda: events(run, "checkpoint"), "three nodes train")
    assert nodes_of(cluster, run) == ["node1", "node2", "node3"]
    cluster("power-off", "node3")
    cluster("power-on", "node3")
    until(lambda: "node3 has restarted; the others go on" in output(run), "it is told")
    until(lambda: "node4 joins attempt 0" in output(run), "another node takes its place")
    until(lambda: worlds(run)[1:] and worlds(run)[-1] == 3, "three train again")
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    until(lambda: not cluster.slurm("squeue", "-h"), "Slurm does not wait for its lost task")


@pytest.mark.slow
def test_a_node_that_is_gone_without_a_message_is_not_waited_for(
    three: Cluster, site: Site, until: Until
) -> None:
    """Its connections stay open: the others would wait for --timeout-s."""
    run = site.submit_long(*ELASTIC)
    until(lambda: events(run, "checkpoint"), "three nodes train")
    three("cut", "node3")
    three("power-off", "node3")
    until(lambda: "node3 does not answer; the others go on" in output(run), "it is told")
    until(lambda: worlds(run)[-1] == 2, "two go on")
    step = events(run, "checkpoint")[-1]["step"]
    until(lambda: events(run, "checkpoint")[-1]["step"] != step, "two train on")
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    three("power-on", "node3")


def test_a_killed_torchrun_starts_again_and_its_workers_do_not_outlive_it(
    cluster: Cluster, site: Site, until: Until
) -> None:
    run = site.submit_long("resources.nnodes={min: 1, max: 2}", *ELASTIC[1:])
    until(lambda: events(run, "checkpoint"), "two nodes train")
    node = nodes_of(cluster, run)[-1]

    def workers(*, agents: bool = False) -> set[int]:
        found = json.loads(cluster("ps", node, "--json"))
        trains = [process for process in found if "-m train" in process["command"]]
        return {
            process["pid"]
            for process in trains
            if ("torchrun" in process["command"]) is agents and " node " not in process["command"]
        }

    before = workers()
    (agent,) = workers(agents=True)
    os.kill(agent, signal.SIGKILL)
    until(lambda: f"torchrun ended on {node} with exit status 137" in output(run), "it is told")
    until(lambda: worlds(run)[-1] == 2 and len(worlds(run)) > 1, "both train again")
    assert len(before) == 1
    assert not before & workers()
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
