"""What follows a failure on a real cluster: another start, or none, and on which nodes."""

import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest

import toolkit
from tests.conftest import Cluster, Until
from tests.support.processes import BATCH_ROLE
from tests.support.slow_log import lost_signal
from tests.support.slurm_site import Site, events, failure, nodes_of, output
from tests.system.chaos.frame import STEPS, submit
from toolkit.slurm import SlurmRun

pytestmark = pytest.mark.slurm


def reasons(run: SlurmRun) -> list[str]:
    """Return what the attempts say of their end, the first word of each."""
    assert run.run_dir is not None
    found = sorted(run.run_dir.glob("logs/attempt-*/reason"))
    return [path.read_text().partition(":")[0] for path in found]


def last_reason(run: SlurmRun) -> str:
    assert run.run_dir is not None
    return sorted(run.run_dir.glob("logs/attempt-*/reason"))[-1].read_text().rstrip("\n")


def reason_of(run: SlurmRun, attempt: int) -> str:
    assert run.run_dir is not None
    path = run.run_dir / f"logs/attempt-{attempt}/reason"
    return path.read_text().rstrip("\n") if path.exists() else ""


def kill_a_rank(cluster: Cluster, node: str) -> None:
    """Kill a worker, not its torchrun, as the kernel does when memory is short."""
    worker = next(
        process
        for process in json.loads(cluster("ps", node, "--json"))
        if "-m train" in process["command"] and "torchrun" not in process["command"]
    )
    os.kill(worker["pid"], signal.SIGKILL)


def shell(site: Site, text: str, **retries: int) -> SlurmRun:
    """Submit a job whose one worker is a few lines of bash."""
    job = toolkit.JobSpec(name="shell", command=("bash", "-c", text), retries=retries)
    return site.launcher.submit(toolkit.plan(job, site.profile))


@pytest.mark.slow
def test_a_killed_rank_gets_the_job_queued_again_and_finished(
    cluster: Cluster, site: Site, until: Until
) -> None:
    trial = submit(site, pace=0.3)
    run = trial.run
    until(trial.saved, "a first checkpoint")
    # It stays pending until it is released.
    cluster.slurm("scontrol", "update", "nodename=node[1-4]", "state=drain", "reason=test")
    try:
        kill_a_rank(cluster, nodes_of(cluster, run)[-1])
        until(lambda: "; last attempt: failed: " in run.status().reason, "it says why it waits")
    finally:
        cluster.slurm("scontrol", "update", "nodename=node[1-4]", "state=resume")
    until(lambda: events(run, "resume"), "the second attempt has resumed")
    assert trial.wait().state is toolkit.RunState.SUCCEEDED, failure(run)
    assert (events(run, "done")[0]["step"], events(run, "done")[0]["attempt"]) == (STEPS, 1)
    assert reasons(run) == ["retryable", "done"]
    assert run.run_dir is not None
    # The requeue may have its script killed, after KillWait (5 s), before it can print this.
    if (run.run_dir / "logs/attempt-0/exit_status").exists():
        assert "counted: attempt 0 ended: failed: " in output(run)
    assert (run.run_dir / "logs/attempt-0/nodes").read_text() == "node1\nnode2\n"
    assert (run.run_dir / "logs/attempt-0/failing_node").read_text() == "node2\n"


@pytest.mark.slow
def test_a_failure_that_would_come_again_ends_the_job(site: Site) -> None:
    run = site.submit("args=[--task, digits, --lr, '1e30']", "retries.in_job=0")
    status = run.wait(300)
    assert status.state is toolkit.RunState.FAILED
    assert reasons(run) == ["fatal"], failure(run)
    assert last_reason(run).endswith("; not queued again")
    assert last_reason(run) in status.reason


