"""A run's status from objects as recorded on clusters. Pure: no requests."""

from typing import Any

import pytest

from tests.support.rendered import manifest, workload
from toolkit.job.kubernetes_options import Workload
from toolkit.kubernetes.pods import FATAL, last_words, scheduled_of
from toolkit.kubernetes.status import (
    Evidence,
    by_owner,
    digest,
    queue_reason,
    status_of,
    stuck_objects,
)
from toolkit.kubernetes.workloads import KINDS
from toolkit.runs.records.scheduler_times import Scheduled
from toolkit.runs.state import RunState, RunStatus

PENDING, RUNNING, UNKNOWN = RunState.PENDING, RunState.RUNNING, RunState.UNKNOWN
FAILED, PREEMPTED, SUCCEEDED = RunState.FAILED, RunState.PREEMPTED, RunState.SUCCEEDED

WORKLOADS: list[Workload] = ["PyTorchJob", "TrainJob", "JobSet", "Job"]
DONE: dict[Workload, str] = {
    "PyTorchJob": "Succeeded",
    "TrainJob": "Complete",
    "JobSet": "Completed",
    "Job": "Complete",
}


def condition(kind: str, status: str = "True", **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, **more}


def thing(*conditions: Any, queue: str = "", **status: Any) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    metadata: dict[str, Any] = {"name": "t", "uid": "u1", "labels": labels}
    return {"metadata": metadata, "spec": {}, "status": {"conditions": list(conditions), **status}}


def pod(index: int = 0, *, role: str = "", attempt: str = "", **status: Any) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    if role:
        labels = {
            "training.kubeflow.org/replica-index": str(index),
            "training.kubeflow.org/replica-type": role,
        }
    if attempt:
        labels["jobset.sigs.k8s.io/restart-attempt"] = attempt
    name = f"t-{role or 'node'}-{index}"
    return {"metadata": {"name": name, "uid": name, "labels": labels}, "status": status}


def ended(index: int = 0, *, where: str = "state", **terminated: Any) -> dict[str, Any]:
    known = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
    return pod(index, containerStatuses=[{where: {"terminated": known | terminated}}])


def waiting(index: int = 0, **why: str) -> dict[str, Any]:
    return pod(index, containerStatuses=[{"state": {"waiting": why}}])


def status(state: RunState, reason: str = "") -> RunStatus:
    return RunStatus(state=state, reason=reason)


def judged(found: Any, workload: Workload = "Job", **evidence: Any) -> RunStatus:
    if "queued" in evidence:
        evidence["queued"] = by_owner(evidence["queued"])
    return status_of(KINDS[workload], found, Evidence(**evidence))


