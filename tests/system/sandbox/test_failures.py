"""Power and cables: what Slurm does when a node is lost."""

from __future__ import annotations

import pytest

from .conftest import Sandbox, wait_until

pytestmark = pytest.mark.slurm

SCRIPT = """#!/bin/bash
#SBATCH --open-mode=append --mem=1G
echo "$SLURM_JOB_NODELIST ${SLURM_RESTART_COUNT:-0}"
[ -e finish ] || sleep 1000
"""


def sleeps(sandbox: Sandbox) -> bool:
    """Whether the script has reached its last line, and reads no file any more."""
    return "sleep 1000" in {entry["command"] for entry in sandbox.jobs_processes()}


def test_power_off_requeues_the_job_and_it_finishes_elsewhere(sandbox: Sandbox) -> None:
    job = sandbox.submit(SCRIPT)
    wait_until(lambda: sleeps(sandbox), "the job to sleep")
    lost = sandbox.output(job).split()[0]
    (sandbox.work / "finish").touch()
    sandbox.run("power-off", lost)
    assert sandbox.jobs_processes() == []
    assert sandbox.node(lost)["power"] is False
    fields = sandbox.wait_job(job, "COMPLETED", "FAILED", "NODE_FAIL")
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1")
    first, second = (line.split() for line in sandbox.output(job).splitlines())
    assert (first, second[1]) == ([lost, "0"], "1")
    assert second[0] != lost
    assert sandbox.run("power-on", lost).stdout == f"{lost} is powered on and idle\n"
    assert sandbox.slurm("srun", "-w", lost, "hostname").stdout == f"{lost}\n"


def test_power_on_before_slurm_noticed_waits_for_the_new_slurmd(sandbox: Sandbox) -> None:
    sandbox.run("power-off", "node2")
    sandbox.run("power-on", "node2")
    assert sandbox.slurm("srun", "-w", "node2", "hostname").stdout == "node2\n"


@pytest.mark.slow
def test_cut_node_keeps_running_its_job_and_heals(sandbox: Sandbox) -> None:
    (sandbox.work / "finish").unlink(missing_ok=True)
    job = sandbox.submit(SCRIPT, "-w", "node3", "--no-requeue")
    wait_until(lambda: sleeps(sandbox), "the job to sleep")
    sandbox.run("cut", "node3", "--wait")
    node = sandbox.node("node3")
    assert (node["power"], node["cable"], node["state"].rstrip("*")) == (True, False, "down")
    assert sandbox.job(job)["JobState"] == "NODE_FAIL"
    assert sleeps(sandbox)
    sandbox.run("heal", "node3", "--wait")
    assert sandbox.node("node3")["cable"] is True
    wait_until(lambda: sandbox.jobs_processes() == [], "the lost job to be cleaned up")


@pytest.mark.parametrize("verb", ["power-off", "power-on", "cut", "heal", "ps"])
def test_wrong_node_name_gets_one_line_with_the_right_ones(sandbox: Sandbox, verb: str) -> None:
    done = sandbox.run(verb, "node4", check=False)
    assert done.returncode == 2
    assert done.stderr == "sandbox: no node 'node4'; the nodes are node1 node2 node3\n"


def test_powered_off_node_has_no_cable_to_cut(sandbox: Sandbox) -> None:
    sandbox.run("power-off", "node1")
    done = sandbox.run("cut", "node1", check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "sandbox: node1 is powered off; run `sandbox power-on node1` first\n",
    )
    assert sandbox.run("power-off", "node1").stdout == "node1 was powered off already\n"
    sandbox.run("power-on", "node1")