RAISE = """
[ "$TORCHELASTIC_RESTART_COUNT" -lt 2 ] || exec sleep 10000
exec python3 -c 'raise ValueError(f"no kernel at {id(object()):#x}")'
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_job", "words"),
    [(0, ["retryable", "fatal"]), (9, ["fatal"])],
    ids=["two attempts", "two starts in a job"],
)
def test_a_script_that_fails_twice_alike_ends_the_job(
    site: Site, in_job: int, words: list[str]
) -> None:
    """A third start by torchrun would wait for ever: the watch of its starts ends it."""
    run = shell(site, RAISE, requeue=5, in_job=in_job)
    assert run.wait(300).state is toolkit.RunState.FAILED
    assert reasons(run) == words, failure(run)
    assert last_reason(run) == (
        "fatal: the same failure twice: ValueError: no kernel at 0x*; "
        "another start would end like these two; not queued again"
    )


TELL = """
cat >"$TRAIN_RUN_DIR/outcome.json" <<END
{"status": "running", "attempt": $TRAIN_ATTEMPT, "step": 5, "rank": null, "reason": ""}
END
"""


@pytest.mark.slow
def test_attempts_without_a_new_step_end_the_job_with_93(site: Site) -> None:
    run = shell(site, TELL + "kill -KILL $$", requeue=9, no_progress=2)
    status = run.wait(300)
    assert status.state is toolkit.RunState.FAILED
    assert reasons(run) == ["retryable", "retryable", "no_progress"], failure(run)
    assert "no step beyond 5 in 2 attempts" in status.reason
    assert run.run_dir is not None
    assert (run.run_dir / "logs/attempt-2/exit_status").read_text() == "93\n"


@pytest.mark.slow
def test_a_worker_that_exits_with_93_ends_the_job_with_93(site: Site) -> None:
    run = shell(site, "exit 93", requeue=9)
    assert run.wait(300).state is toolkit.RunState.FAILED
    assert last_reason(run) == "no_progress: a worker exited with status 93; not queued again"
    assert run.run_dir is not None
    assert (run.run_dir / "logs/attempt-0/exit_status").read_text() == "93\n"


@pytest.mark.slow
def test_scancel_is_no_failure(cluster: Cluster, site: Site, until: Until) -> None:
    run = site.submit_long()
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    cluster.slurm("scancel", run.job_id)
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    until(lambda: json.loads(cluster("ps", "--json")) == [], "its script has ended, too")
    # KillWait (5 s) may end the script before it knows the cause, even before its first line.
    assert run.run_dir is not None
    killed = not (run.run_dir / "logs/attempt-0/exit_status").exists()
    said = reason_of(run, 0)
    assert said.startswith("cancelled: by scancel; ") or (
        killed and said in ("", "terminated: by Slurm; killed soon after")
    ), (killed, said)


@pytest.mark.slow
def test_a_requeue_by_an_operator_and_a_node_that_is_back_at_once_are_told_apart(
    cluster: Cluster, site: Site, until: Until
) -> None:
    """The operator's requeue is no failure; the node that was set down is one of that node."""
    ran = 'touch "$TRAIN_RUN_DIR/ran-$TRAIN_ATTEMPT"'
    loop = f'trap "exit 75" TERM; {ran}; while :; do sleep 0.1; done'
    job = toolkit.JobSpec.model_validate(
        {
            "name": "shell",
            "command": ["bash", "-c", loop],
            "resources": {"nnodes": 2},
            "retries": {"requeue": 1},
        }
    )
    run = site.launcher.submit(toolkit.plan(job, site.profile))
    assert run.run_dir is not None
    until((run.run_dir / "ran-0").exists, "it runs")
    cluster.slurm("scontrol", "requeue", run.job_id)
    until((run.run_dir / "ran-1").exists, "it runs again")
    # KillWait (5 s) may end the script before it can add what it has decided.
    assert reason_of(run, 0).startswith("requeued: by an operator; queued again")
    node = nodes_of(cluster, run)[1]
    cluster.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    until((run.run_dir / "ran-2").exists, "it runs once more")
    assert reason_of(run, 1).startswith(f"node_failure: down: {node}; queued again")
    assert (run.run_dir / "logs/attempt-1/failing_node").read_text() == f"{node}\n"