def over(index: int, made: int, message: str, **more: Any) -> dict[str, Any]:
    """Return a pod that has failed for good, with the end of its log."""
    found = ended(index, exitCode=42, message=message) | more
    found["status"]["phase"] = "Failed"
    found["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{made:02}Z"
    return found


VERDICT = "torchrun ended with 1; fatal: rank 1: ValueError: NaN; not started again: 42\n"


def test_a_run_has_failed_when_a_pod_has_for_good_though_its_object_replaces_pods() -> None:
    job = thing(failed=1)
    first = over(1, 0, f"[rank 1] ValueError: NaN\n{VERDICT}")
    again = over(1, 10, VERDICT)
    words = f"node-1: exit status 42: rank 1: ValueError: NaN; {VERDICT.strip()}"
    assert judged(job, pods=[first]) == judged(job, pods=[again, first]) == status(FAILED, words)
    assert judged(job, pods=[again]).state is FAILED, "where only the last one is left"
    assert judged(job, pods=[ended(1, exitCode=138)]).state is RUNNING
    deleted = over(1, 0, VERDICT)
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    assert judged(job, pods=[deleted]).state is RUNNING, "as before the run is submitted again"


def test_an_image_without_a_shell_ends_the_run_with_words() -> None:
    """The operator of a PyTorchJob makes such a pod again for ever (seen on 1.35)."""
    why = "failed to create containerd task: exec: /bin/sh: no such file or directory"
    lacking = ended(0, exitCode=128, reason="StartError", message=why)
    lacking["status"]["phase"] = "Failed"
    for job in (thing(condition("Running")), thing(condition("Restarting"))):
        found = judged(job, "PyTorchJob", pods=[lacking])
        advice = "the image must have /bin/sh, and what `command` names"
        assert found == status(FAILED, f"node-0: StartError: {why}; {advice}")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_kinds_words_for_its_end_are_known_and_no_other_kinds(workload: Workload) -> None:
    assert judged(thing(condition(DONE[workload])), workload) == status(SUCCEEDED)
    assert judged(thing(condition("Failed", message="why")), workload) == status(FAILED, "why")
    for word in set(DONE.values()) - {DONE[workload]}:
        assert judged(thing(condition(word)), workload).state is UNKNOWN


@pytest.mark.parametrize("workload", WORKLOADS)
def test_an_end_that_is_not_true_is_none(workload: Workload) -> None:
    not_yet = thing(condition(DONE[workload], "False"), condition("Failed", "Unknown"))
    assert judged(not_yet, workload) == status(PENDING)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_condition_that_is_not_known_is_unknown(workload: Workload) -> None:
    found = judged(thing(condition("Exploded")), workload)
    assert found == status(UNKNOWN, f"the {workload} says Exploded")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_run_that_nobody_has_seen_yet_waits(workload: Workload) -> None:
    bare = {"metadata": {"name": "t"}, "spec": {}}
    assert judged(bare, workload) == status(PENDING)
    assert judged(thing(condition("Suspended", message="why")), workload) == status(PENDING, "why")


@pytest.mark.parametrize(
    ("workload", "found"),
    [
        ("PyTorchJob", thing(condition("Running"))),
        ("PyTorchJob", thing(condition("Created"), condition("Restarting"))),
        ("PyTorchJob", thing(condition("Created"), condition("Running", "False"))),
        ("TrainJob", thing(jobsStatus=[{"name": "node", "active": 1, "ready": 1}])),
        ("TrainJob", thing(condition("Suspended", "False"), jobsStatus=[{"succeeded": 1}])),
        ("JobSet", thing(replicatedJobsStatus=[{"name": "node", "ready": 1}])),
        ("JobSet", thing(restarts=2, replicatedJobsStatus=[{"name": "node", "ready": 0}])),
        ("JobSet", thing(condition("StartupPolicyCompleted"), replicatedJobsStatus=[{"ready": 1}])),
        ("JobSet", thing(condition("RestartingJobSet"), restarts=1)),
        ("Job", thing(active=2, ready=1)),
        ("Job", thing(active=1, failed=1)),
        ("Job", thing(condition("FailureTarget"))),
    ],
)
def test_running_is_read_from_where_each_kind_says_it(workload: Workload, found: Any) -> None:
    assert judged(found, workload).state is RUNNING


@pytest.mark.parametrize(
    ("workload", "found"),
    [
        ("TrainJob", thing(jobsStatus=[{"name": "node", "active": 1, "ready": 0}])),
        ("JobSet", thing(replicatedJobsStatus=[{"name": "node", "active": 1}])),
        ("Job", thing(active=2, ready=0)),
    ],
)
def test_pods_that_were_made_and_do_not_run_are_a_run_that_waits(
    workload: Workload, found: Any
) -> None:
    assert judged(found, workload).state is PENDING
    runs = pod(containerStatuses=[{"state": {"running": {}}}])
    assert judged(found, workload, pods=[pod(1), runs]).state is RUNNING


def test_a_gang_restart_is_running_and_says_so() -> None:
    found = thing(restarts=2, replicatedJobsStatus=[{"name": "node", "ready": 0}])
    assert judged(found, "JobSet") == status(RUNNING, "starts again (restart 2)")


def test_a_run_that_is_deleted_is_being_stopped_unless_it_has_ended() -> None:
    found = thing(condition("Running"))
    found["metadata"]["deletionTimestamp"] = "now"
    assert judged(found, "PyTorchJob") == status(RUNNING, "being stopped")
    over = thing(condition("Failed", message="no"))
    over["metadata"]["deletionTimestamp"] = "now"
    assert judged(over, "Job") == status(FAILED, "no")


# Why it waits.


def test_an_unschedulable_pod_says_which_resource_is_short() -> None:
    words = "0/3 nodes are available: 1 Insufficient cpu, 3 Insufficient nvidia.com/gpu. preempt"
    short = pod(
        1, conditions=[condition("PodScheduled", "False", reason="Unschedulable", message=words)]
    )
    assert judged(thing(), pods=[pod(0), short]) == status(
        PENDING, f"node-1: Unschedulable: no node has enough cpu and nvidia.com/gpu: {words}"
    )
    other = pod(
        role="worker",
        conditions=[condition("PodScheduled", "False", reason="Unschedulable", message="taints")],
    )
    assert judged(thing(), pods=[other]).reason == "worker-0: Unschedulable: taints"


@pytest.mark.parametrize(
    "reason", ["ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError", "CrashLoopBackOff"]
)
def test_a_container_that_cannot_start_says_why(reason: str) -> None:
    stuck = waiting(1, reason=reason, message="words")
    assert judged(thing(), pods=[pod(0), stuck]) == status(PENDING, f"node-1: {reason}: words")


def test_what_only_events_tell_is_asked_for_by_the_right_names() -> None:
    found = thing()
    assert stuck_objects(KINDS["Job"], found, []) == ["t"]
    assert stuck_objects(KINDS["PyTorchJob"], found, []) == ["t"]
    assert stuck_objects(KINDS["JobSet"], found, []) == ["t", "t-node-0"]
    assert stuck_objects(KINDS["TrainJob"], found, []) == ["t", "t-node-0"]
    assert stuck_objects(KINDS["Job"], found, [waiting(reason="ContainerCreating")]) == ["t-node-0"]
    assert stuck_objects(KINDS["Job"], found, [waiting(reason="ErrImagePull")]) == []
    assert stuck_objects(KINDS["Job"], thing(condition("Suspended")), []) == []
    assert stuck_objects(KINDS["Job"], thing(condition("Complete")), []) == []


def test_events_about_the_job_and_about_a_pod_are_told_apart() -> None:
    refused = {
        "reason": "FailedCreate",
        "message": "violates PodSecurity",
        "involvedObject": {"name": "t"},
    }
    assert judged(thing(), warnings=[refused]) == status(
        PENDING, "FailedCreate: violates PodSecurity"
    )
    mount = {"reason": "FailedMount", "message": "no claim", "involvedObject": {"name": "t-node-0"}}
    stuck = waiting(reason="ContainerCreating")
    assert judged(thing(), pods=[stuck], warnings=[refused, mount]).reason == (
        "node-0: FailedMount: no claim"
    )


# Kueue.


def workload_of(**conditions: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "job-t-1", "ownerReferences": [{"uid": "u1"}]},
        "status": {"conditions": [condition(k, **v) for k, v in conditions.items()]},
    }


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("LocalQueue q doesn't exist", "unknown queue"),
        ("ClusterQueue c is inactive", "held queue"),
        ("LocalQueue q is inactive", "held queue"),
        ("The ClusterQueue is stopped", "held queue"),
        ("namespace doesn't match ClusterQueue selector", "the queue does not take this namespace"),
        (
            "couldn't assign flavors to pod set main: insufficient quota for cpu in flavor f, "
            "request > maximum capacity (9 > 4)",
            "never fits",
        ),
        ("resource nvidia.com/gpu unavailable in ClusterQueue", "never fits"),
        ("insufficient unused quota for cpu in flavor f, 2 more needed", "waits for quota"),
        ("something new", "waits"),
    ],
)
def test_kueues_words_are_told_with_what_they_mean(words: str, meaning: str) -> None:
    found = thing(condition("Suspended", message="Job suspended"), queue="q")
    queued = [workload_of(QuotaReserved={"status": "False", "reason": "Pending", "message": words})]
    assert judged(found, queued=queued) == status(PENDING, f"queue 'q': {meaning}: {words}")


