"""Where runs on Kubernetes stand, one by one and many at once, and how they are stopped."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.fakes.kubernetes import FakeKubernetes, Fault
from tests.unit.kubernetes.site import (
    CANCELLED,
    FAILED,
    PENDING,
    PREEMPTED,
    RUNNING,
    SUCCEEDED,
    UNKNOWN,
    Site,
    a_job,
    every_workload,
    make_job,
    runtime,
    short,
    status,
)
from toolkit.cli.output import follow_lines
from toolkit.errors import LauncherError, RunNotFound
from toolkit.planning import plan
from toolkit.rendering import render
from toolkit.runs.state import RunStatus


@every_workload
def test_a_run_waits_runs_and_succeeds(site: Site) -> None:
    run = site.submit(resources={"nnodes": 2})
    assert run.status() == status(PENDING)
    site.server.run(run.name)
    assert run.status() == status(RUNNING)
    site.server.finish(run.name)
    assert run.status() == status(SUCCEEDED)


@every_workload
def test_a_failed_run_says_which_pod_failed_which_rank_and_its_last_line(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    words = "[rank 0] a\n[rank 0] RuntimeError: NaN\ntorchrun ended with 1; no more: 42\n"
    site.server.finish(
        run.name, succeeded=False, message="It failed.", exit_code=42, last_words=words
    )
    found = run.status()
    assert found.state is FAILED
    assert found.reason.endswith(
        f"; {short(site.workload)}: exit status 42: rank 0: RuntimeError: NaN; "
        "torchrun ended with 1; no more: 42"
    )


@every_workload
def test_a_container_that_cannot_start_says_why(site: Site) -> None:
    run = site.submit(resources={"nnodes": 2})
    site.server.pod_status(
        site.pod(run, 1), waiting={"reason": "ErrImagePull", "message": "no such image"}
    )
    assert run.status() == status(
        PENDING, f"{short(site.workload, 1)}: ErrImagePull: no such image"
    )


@every_workload
def test_pods_that_were_refused_are_told_by_events(site: Site) -> None:
    words = 'pods "t" is forbidden: violates PodSecurity "restricted:latest"'
    site.server.refuse_pods = words
    run = site.submit()
    found = run.status()
    assert found.state is PENDING
    assert found.reason.endswith(words)
    assert found.reason.startswith("FailedCreate")
    assert toolkit.statuses([run]) == [found]


@every_workload
def test_a_volume_that_cannot_be_mounted_is_told_by_the_pods_events(site: Site) -> None:
    run = site.submit()
    site.server.warn(site.pod(run), "FailedMount", 'persistentvolumeclaim "runs" not found')
    assert run.status() == status(
        PENDING, f'{short(site.workload)}: FailedMount: persistentvolumeclaim "runs" not found'
    )


@pytest.mark.parametrize("workload", ["TrainJob", "JobSet", "Job"])
def test_a_run_that_waits_in_a_queue_says_what_kueue_says(
    environ: dict[str, str], workload: Any
) -> None:
    with FakeKubernetes(kueue=True) as server:
        server.apply(runtime())
        site = Site(server, environ, workload, queue="gpus")
        run = site.submit()
        words = "couldn't assign flavors: insufficient unused quota for cpu, 2 more needed"
        server.queue_says(run.name, "Pending", words)
        expected = status(PENDING, f"queue 'gpus': waits for quota: {words}")
        assert run.status() == expected
        assert toolkit.statuses([run]) == [expected]
        server.admit(run.name)
        server.run(run.name)
        assert run.status().state is RUNNING


@pytest.mark.parametrize("workload", ["TrainJob", "JobSet", "Job"])
def test_an_evicted_run_is_being_stopped_and_waits_when_its_pods_are_gone(
    environ: dict[str, str], workload: Any
) -> None:
    with FakeKubernetes(kueue=True) as server:
        server.apply(runtime())
        site = Site(server, environ, workload, queue="gpus")
        run = site.submit()
        server.admit(run.name)
        server.run(run.name)
        server.hold_deletes = True
        server.preempt(run.name)
        words = "evicted by Kueue (Preempted: Preempted to accommodate a workload of a higher "
        stops = status(RUNNING, f"queue 'gpus': {words}priority); its pods are being stopped")
        assert run.status() == stops
        assert toolkit.statuses([run]) == [stops]
        server.stopped(run.name)
        assert run.status() == status(PENDING, f"queue 'gpus': {words}priority); waits")
        short = "couldn't assign flavors: insufficient unused quota for cpu, 2 more needed"
        server.queue_says(run.name, "Pending", short)
        assert run.status().reason.endswith(f"priority); waits for quota: {short}")
        server.admit(run.name)
        assert run.status() == status(RUNNING, "starts again")
        server.run(run.name)
        assert run.status() == status(RUNNING)


@a_job
def test_a_status_without_the_right_to_see_events_still_has_a_state(site: Site) -> None:
    run = site.submit()
    site.server.forbid("events", "list")
    site.server.forbid("pods", "list")
    assert run.status() == status(PENDING)


@a_job
def test_a_lost_node_of_a_running_pod_is_told_also_without_the_right_to_see_nodes(
    site: Site,
) -> None:
    run = site.submit()
    site.server.run(run.name)
    assert run.status() == status(RUNNING)
    since = "2026-11-22T10:00:00Z"
    node = site.server.lose_node(site.pod(run), since)
    words = f"node {node} is NotReady since {since}, with node-0 on it"
    assert run.status() == status(RUNNING, words)
    site.server.forbid("nodes", "get")
    words = f"node-0 on node {node} is not ready since {since}"
    assert run.status() == status(RUNNING, words)


@a_job
def test_the_words_of_a_deadline_are_preemption(site: Site) -> None:
    run = site.submit()
    words = "Job was active longer than specified deadline"
    site.server.condition(run.name, "Failed", reason="DeadlineExceeded", message=words)
    assert run.status() == status(PREEMPTED, words)


@a_job
@pytest.mark.parametrize(
    "fault",
    [
        Fault(method="GET", status=503, message="shutting down", times=9),
        Fault(method="GET", times=9),
        Fault(method="GET", path=".*/pods", status=500, message="etcd", times=9),
    ],
)
def test_a_server_that_is_away_for_a_moment_makes_the_state_unknown(
    site: Site, fault: Fault
) -> None:
    run = site.submit()
    site.server.faults = [fault]
    for found in (run.status(), *toolkit.statuses([run])):
        assert found.state is UNKNOWN
        assert found.reason.startswith("the Kubernetes API server ")
    site.server.faults = []
    assert run.status() == status(PENDING)


@a_job
def test_a_server_that_asks_for_patience_gets_it(site: Site) -> None:
    run = site.submit()
    site.server.faults = [Fault(method="GET", status=429, retry_after="2", times=2)]
    assert run.status() == status(PENDING)
    assert site.slept == [2.0, 2.0]


@a_job
@pytest.mark.parametrize("code", [401, 403])
def test_a_server_that_refuses_to_say_is_an_error(site: Site, code: int) -> None:
    run = site.submit()
    site.server.faults = [Fault(method="GET", status=code, message="no")]
    with pytest.raises(LauncherError):
        run.status()


# Many at once.


@every_workload
def test_any_number_of_runs_is_asked_about_by_one_list(site: Site) -> None:
    runs = [site.submit() for _ in range(4)]
    site.server.run(runs[1].name)
    site.server.finish(runs[2].name)
    site.server.delete(runs[3].name)
    site.server.requests.clear()
    found = [one.state for one in toolkit.statuses(runs)]
    assert found == [PENDING, RUNNING, SUCCEEDED, UNKNOWN]
    assert len(site.asked("GET", site.path)) == 1
    pods = site.asked("GET", "/pods")  # of those that wait, have failed, or have succeeded
    assert [query.get("fieldSelector") for query in pods] in (
        [None, None],
        [None, "status.phase=Failed", None],
    )
    assert len(site.server.requests) <= 2 + len(pods)  # and the events about a pod


@a_job
def test_runs_of_two_kinds_are_two_lists(site: Site, environ: dict[str, str]) -> None:
    other = Site(site.server, environ, "JobSet")
    runs = [site.submit(), other.submit(), site.submit()]
    site.server.finish(runs[1].name)
    assert [one.state for one in toolkit.statuses(runs)] == [PENDING, SUCCEEDED, PENDING]


@pytest.mark.parametrize("workload", ["PyTorchJob", "JobSet"])
def test_waiting_for_many_runs_is_one_list_and_one_watch(site: Site) -> None:
    runs = [site.submit() for _ in range(4)]
    for run in runs:
        site.server.run(run.name)
    site.server.requests.clear()

    def finish(run: toolkit.Run, found: RunStatus) -> None:
        site.server.finish(runs[len(told)].name, succeeded=len(told) != 2)
        told.append(found.state)

    told: list[Any] = []
    site.server.finish(runs[0].name)
    told.append(None)
    found = toolkit.wait(runs, 60, on_end=lambda run, s: finish(run, s) if len(told) < 4 else None)
    assert [one.state for one in found] == [SUCCEEDED, SUCCEEDED, FAILED, SUCCEEDED]
    asked = site.asked("GET", site.path)
    assert [bool(query.get("watch")) for query in asked] == [False, True]


@a_job
def test_waiting_goes_on_where_no_watch_is_allowed(site: Site) -> None:
    site.server.forbid("jobs", "watch")
    runs = [site.submit(), site.submit()]
    site.server.finish(runs[0].name)
    found = toolkit.wait(runs, 15, on_end=lambda *_: site.server.finish(runs[1].name))
    assert found == [status(SUCCEEDED)] * 2


@a_job
def test_who_follows_reads_a_state_without_a_reason_alone(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    run = site.submit()
    lines = follow_lines(run)
    shown = threading.Thread(target=lambda: list(lines))
    shown.start()
    try:
        limit = time.monotonic() + 60
        said = ""
        while not said and time.monotonic() < limit:
            time.sleep(0.05)
            said = capsys.readouterr().err
    finally:
        site.server.finish(run.name)
        shown.join()
    assert said == f"{run.name}: PENDING\n"


@every_workload
def test_a_run_that_has_run_is_running_between_two_of_its_starts(site: Site) -> None:
    run = site.submit(resources={"nnodes": 2})
    site.server.run(run.name)
    assert run.status() == status(RUNNING)
    site.server.refuse_pods = "no quota"
    site.server.recreate(run.name)
    later = site.open_launcher().open(run.record)
    for found in (run.status(), later.status(), *toolkit.statuses([later])):
        assert found.state is RUNNING
    if site.workload in ("TrainJob", "Job"):  # whose objects do not tell that they ran
        assert run.status().reason == "FailedCreate: no quota"
        with run.watching([run]):
            assert run.status() == status(RUNNING, "starts again")
    site.server.finish(run.name, succeeded=False)
    assert run.status().state is FAILED
    site.server.refuse_pods = None
    site.launcher.resubmit(run)
    assert run.status().state is later.status().state is PENDING


# Stopping.


@every_workload
def test_a_cancelled_run_is_running_until_its_pods_are_gone_and_then_cancelled(
    site: Site,
) -> None:
    site.server.hold_deletes = True
    run = site.submit()
    site.server.run(run.name)
    run.cancel()
    assert run.status() == status(RUNNING, "being stopped")
    site.server.stopped(run.name)
    assert run.status() == status(CANCELLED, "by `toolkit cancel`")
    assert toolkit.statuses([run]) == [status(CANCELLED, "by `toolkit cancel`")]
    assert site.server.pods(run.name) == []
    tomorrow = site.open_launcher().open(run.record)
    assert tomorrow.wait(timeout_s=0) == status(CANCELLED, "by `toolkit cancel`")
    run.cancel()


@a_job
def test_a_run_is_cancelled_even_where_that_cannot_be_remembered(site: Site) -> None:
    run = site.submit()
    state = Path(site.environ["HOME"]) / ".local/state/torch-deploy-toolkit"
    (state / "cancelled").mkdir()
    run.cancel()
    assert site.jobs() == []


@every_workload
def test_cancel_leaves_a_run_alone_that_has_ended(site: Site) -> None:
    run = site.submit()
    site.server.finish(run.name)
    run.cancel()
    assert run.status() == status(SUCCEEDED)
    assert site.asked("DELETE") == []


@a_job
def test_cancel_looks_again_where_the_run_changed_meanwhile(site: Site) -> None:
    run = site.submit()
    site.server.faults = [Fault(method="DELETE", status=409, message="Precondition failed")]
    run.cancel()
    assert site.jobs() == []
    assert run.status() == status(CANCELLED, "by `toolkit cancel`")


@a_job
def test_a_run_that_keeps_changing_is_not_cancelled_and_says_so(site: Site) -> None:
    run = site.submit()
    site.server.faults = [Fault(method="DELETE", status=409, times=99)]
    with pytest.raises(LauncherError, match="try again"):
        run.cancel()
    assert run.status() == status(PENDING)


@every_workload
def test_a_run_that_somebody_else_deleted_is_unknown_and_not_waited_for(site: Site) -> None:
    run = site.submit()
    site.server.delete(run.name)
    reason = f"the {site.workload} is gone, and was not cancelled from here: it was deleted"
    gone = RunStatus(state=UNKNOWN, reason=reason, lost=True)
    assert run.status() == gone
    assert toolkit.wait([run], 60) == [gone]
    with pytest.raises(RunNotFound, match=f"the {site.workload} is gone"):
        run.wait()
    with pytest.raises(RunNotFound, match="its log with its pods"):
        list(run.logs())
    run.cancel()
    assert run.status() == gone


@every_workload
def test_how_a_run_has_ended_is_known_when_its_cluster_has_deleted_it(site: Site) -> None:
    ended, failed = site.submit(), site.submit()
    site.server.finish(ended.name)
    site.server.finish(failed.name, succeeded=False, message="It failed.")
    known = toolkit.statuses([ended, failed])
    assert [found.state for found in known] == [SUCCEEDED, FAILED]
    site.server.faults = [Fault(method="GET", status=503, times=99)]
    assert toolkit.statuses([ended, failed]) == known
    assert ended.status() == known[0]
    site.server.faults = []
    site.server.delete(ended.name)
    site.server.delete(failed.name)
    tomorrow = site.open_launcher()
    again = [tomorrow.open(run.record) for run in (ended, failed)]
    assert toolkit.statuses(again) == known
    assert [run.wait(300) for run in again] == known


@a_job
def test_a_run_that_goes_on_has_not_ended(site: Site) -> None:
    run = site.submit()
    site.server.finish(run.name, succeeded=False)
    assert run.status().state is FAILED
    site.launcher.resubmit(run)
    site.server.delete(run.name)
    assert run.status().lost


@a_job
def test_a_run_that_somebody_starts_again_has_not_ended(site: Site) -> None:
    run = site.submit()
    site.server.finish(run.name, succeeded=False)
    assert run.status().state is FAILED
    site.server.delete(run.name)
    site.server.apply(render(plan(make_job(), site.profile, run_name=run.name)))
    assert run.status().state is PENDING
    site.server.delete(run.name)
    assert run.status().lost


@a_job
def test_wait_gives_up_in_time_and_outlives_a_server_that_is_away(site: Site) -> None:
    run = site.submit()
    with pytest.raises(TimeoutError):
        run.wait(timeout_s=0)
    site.server.finish(run.name)
    site.server.faults = [Fault(method="GET", status=503)]
    assert run.wait(timeout_s=300) == status(SUCCEEDED)


# Going on.


@every_workload
def test_a_run_that_has_ended_goes_on_under_its_name(site: Site) -> None:
    run = site.submit()
    with pytest.raises(LauncherError, match="has not ended: PENDING"):
        site.launcher.resubmit(run)
    site.server.finish(run.name, succeeded=False)
    before = site.server.job(run.name, kind=site.workload)
    again = site.launcher.resubmit(run)
    assert (again.uri, again.status()) == (run.uri, status(PENDING))
    after = site.server.job(run.name, kind=site.workload)
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert site.shown(run.name)[-1]["metadata"]["labels"] == after["metadata"]["labels"]
    site.server.finish(run.name)
    with pytest.raises(LauncherError, match="has succeeded; there is nothing to do"):
        site.launcher.resubmit(run)


@a_job
def test_a_run_that_was_cancelled_and_goes_on_is_cancelled_no_more(site: Site) -> None:
    run = site.submit()
    run.cancel()
    assert run.status() == status(CANCELLED, "by `toolkit cancel`")
    site.launcher.resubmit(run)
    site.server.delete(run.name)
    assert run.status().state is UNKNOWN


def test_without_a_claim_there_is_nothing_to_go_on_from(
    server: FakeKubernetes, environ: dict[str, str]
) -> None:
    site = Site(server, environ, "Job", runs_claim=None)
    run = site.submit()
    server.finish(run.name, succeeded=False)
    with pytest.raises(LauncherError, match="names no runs_claim"):
        site.launcher.resubmit(run)
    with pytest.raises(LauncherError, match="--chain is Slurm's"):
        site.launcher.resubmit(run, chain=2)


@a_job
def test_a_call_whose_code_is_gone_cannot_go_on(site: Site) -> None:
    job = make_job(module=None, script="$TRAIN_RUN_DIR/call.py")
    run = site.launcher.submit(plan(job, site.profile), files={"call.py": b"pass"})
    site.server.finish(run.name, succeeded=False)
    with pytest.raises(LauncherError, match="its code is gone with its pods; call it again"):
        site.launcher.resubmit(run)
    assert site.jobs() == [run.name]