@pytest.mark.slow
def test_a_node_without_power_for_a_moment_costs_an_attempt_and_no_hang(
    cluster: Cluster, site: Site, until: Until
) -> None:
    """With ReturnToService=2, Slurm misses a power cut that is shorter than SlurmdTimeout."""
    run = site.submit_long()
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    node = nodes_of(cluster, run)[1]
    cluster("power-off", node)
    cluster("power-on", node)
    until(lambda: events(run, "resume"), "it starts again", seen=lambda: failure(run))
    assert reason_of(run, 0) == f"node_failure: {node} has restarted; queued again"
    assert run.run_dir is not None
    assert (run.run_dir / "logs/attempt-0/failing_node").read_text() == f"{node}\n"
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)


@pytest.mark.slow
def test_a_step_that_srun_could_not_end_is_ended_by_the_script(site: Site, until: Until) -> None:
    """srun asks slurmctld to end the other nodes' tasks for ten seconds, and never again."""
    # As where slurmctld is away for as long as srun asks.
    silent = 'srun() { exec /usr/bin/srun "${@/--kill-on-bad-exit=1/--kill-on-bad-exit=0}"; }'
    ends = '[ "$RANK$TRAIN_ATTEMPT" != 00 ] || exit 1; exec sleep 1000'
    job = toolkit.JobSpec.model_validate(
        {
            "name": "shell",
            "command": ["bash", "-c", f'touch "$TRAIN_RUN_DIR/ran-$TRAIN_ATTEMPT-$RANK"; {ends}'],
            "resources": {"nnodes": 2},
            "retries": {"requeue": 1},
        }
    )
    profile = site.profile.model_copy(update={"prolog": (silent,)})
    run = site.launcher.submit(toolkit.plan(job, profile))
    assert run.run_dir is not None
    until(lambda: len(list(run.run_dir.glob("ran-1-*"))) == 2, "it is started again")
    assert reason_of(run, 0).startswith("retryable: ")
    assert not (run.run_dir / "logs/attempt-0/hung").exists(), "the step has ended"
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, {"min": 1, "max": 2}])
def test_a_stop_that_torchrun_loses_while_it_writes_its_log_comes_again(
    site: Site, until: Until, nodes: object
) -> None:
    run = site.launcher.submit(toolkit.plan(lost_signal(nnodes=nodes), site.profile))
    run_dir = run.run_dir
    assert run_dir is not None

    def all_write() -> bool:
        listed = run_dir / "logs/attempt-0/nodes"
        writing = len(list(run_dir.glob("writing-*")))
        return listed.exists() and writing == len(listed.read_text().split())

    # A torchrun that does not write yet would take the signal, and the other one wait for it.
    until(all_write, "each torchrun writes that its rank has failed")
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    assert (run_dir / "started-1").exists(), "the first signal was lost, as it is meant to be"


@pytest.fixture
def powered(cluster: Cluster) -> Iterator[None]:
    """Put all nodes back to work at the end."""
    yield
    for node in ("node1", "node2", "node3", "node4"):
        cluster("power-on", node)
    for node in ("node3", "node4"):
        if "DRAIN" in cluster.slurm("scontrol", "show", "node", node):
            cluster.slurm("scontrol", "update", f"nodename={node}", "state=resume")