def test_a_preempted_workload_a_held_one_and_one_that_is_not_there() -> None:
    preempted = workload_of(
        QuotaReserved={"status": "False", "message": "insufficient unused quota"},
        Evicted={"reason": "Preempted", "message": "for a higher priority"},
    )
    assert queue_reason("q", preempted) == (
        "queue 'q': evicted by Kueue (Preempted: for a higher priority); "
        "waits for quota: insufficient unused quota"
    )
    assert "has its quota" in queue_reason("q", workload_of(QuotaReserved={}))
    held = workload_of() | {"spec": {"active": False}}
    assert queue_reason("q", held) == "queue 'q': held: its Workload was deactivated by hand"
    words = "The workload is deactivated due to exceeding the maximum number of re-queuing retries"
    gave_up = workload_of(
        Evicted={"reason": "DeactivatedDueToRequeuingLimitExceeded", "message": words}
    )
    assert queue_reason("q", gave_up | {"spec": {"active": False}}) == (
        f"queue 'q': held: Kueue has deactivated its Workload: {words}"
    )
    words = "Preempted to accommodate a workload (UID: 4f-1, JobUID: 7c-2) due to prioritization"
    taken = workload_of(Evicted={"status": "True", "reason": "Preempted", "message": words})
    assert queue_reason("q", taken) == (
        "queue 'q': evicted by Kueue (Preempted: Preempted to accommodate a workload due to "
        "prioritization); waits"
    )
    assert "no Workload for it yet" in queue_reason("q", None)


