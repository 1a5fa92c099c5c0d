"""Logs of a run on the real cluster: two nodes, two attempts, and the first failure of each."""

import os
import subprocess
from pathlib import Path

import pytest

import toolkit
from tests.conftest import TOOLKIT
from tests.support.slurm_site import Site
from toolkit.cli.summary import summary_of

pytestmark = pytest.mark.slurm

# Without @record. Rank 1 fails when the job's log has the lines of both ranks, and rank 0 as soon
# as rank 1 has printed its error: which torchrun ends first, and whether srun then leaves the other
# one the time for its report, is chance.
FAILING = """
import os, sys, time
from pathlib import Path
attempt, rank = os.environ["TRAIN_ATTEMPT"], os.environ["RANK"]
run_dir = Path(os.environ["TRAIN_RUN_DIR"])
fails = run_dir / f"fails-{attempt}"
def until(condition):
    while not condition():
        time.sleep(0.01)
def both_are_in_the_log():
    log = (run_dir / f"logs/attempt-{attempt}/log").read_text().rstrip().partition(" ")[2]
    lines = Path(log).read_text().split("\\n")
    return all(f"[rank {n}] rank {n} in attempt {attempt}" in lines for n in (0, 1))
def tell(*error):
    sys.__excepthook__(*error)
    fails.touch()
print(f"rank {rank} in attempt {attempt}\\n", end="", flush=True)
if rank == "0":
    until(fails.exists)
    raise ConnectionError("Connection reset by peer")
until(both_are_in_the_log)
sys.excepthook = tell
raise ValueError("bad sample in attempt " + attempt)
"""


@pytest.mark.slow
def test_the_first_failing_rank_is_shown_over_nodes_and_requeues(
    site: Site, tmp_path: Path
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    job = toolkit.JobSpec.model_validate(
        {
            "name": "failing",
            "script": str(script),
            "resources": {"nnodes": 2, "cpus_per_node": 1},
            "retries": {"in_job": 0, "requeue": 1},
        }
    )
    run = site.launcher.submit(toolkit.plan(job, site.profile))

    # A follower goes on over the requeue, and comes to its end.
    followed = list(run.logs(follow=True))
    begun = [f"[rank {rank}] rank {rank} in attempt {n}" for n in (0, 1) for rank in (0, 1)]
    assert sorted(line for line in followed if " in attempt " in line and "sample" not in line) == (
        sorted(begun)
    )
    status = run.wait(300)
    assert status.state is toolkit.RunState.FAILED, followed
    assert list(run.logs()) == followed

    # Each attempt, and each rank, can be had alone.
    first, second = list(run.logs(attempt=0)), list(run.logs(attempt=1))
    assert [*first, *second] == followed
    assert any("failing: attempt 0 ended: failed: rank 1" in line for line in first)
    assert any("failing: attempt 1 ended: fatal: the same failure twice" in line for line in second)
    assert begun[3] in run.logs(attempt=1, ranks=[1], grep="in attempt 1$")
    assert not any("rank 0" in line for line in run.logs(ranks=[1]))
    with pytest.raises(toolkit.InputError, match="--attempt 2: there are 0 to 1 of it"):
        run.logs(attempt=2)

    failure = run.failure()
    assert failure is not None
    assert run.run_dir is not None
    nodes = (run.run_dir / "logs/attempt-1/nodes").read_text().split()
    assert (failure.attempt, failure.kind) == (1, "exception")
    assert failure.message == "ValueError: bad sample in attempt 1"
    assert failure.node in nodes
    shown = summary_of(run)["failure"]["summary"]
    assert shown == str(failure)
    done = subprocess.run(
        [TOOLKIT, "logs", run.uri, "--attempt", "0"],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == first
    assert done.stderr.splitlines()[-1] == "ValueError: bad sample in attempt 0"
    assert "Connection reset" not in done.stderr