@pytest.mark.slow
@pytest.mark.usefixtures("powered")
def test_a_node_that_is_lost_twice_is_excluded_and_named(
    cluster: Cluster, site: Site, until: Until
) -> None:
    # Nothing else is free, so that the job comes back to the node.
    cluster.slurm("scontrol", "update", "nodename=node[3-4]", "state=drain", "reason=test")
    run = site.submit_long()
    lose_node2(cluster, run, until)
    until(lambda: run.status().state is toolkit.RunState.PENDING, "it waits")
    cluster("power-on", "node2")
    until(lambda: events(run, "resume"), "it goes on")
    cluster.slurm("scontrol", "update", "nodename=node[3-4]", "state=resume")
    lose_node2(cluster, run, until)
    excluded = "; queued again; without node2, where two attempts have failed first"
    # KillWait may end the script before its step has ended; the reason is written by then.
    until(
        lambda: (
            reason_of(run, 1).removesuffix("; killed soon after")
            == "node_failure: down: node2" + excluded
        ),
        "it is excluded",
        seen=lambda: reason_of(run, 1),
    )
    cluster("power-on", "node2")  # not before: the script looks again whether it is down
    until(lambda: len(events(run, "resume")) == 2, "it runs elsewhere")
    assert " ExcNodeList=node2 " in cluster.slurm("scontrol", "-o", "show", "job", run.job_id)


def lose_node2(cluster: Cluster, run: SlurmRun, until: Until) -> None:
    """Cut the power of the job's second node, and wait until the job has noticed."""
    until(lambda: run.status().state is toolkit.RunState.RUNNING, "it runs")
    attempt = len(reasons(run))
    until(
        lambda: any(event["attempt"] == attempt for event in events(run, "checkpoint")),
        "a checkpoint",
    )
    assert nodes_of(cluster, run) == ["node1", "node2"]
    cluster("power-off", "node2")
    assert run.run_dir is not None
    blamed = run.run_dir / f"logs/attempt-{attempt}/failing_node"
    until(lambda: blamed.exists() and blamed.read_text() == "node2\n", "the node is blamed")


def told(site: Site, text: str, **retries: int) -> tuple[SlurmRun, Callable[[], list[str]]]:
    """Submit a job that tells its ends by a command; return how to read what was told."""
    lines = site.runs.parent / "told.jsonl"
    notify = {"command": f"cat >>{lines}", "events": ["end", "failure", "requeue"]}
    job = toolkit.JobSpec.model_validate(
        {"name": "shell", "command": ["bash", "-c", text], "retries": retries, "notify": notify}
    )
    run = site.launcher.submit(toolkit.plan(job, site.profile))

    def read() -> list[str]:
        rows = map(json.loads, lines.read_text().splitlines() if lines.exists() else [])
        return [f"{row['event']} {row['failed']} {row['text']}" for row in rows]

    return run, read


def test_each_end_of_an_attempt_is_told_once(cluster: Cluster, site: Site) -> None:
    run, read = told(site, '[ "$TRAIN_ATTEMPT" != 0 ] || exit 1', requeue=1)
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    assert " Restarts=0 " in cluster.slurm("scontrol", "-o", "show", "job", run.job_id)
    name = run.run_dir.name if run.run_dir else ""
    first, last = read()
    assert first.startswith(f"requeue True {name}: attempt 0 ended: failed: rank 0 on node")
    assert first.endswith(": exit status 1; started again on the same nodes")
    assert last.startswith(f"end False {name}: attempt 1 ended: done: all steps made")


def test_an_end_that_the_script_could_not_tell_is_told_by_wait(
    cluster: Cluster, site: Site, until: Until
) -> None:
    run, read = told(site, 'touch "$TRAIN_RUN_DIR/ran"; sleep 1000')
    assert run.run_dir is not None
    until((run.run_dir / "ran").exists, "it runs")
    node = nodes_of(cluster, run)[0]
    script = next(
        process
        for process in json.loads(cluster("ps", node, "--json"))
        if BATCH_ROLE in process["command"]
    )
    os.kill(script["pid"], signal.SIGKILL)
    assert run.wait(300).state is toolkit.RunState.FAILED
    run.wait(300)
    (line,) = read()
    assert line.startswith(f"end True {run.name}: attempt 0 ended: ")
    # Processes are tracked without cgroups here: Slurm does not end what the script has left.
    until(lambda: run.name not in cluster("ps", node, "--json"), "the script's watcher has ended")