def test_without_a_look_at_kueues_workloads_nothing_is_said_of_them() -> None:
    found = thing(condition("Suspended"), queue="q")
    assert judged(found) == status(PENDING, "waits in queue 'q'")
    assert judged(found, queued=[]).reason.endswith("Kueue has no Workload for it yet")


def test_an_evicted_run_runs_until_its_pods_are_gone() -> None:
    found = thing(condition("Suspended"), queue="q")
    leaving = workload_of(Evicted={"reason": "Preempted", "message": "why"}, QuotaReserved={})
    assert judged(found, queued=[leaving]) == status(
        RUNNING, "queue 'q': evicted by Kueue (Preempted: why); its pods are being stopped"
    )
    gone = {"status": "False", "reason": "Pending", "message": "why"}
    left = workload_of(Evicted={"reason": "Preempted", "message": "why"}, QuotaReserved=gone)
    assert judged(found, queued=[left]) == status(
        PENDING, "queue 'q': evicted by Kueue (Preempted: why); waits"
    )


def test_a_queue_label_that_nobody_acts_on_changes_nothing() -> None:
    assert judged(thing(ready=1, queue="q")) == status(RUNNING)


def test_the_workload_of_another_object_is_not_read() -> None:
    found = thing(condition("Suspended"), queue="q")
    other = workload_of(QuotaReserved={"status": "False", "message": "no"})
    other["metadata"]["ownerReferences"] = [{"uid": "u2"}]
    assert judged(found, queued=[other]).reason == (
        "waits in queue 'q'; Kueue has no Workload for it yet"
    )


# How it ended.


def test_a_deadline_is_preemption_wherever_it_is_said() -> None:
    late = condition("Failed", reason="DeadlineExceeded", message="Job was active longer than")
    assert judged(thing(late), "Job").state is PREEMPTED
    assert judged(thing(late), "TrainJob").state is PREEMPTED
    words = "Job t has failed because it was active longer than specified deadline"
    assert judged(thing(condition("Failed", message=words)), "PyTorchJob") == status(
        PREEMPTED, words
    )
    jobset = thing(condition("Failed", reason="FailJobSetFailurePolicyAction", message="policy"))
    assert judged(jobset, "JobSet").state is FAILED
    assert judged(jobset, "JobSet", jobs=[thing(late)]) == status(
        PREEMPTED, "policy; DeadlineExceeded: Job was active longer than"
    )


def test_a_run_whose_pod_was_taken_is_preempted_unless_it_failed_by_itself() -> None:
    lost = thing(condition("Failed", message="BackoffLimitExceeded"))
    evicted = pod(reason="Evicted", message="The node was low on resource: memory.")
    assert judged(lost, pods=[evicted]) == status(
        PREEMPTED, "BackoffLimitExceeded; node-0: Evicted: The node was low on resource: memory."
    )
    target = condition("DisruptionTarget", reason="PreemptionByScheduler", message="higher")
    taken = ended(1, exitCode=138)
    taken["status"]["conditions"] = [target]
    peer = ended(0, exitCode=138)
    assert judged(lost, pods=[peer, taken]).reason == (
        "BackoffLimitExceeded; node-1: PreemptionByScheduler: higher"
    )
    fatal = ended(0, exitCode=42, message="[rank 0] ValueError: x")
    assert judged(lost, pods=[fatal, taken]) == status(
        FAILED, "BackoffLimitExceeded; node-0: exit status 42: rank 0: ValueError: x"
    )


def test_the_pod_that_failed_first_is_named_with_its_rank_and_its_last_line() -> None:
    first = ended(1, message="[rank 3] ValueError: NaN\n", finishedAt="2026-01-01T00:00:01Z")
    later = ended(0, message="[rank 0] lost rank 3", finishedAt="2026-01-01T00:00:02Z")
    assert judged(thing(condition("Failed")), pods=[later, first]) == status(
        FAILED, "Failed; node-1: exit status 1: rank 3: ValueError: NaN"
    )


def test_of_several_starts_of_a_pod_the_newest_counts() -> None:
    old, new = ended(0, message="old", finishedAt="1"), ended(0, message="new", finishedAt="2")
    old["metadata"] |= {"name": "t-0-a", "creationTimestamp": "1"}
    new["metadata"] |= {"name": "t-0-b", "creationTimestamp": "2"}
    assert judged(thing(condition("Failed")), pods=[new, old]).reason.endswith("new")


def test_a_pod_of_an_earlier_start_is_not_told_where_its_successor_is_gone() -> None:
    """A Job keeps the pods that failed earlier, and deletes those that run when it fails."""
    old = [ended(i, exitCode=138, finishedAt=f"2026-01-01T00:00:0{i}Z") for i in (0, 1)]
    last = ended(0, exitCode=42, message="last", finishedAt="2026-01-01T00:01:00Z")
    for made, one in (("00:00:00", old[0]), ("00:00:00", old[1]), ("00:00:30", last)):
        one["metadata"]["creationTimestamp"] = f"2026-01-01T{made}Z"
    assert judged(thing(condition("Failed")), pods=[*old, last]).reason == (
        "Failed; node-0: exit status 42: last"
    )


def test_a_pod_that_was_killed_for_memory_is_told_first_whatever_its_status() -> None:
    killed = ended(1, reason="OOMKilled", finishedAt="2026-01-02T00:00:00Z")
    assert judged(thing(condition("Failed")), pods=[ended(0), killed]) == status(
        FAILED, "Failed; node-1: OOMKilled: the pod needs more memory"
    )
    again = ended(1, where="lastState", reason="OOMKilled")
    assert judged(thing(condition("Running")), "PyTorchJob", pods=[again]) == status(
        RUNNING, "node-1: OOMKilled, started again"
    )


REPORT = """\
[rank 5] Traceback (most recent call last):
[rank 5]   File "train.py", line 1, in <module>
[rank 5] ValueError: a sample without a label
============================================================
train FAILED
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:03
  host      : t-node-1
  rank      : 5 (local_rank: 1)
  exitcode  : 1 (pid: 7)
  error_file: <N/A>
============================================================
torchrun ended with 1; not started again after failure 1 of 0 (retries.requeue): 42
"""


def test_last_words_hold_the_rank_its_exception_and_the_entrypoints_verdict() -> None:
    said = last_words("[rank 4] something else\n" + REPORT)
    assert (said.rank, said.cause) == (5, "ValueError: a sample without a label")
    assert said.verdict.endswith("(retries.requeue): 42")
    killed = REPORT.replace("exitcode  : 1 ", "exitcode  : -9 ").splitlines(keepends=True)[3:]
    assert str(last_words("".join(killed))).startswith("rank 5: exit status -9; torchrun ended")
    assert str(last_words("one\ntwo\n")) == "two"
    assert str(last_words("")) == ""


def test_of_several_pods_the_one_whose_torchrun_noticed_first_counts() -> None:
    early = ended(1, message=REPORT, finishedAt="2026-01-01T00:00:09Z")
    late = ended(0, message=REPORT.replace("00:00:03", "00:00:05"))
    assert "node-1: " in judged(thing(condition("Failed")), pods=[late, early]).reason


@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_is_kept_of_an_object_tells_the_same_as_the_object(workload: Workload) -> None:
    kind = KINDS[workload]
    rich = {"managedFields": ["x" * 9000], "annotations": {"a": "b" * 9000}}
    for found in (
        thing(condition(DONE[workload])),
        thing(condition("Failed", reason="DeadlineExceeded")),
        thing(condition("Suspended"), queue="q"),
        thing(ready=1, restarts=1, jobsStatus=[{"ready": 1}], replicatedJobsStatus=[{"ready": 1}]),
    ):
        whole = found | {"metadata": found["metadata"] | rich, "spec": {"template": "y" * 9000}}
        assert status_of(kind, digest(kind, whole)) == status_of(kind, whole)
        assert len(str(digest(kind, whole))) < 600


def test_a_run_that_starts_again_and_again_says_so() -> None:
    found = thing(restarts=9, replicatedJobsStatus=[{"name": "node", "ready": 2}])
    assert judged(found, "JobSet") == status(RUNNING, "restart 9")
    counted = thing(jobsStatus=[{"name": "node", "ready": 2}])  # only the TrainJob's pods show it
    runs = pod(attempt="3", containerStatuses=[{"state": {"running": {}}}])
    assert judged(counted, "TrainJob", pods=[runs]) == status(RUNNING, "restart 3")
    running = thing(
        condition("Running")
    )  # only the pods of a PyTorchJob show it, whose containers start again
    again = pod(role="worker", containerStatuses=[{"state": {"running": {}}, "restartCount": 2}])
    assert judged(running, "PyTorchJob", pods=[again]) == status(RUNNING, "restart 2")
    found = thing(active=2, ready=2, failed=2)
    assert judged(found, "Job") == status(RUNNING, "2 pods have failed and been replaced")


def made(index: int, second: int, given: int | None, *, attempt: str = "") -> dict[str, Any]:
    """Return a pod that was made at a second of 1970, and given a node at another one."""
    conditions = [condition("PodScheduled", "False", lastTransitionTime="1970-01-01T00:00:59Z")]
    if given is not None:
        stamp = f"1970-01-01T00:00:{given:02}Z"
        conditions = [condition("PodScheduled", lastTransitionTime=stamp)]
    one = pod(index, attempt=attempt, conditions=conditions)
    one["metadata"]["creationTimestamp"] = f"1970-01-01T00:00:{second:02}Z"
    return one


def test_a_start_has_its_nodes_when_its_last_pod_has_one() -> None:
    pods = [made(0, 10, 12, attempt="0"), made(1, 11, 15, attempt="0")]
    assert scheduled_of(pods) == [Scheduled(10, 10, 15)]
    again = [made(0, 30, 31, attempt="1"), made(1, 30, 33, attempt="1")]
    assert scheduled_of(pods + again) == [Scheduled(10, 10, 15), Scheduled(30, 30, 33)]
    assert scheduled_of([pods[0], made(1, 11, None, attempt="0")]) == []
    assert scheduled_of([made(0, 30, 33), pod(1)]) == []


def test_pods_that_a_job_has_replaced_say_nothing_of_its_last_start() -> None:
    old = made(0, 10, 12)
    old["status"]["containerStatuses"] = [
        {"state": {"terminated": {"exitCode": 1, "finishedAt": "1970-01-01T00:00:20Z"}}}
    ]
    assert scheduled_of([old, made(0, 30, 33), made(1, 31, 32)]) == [Scheduled(30, 30, 33)]


def failed_pod(name: str, hour: int, code: int, **more: Any) -> dict[str, Any]:
    labels = {"torch-deploy-toolkit/run": "t", "batch.kubernetes.io/job-completion-index": "0"}
    labels |= more.pop("labels", {})
    end = {"exitCode": code, "reason": "Error", "finishedAt": f"2026-12-01T0{hour + 1}:00:00Z"}
    metadata = {"name": name, "labels": labels, "creationTimestamp": f"2026-12-01T0{hour}:00:10Z"}
    containers = [{"name": "node", "state": {"terminated": end}}]
    status = {"phase": "Failed", "containerStatuses": containers}
    return {"metadata": metadata, "spec": more.pop("spec", {}), "status": {**status, **more}}


def test_an_earlier_eviction_does_not_make_a_failed_run_a_preempted_one() -> None:
    failed = {"type": "Failed", "status": "True", "reason": "FailedIndexes"}
    job = {"metadata": {"name": "t"}, "status": {"conditions": [failed]}}
    evicted = failed_pod("t-0-a", 1, 138, reason="Evicted", message="low on resource")
    pods = [evicted, failed_pod("t-0-b", 2, 138), failed_pod("t-0-c", 3, 138)]
    assert status_of(KINDS["Job"], job, Evidence(pods=pods)).state is RunState.FAILED
    assert status_of(KINDS["Job"], job, Evidence(pods=[evicted])).state is RunState.PREEMPTED


@pytest.mark.parametrize(
    ("claim", "state"), [({}, RunState.RUNNING), ({"runs_claim": "r"}, RunState.FAILED)]
)
def test_a_trainjob_without_a_claim_goes_on_after_42(
    claim: dict[str, str], state: RunState
) -> None:
    made = workload(manifest({}, claim, "TrainJob"))
    args = made["spec"]["trainer"]["args"]
    counts = {"jobsStatus": [{"name": "node", "ready": 1}]}
    pod = failed_pod(
        "t-node-0-0-a",
        1,
        FATAL,
        labels={"torch-deploy-toolkit/workload": "TrainJob"},
        spec={"containers": [{"name": "node", "args": args}]},
    )
    status = status_of(KINDS["TrainJob"], {**made, "status": counts}, Evidence(pods=[pod]))
    assert status.state is state
