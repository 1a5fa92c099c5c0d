"""The Kubernetes launcher against a fake API server over HTTP, with the official client."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes import watch as kubernetes_watch

from tests.fake_kubernetes import FakeKubernetes, Fault
from tests.fake_operator import JOB_LABEL
from toolkit.errors import LauncherError, RunNotFound, SchedulerMissing
from toolkit.launchers import registry
from toolkit.launchers.base import RunState, RunStatus
from toolkit.launchers.k8s import KubernetesLauncher, KubernetesRun
from toolkit.planning import plan
from toolkit.profile import KubernetesProfile
from toolkit.rendering import render
from toolkit.spec import JobSpec

Watch: Any = kubernetes_watch.Watch  # the client says nothing of its type
PROFILE = KubernetesProfile(name="k8s", runs_claim="runs")
JOBS = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"

PENDING, RUNNING, UNKNOWN = RunState.PENDING, RunState.RUNNING, RunState.UNKNOWN
FAILED, PREEMPTED = RunState.FAILED, RunState.PREEMPTED


@pytest.fixture
def server() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as fake:
        yield fake


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


class Site:
    """A launcher at a fake cluster, and what it waited for."""

    def __init__(self, server: FakeKubernetes, environ: Mapping[str, str]) -> None:
        self.server = server
        self.environ = environ
        self.slept: list[float] = []
        self.launcher = KubernetesLauncher(
            PROFILE, api_client=server.api_client(), sleep=self.slept.append, environ=environ
        )

    def submit(self, **job: Any) -> KubernetesRun:
        return self.launcher.submit(plan(make_job(**job), PROFILE))

    def pod(self, run: KubernetesRun, index: int = 0) -> str:
        return f"{run.name}-worker-{index}"


@pytest.fixture
def site(server: FakeKubernetes, environ: dict[str, str]) -> Site:
    return Site(server, environ)


def make_job(**job: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "t", "module": "train", "image": "i:1"} | job)


def status(state: RunState, reason: str = "") -> RunStatus:
    return RunStatus(state=state, reason=reason)


# Importing and connecting.


def test_importing_the_launcher_does_not_import_the_client() -> None:
    code = "import sys, toolkit.launchers.k8s; print('kubernetes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_the_client_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    launcher = KubernetesLauncher(PROFILE, environ=environ)
    with pytest.raises(LauncherError, match=r"pip install 'torch-deploy-toolkit\[kubernetes\]'"):
        launcher.submit(plan(make_job(), PROFILE))


def test_without_a_cluster_the_error_says_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "none"
    launcher = KubernetesLauncher(PROFILE, environ={"KUBECONFIG": str(file)})
    with pytest.raises(SchedulerMissing) as error:
        launcher.submit(plan(make_job(), PROFILE))
    assert str(error.value) == (
        f"no Kubernetes cluster at hand: there is no {file}, and this is no pod of a cluster; "
        "name a context in the profile, or set KUBECONFIG; "
        "`toolkit render JOB.yaml --to PROFILE | kubectl apply -f -` needs no Python client"
    )


def test_a_context_that_does_not_exist_is_named(server: FakeKubernetes, tmp_path: Path) -> None:
    file = server.kubeconfig(tmp_path / "config")
    profile = PROFILE.model_copy(update={"context": "prod"})
    launcher = KubernetesLauncher(profile, environ={"KUBECONFIG": str(file)})
    with pytest.raises(SchedulerMissing, match=f"context 'prod' of {file} cannot be used"):
        launcher.submit(plan(make_job(), profile))


def test_a_broken_kubeconfig_is_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "config"
    for broken in ("{", "[]", "a: b", ""):
        file.write_text(broken)
        launcher = KubernetesLauncher(PROFILE, environ={"KUBECONFIG": str(file)})
        with pytest.raises(SchedulerMissing, match="no Kubernetes cluster at hand"):
            launcher.submit(plan(make_job(), PROFILE))


def test_a_server_that_is_not_there_is_missing(site: Site, environ: dict[str, str]) -> None:
    gone = client.ApiClient(client.Configuration(host="http://127.0.0.1:9"))
    launcher = KubernetesLauncher(PROFILE, api_client=gone, environ=environ)
    with pytest.raises(SchedulerMissing, match=r"API server does not answer: .*refused"):
        launcher.submit(plan(make_job(), PROFILE))


def test_the_current_context_is_kept_for_tomorrow(server: FakeKubernetes, tmp_path: Path) -> None:
    file = server.kubeconfig(tmp_path / "config", context="today")
    environ = {"KUBECONFIG": str(file), "HOME": str(tmp_path)}
    run = KubernetesLauncher(PROFILE, environ=environ).submit(plan(make_job(), PROFILE))
    record = registry.find(run.name, environ=environ)
    assert record.profile["context"] == "today"
    document = yaml.safe_load(file.read_text())
    document["current-context"] = "elsewhere"
    file.write_text(yaml.safe_dump(document))
    profile = KubernetesProfile.model_validate(dict(record.profile))
    again = KubernetesLauncher(profile, environ=environ).open(record)
    assert again.status() == status(PENDING)


# Submitting.


def test_what_is_created_is_what_render_shows(site: Site) -> None:
    run = site.submit(args=["$(HOME)", "\u2028"], resources={"nnodes": 2})
    shown = yaml.safe_load(render(plan(make_job(**{}), PROFILE, run_name=run.name)))
    expected = yaml.safe_load(
        render(
            plan(
                make_job(args=["$(HOME)", "\u2028"], resources={"nnodes": 2}),
                PROFILE,
                run_name=run.name,
            )
        )
    )
    created = site.server.job(run.name)
    assert created["spec"] == expected["spec"]
    for key in ("labels", "name", "namespace"):
        assert created["metadata"][key] == shown["metadata"][key]
    method, path, query = next(r for r in site.server.requests if r[0] == "POST")
    assert (method, path) == ("POST", JOBS)
    assert query == {"fieldManager": "torch-deploy-toolkit", "fieldValidation": "Strict"}


def test_a_run_can_be_opened_again_by_another_process(site: Site) -> None:
    run = site.submit()
    assert run.uri == f"k8s://default/{run.name}"
    record = registry.find(run.uri, environ=site.environ)
    assert record == run.record
    again = Site(site.server, site.environ).launcher.open(record)
    assert again.status() == status(PENDING)


def test_two_submits_are_two_runs(site: Site) -> None:
    names = {site.submit().name, site.submit().name}
    assert set(site.server.jobs()) == names
    assert len(names) == 2


def test_a_create_whose_answer_was_lost_makes_one_run(site: Site) -> None:
    site.server.faults = [Fault(method="POST", arrives=True)]
    run = site.submit()
    assert site.server.jobs() == [run.name]
    assert site.slept == [0.5]


def test_a_create_that_was_answered_with_an_error_after_it_was_done_makes_one_run(
    site: Site,
) -> None:
    site.server.faults = [Fault(method="POST", arrives=True, status=504)]
    run = site.submit()
    assert site.server.jobs() == [run.name]


def test_a_create_that_never_arrived_is_tried_again(site: Site) -> None:
    site.server.faults = [Fault(method="POST")]
    run = site.submit()
    assert site.server.jobs() == [run.name]


def test_the_server_says_how_long_to_wait(site: Site) -> None:
    site.server.faults = [
        Fault(method="POST", status=429, retry_after="7"),
        Fault(method="POST", status=503, retry_after="3600"),
        Fault(method="POST", status=500),
    ]
    site.submit()
    assert site.slept == [7.0, 30.0, 2.0]


def test_attempts_are_bounded_and_the_last_words_are_shown(site: Site) -> None:
    words = "failed calling webhook: connection refused"
    site.server.faults = [Fault(method="POST", status=500, message=words, times=99)]
    with pytest.raises(SchedulerMissing) as error:
        site.submit()
    posted = [path for method, path, _ in site.server.requests if method == "POST"]
    assert len(posted) == 6
    assert site.slept == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert str(error.value).startswith(f"the Kubernetes API server cannot answer: {words} (6 att")


def test_the_object_of_somebody_else_is_not_taken_for_ours(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.launchers.k8s.new_run_name", lambda job: f"{job}-same")
    site.submit()
    with pytest.raises(LauncherError, match='"t-same" already exists'):
        site.submit(args=["other"])


def test_a_cluster_without_the_operator_is_told_from_a_missing_namespace(
    environ: dict[str, str],
) -> None:
    with FakeKubernetes(operator=False) as server, pytest.raises(LauncherError) as error:
        Site(server, environ).submit()
    assert str(error.value) == (
        "the cluster knows no PyTorchJob (404 page not found): the Kubeflow Training Operator "
        "(training-operator v1) is not installed there; ask its administrators"
    )
    with FakeKubernetes(namespaces=("other",)) as server, pytest.raises(LauncherError) as error:
        Site(server, environ).submit()
    assert str(error.value) == 'Kubernetes refused: namespaces "default" not found'


def test_an_admission_refusal_is_shown_in_the_webhooks_words(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.launchers.k8s.new_run_name", lambda job: "9-digits")
    with pytest.raises(LauncherError) as error:
        site.submit()
    assert str(error.value) == (
        'Kubernetes refused: admission webhook "validator.pytorchjob.training-operator.'
        'kubeflow.org" denied the request: metadata.name: Invalid value: "9-digits": a DNS-1035 '
        "label is wanted"
    )
    assert site.slept == []


@pytest.mark.parametrize("code", [400, 403, 422])
def test_a_refusal_is_final_and_in_the_servers_words(site: Site, code: int) -> None:
    site.server.faults = [Fault(method="POST", status=code, message="exceeded quota: gpus")]
    with pytest.raises(LauncherError, match=r"^Kubernetes refused: exceeded quota: gpus$"):
        site.submit()
    assert site.slept == []
    assert list(registry.records(environ=site.environ)) == []


def test_old_credentials_are_told(site: Site) -> None:
    site.server.faults = [Fault(method="POST", status=401, message="Unauthorized")]
    with pytest.raises(LauncherError, match=r"credentials \(Unauthorized\); log in anew"):
        site.submit()


# Where a run stands.


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([], status(PENDING)),
        (["Running"], status(RUNNING)),
        (["Running", "Restarting"], status(RUNNING, "why")),
        (["Suspended"], status(PENDING, "why")),
        (["Suspended", "Running"], status(RUNNING)),
        (["Running", "Succeeded"], status(RunState.SUCCEEDED)),
        (["Running", "Failed"], status(FAILED, "why")),
    ],
)
def test_the_operators_conditions_are_a_table(
    site: Site, conditions: list[str], expected: RunStatus
) -> None:
    run = site.submit()
    for kind in conditions:
        site.server.condition(run.name, kind, message="why")
    assert run.status() == expected


def test_a_condition_that_is_not_known_is_unknown(site: Site) -> None:
    site.server.refuse_pods = "no"
    run = site.submit()
    site.server.condition(run.name, "Exploded")
    assert run.status() == status(UNKNOWN, "the operator says Exploded")


def test_a_pending_run_says_why_no_node_takes_it(site: Site) -> None:
    run = site.submit()
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": words,
    }
    site.server.pod_status(site.pod(run), conditions=[unschedulable])
    assert run.status() == status(PENDING, f"worker-0: Unschedulable: {words}")


@pytest.mark.parametrize(
    "reason", ["ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError"]
)
def test_a_container_that_cannot_start_says_why(site: Site, reason: str) -> None:
    run = site.submit(resources={"nnodes": 2})
    site.server.pod_status(site.pod(run, 1), waiting={"reason": reason, "message": "words"})
    assert run.status() == status(PENDING, f"worker-1: {reason}: words")
    site.server.condition(run.name, "Running")
    assert run.status() == status(RUNNING, f"worker-1: {reason}: words")


def test_pods_that_were_refused_are_told_by_the_jobs_events(site: Site) -> None:
    words = 'pods "t" is forbidden: violates PodSecurity "restricted:latest"'
    site.server.refuse_pods = words
    run = site.submit()
    assert "status" not in site.server.job(run.name)
    assert run.status() == status(PENDING, f"FailedCreatePod: {words}")


def test_a_volume_that_cannot_be_mounted_is_told_by_the_pods_events(site: Site) -> None:
    run = site.submit()
    site.server.warn(site.pod(run), "FailedMount", 'persistentvolumeclaim "runs" not found')
    expected = 'worker-0: FailedMount: persistentvolumeclaim "runs" not found'
    assert run.status() == status(PENDING, expected)


def test_a_status_without_the_right_to_see_events_still_has_a_state(site: Site) -> None:
    run = site.submit()
    site.server.faults = [Fault(method="GET", path=".*/(events|pods)", status=403, times=9)]
    assert run.status() == status(PENDING)


def test_a_pod_that_was_killed_for_memory_is_told_while_running_and_after(site: Site) -> None:
    run = site.submit(retries={"requeue": 1})
    site.server.run(run.name)
    site.server.restart(site.pod(run), reason="OOMKilled", exit_code=1)
    assert run.status() == status(RUNNING, "worker-0: OOMKilled, started again")
    site.server.finish(run.name, succeeded=False, reason="OOMKilled", message="Job is failed.")
    assert run.status() == status(
        FAILED, "Job is failed.; worker-0: OOMKilled: the pod needs more memory"
    )


def test_a_failed_run_says_which_pod_failed_and_its_last_line(site: Site) -> None:
    run = site.submit()
    site.server.finish(
        run.name, succeeded=False, message="Job is failed.", last_words="a\nRuntimeError: NaN\n"
    )
    assert run.status() == status(
        FAILED, "Job is failed.; worker-0: exit status 1: RuntimeError: NaN"
    )


def test_a_run_whose_pod_was_taken_away_is_preempted(site: Site) -> None:
    run = site.submit()
    site.server.finish(run.name, succeeded=False, message="Job is failed.")
    disruption = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "a higher priority",
    }
    site.server.pod_status(site.pod(run), conditions=[disruption])
    assert run.status() == status(
        PREEMPTED, "Job is failed.; worker-0: PreemptionByScheduler: a higher priority"
    )


def test_a_run_that_ran_out_of_time_is_preempted(site: Site) -> None:
    run = site.submit()
    words = f"Job {run.name} has failed because it was active longer than specified deadline"
    site.server.finish(run.name, succeeded=False, message=words, exit_code=0)
    assert run.status() == status(PREEMPTED, words)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(method="GET", status=503, message="shutting down"),
        Fault(method="GET", times=9),
        Fault(method="GET", path=".*/pods", status=500, message="etcd"),
    ],
)
def test_a_server_that_is_away_for_a_moment_makes_the_state_unknown(
    site: Site, fault: Fault
) -> None:
    run = site.submit()
    site.server.faults = [fault]
    found = run.status()
    assert found.state is UNKNOWN
    assert found.reason.startswith("the Kubernetes API server ")
    site.server.faults = []
    assert run.status() == status(PENDING)


@pytest.mark.parametrize("code", [401, 403])
def test_a_server_that_refuses_to_say_is_an_error(site: Site, code: int) -> None:
    run = site.submit()
    site.server.faults = [Fault(method="GET", status=code, message="no")]
    with pytest.raises(LauncherError):
        run.status()


# Cancelling.


def test_a_cancelled_run_is_running_until_its_pods_are_gone_and_then_cancelled(site: Site) -> None:
    site.server.hold_deletes = True
    run = site.submit()
    site.server.run(run.name)
    run.cancel()
    assert run.status() == status(RUNNING, "being stopped")
    site.server.stopped(run.name)
    assert run.status() == status(RunState.CANCELLED)
    assert site.server.pods(run.name) == []
    tomorrow = Site(site.server, site.environ).launcher.open(run.record)
    assert tomorrow.wait(timeout_s=0) == status(RunState.CANCELLED)
    run.cancel()


def test_a_run_is_cancelled_even_where_that_cannot_be_remembered(site: Site) -> None:
    run = site.submit()
    state = Path(site.environ["HOME"]) / ".local/state/torch-deploy-toolkit"
    (state / "cancelled").mkdir()
    run.cancel()
    assert site.server.jobs() == []


def test_cancel_leaves_a_run_alone_that_has_ended(site: Site) -> None:
    run = site.submit()
    site.server.finish(run.name)
    run.cancel()
    assert run.status() == status(RunState.SUCCEEDED)
    assert [m for m, *_ in site.server.requests if m == "DELETE"] == []


def test_cancel_looks_again_where_the_run_changed_meanwhile(site: Site) -> None:
    run = site.submit()
    ended = Fault(method="DELETE", status=409, message="Precondition failed")
    site.server.faults = [ended]
    run.cancel()
    assert site.server.jobs() == []
    assert run.status() == status(RunState.CANCELLED)


def test_a_run_that_keeps_changing_is_not_cancelled_and_says_so(site: Site) -> None:
    run = site.submit()
    site.server.faults = [Fault(method="DELETE", status=409, times=99)]
    with pytest.raises(LauncherError, match="try again"):
        run.cancel()
    assert run.status() == status(PENDING)


def test_an_object_that_changed_is_not_deleted(site: Site, server: FakeKubernetes) -> None:
    run = site.submit()
    api = client.CustomObjectsApi(server.api_client())
    stale = server.job(run.name)["metadata"]
    server.condition(run.name, "Succeeded")
    with pytest.raises(client.ApiException) as error:
        api.delete_namespaced_custom_object(
            *("kubeflow.org", "v1", "default", "pytorchjobs", run.name),
            body=client.V1DeleteOptions(
                preconditions=client.V1Preconditions(resource_version=stale["resourceVersion"])
            ),
        )
    assert error.value.status == 409


def test_a_run_that_somebody_else_deleted_is_unknown_and_not_waited_for(site: Site) -> None:
    run = site.submit()
    site.server.delete(run.name)
    reason = "the PyTorchJob is gone, and was not cancelled from here: somebody deleted it"
    assert run.status() == RunStatus(state=UNKNOWN, reason=reason, lost=True)
    with pytest.raises(RunNotFound, match="the PyTorchJob is gone"):
        run.wait()
    with pytest.raises(RunNotFound, match="its log with its pods"):
        list(run.logs())
    run.cancel()
    assert run.status() == RunStatus(state=UNKNOWN, reason=reason, lost=True)


def test_wait_gives_up_in_time_and_outlives_a_server_that_is_away(site: Site) -> None:
    run = site.submit()
    with pytest.raises(TimeoutError):
        run.wait(timeout_s=0)
    site.server.finish(run.name)
    site.server.faults = [Fault(method="GET", status=503)]
    assert run.wait(timeout_s=30) == status(RunState.SUCCEEDED)


# Logs.


def test_the_lines_of_one_pod_come_as_they_are(site: Site) -> None:
    run = site.submit()
    assert list(run.logs()) == []
    site.server.run(run.name)
    lines = ["", "  two", "2026-01-01T00:00:00Z x", "caf\xe9 \u2028 \U0001f600", "tail\r"]
    site.server.log(site.pod(run), *lines)
    assert list(run.logs()) == lines


def test_the_lines_of_many_pods_tell_their_pod(site: Site) -> None:
    run = site.submit(resources={"nnodes": 11})
    site.server.run(run.name)
    for index in (10, 2, 0):
        site.server.log(site.pod(run, index), f"line {index}")
    assert list(run.logs()) == ["[worker-0] line 0", "[worker-2] line 2", "[worker-10] line 10"]


def test_the_lines_before_a_restart_are_shown_too(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.log(site.pod(run), "first")
    site.server.restart(site.pod(run))
    site.server.log(site.pod(run), "second")
    assert list(run.logs()) == ["first", "second"]


def test_following_goes_through_a_restart_to_the_end(site: Site) -> None:
    run = site.submit()
    lines = run.logs(follow=True)
    site.server.run(run.name)
    site.server.log(site.pod(run), "one")
    assert next(lines) == "one"
    site.server.log(site.pod(run), "two")
    assert next(lines) == "two"
    site.server.restart(site.pod(run))
    site.server.log(site.pod(run), "three")
    assert next(lines) == "three"
    site.server.log(site.pod(run), "four")
    site.server.finish(run.name)
    assert list(lines) == ["four"]


def test_following_loses_and_repeats_nothing_where_connections_break(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.cut_logs = [3, 4, 0]
    site.server.log(site.pod(run), *"abcde")
    lines = run.logs(follow=True)
    assert [next(lines) for _ in range(5)] == list("abcde")
    site.server.log(site.pod(run), "f")
    site.server.finish(run.name)
    assert list(lines) == ["f"]


def test_following_outlives_a_server_that_is_away(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.log(site.pod(run), "a")
    lines = run.logs(follow=True)
    assert next(lines) == "a"
    site.server.faults = [Fault(method="GET", path=".*/pods", status=503, times=2)]
    site.server.finish(run.name)
    assert list(lines) == []


def test_following_may_be_left_at_any_time(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.log(site.pod(run), "a")
    lines = run.logs(follow=True)
    assert next(lines) == "a"
    lines.close()  # type: ignore[attr-defined]  # the promise is an iterator; this one is a generator


@pytest.mark.parametrize("follow", [False, True])
def test_logs_that_may_not_be_read_are_an_error(site: Site, follow: bool) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.faults = [Fault(method="GET", path=".*/log", status=403, message="no", times=9)]
    with pytest.raises(LauncherError, match="Kubernetes refused: no"):
        list(run.logs(follow=follow))


@pytest.mark.parametrize("follow", [False, True])
def test_torchruns_traceback_of_being_stopped_is_left_out_of_each_pods_lines(
    site: Site, follow: bool
) -> None:
    run = site.submit(resources={"nnodes": 2})
    site.server.run(run.name)
    trace = ["Traceback (most recent call last):", "  File", "torch.distributed.elastic.x.y"]
    for index, end in ((0, "SignalException: Process 7 got signal: 15"), (1, "Error: real")):
        site.server.log(site.pod(run, index), "before", *trace[:2], f"{trace[2]}.{end}")
    site.server.finish(run.name)
    shown = [f"[worker-1] {line}" for line in (*trace[:2], f"{trace[2]}.Error: real")]
    assert sorted(run.logs(follow=follow)) == sorted(
        ["[worker-0] before", "[worker-1] before", *shown]
    )
    assert list(run.logs(follow=follow, grep="real$")) == shown[2:]


def test_pods_do_not_tell_ranks_and_nothing_counts_their_starts(site: Site) -> None:
    run = site.submit()
    with pytest.raises(LauncherError, match=r"do not say their rank; --grep '\^\\\[worker-1"):
        run.logs(ranks=[0])
    with pytest.raises(LauncherError, match="nothing counts attempts; all are 0"):
        run.logs(attempt=1)
    assert list(run.logs(attempt=0)) == []
    assert run.failure() is None


# The fake server keeps the promises of the real one.


def test_the_fake_watch_goes_on_from_a_version_and_expires_with_410(site: Site) -> None:
    api = client.CoreV1Api(site.server.api_client())
    first = site.submit()
    version = site.server.pods(first.name)[0]["metadata"]["resourceVersion"]
    second = site.submit()

    def changes(version: str) -> list[tuple[str, str]]:
        stream = Watch().stream(
            api.list_namespaced_pod,
            "default",
            label_selector=f"{JOB_LABEL}={second.name}",
            resource_version=version,
            timeout_seconds=1,
            deserialize=False,
        )
        return [(event["type"], event["object"]["metadata"]["name"]) for event in stream]

    assert changes(version) == [("ADDED", site.pod(second))]
    site.server.expire()
    response: Any = api.list_namespaced_pod(
        "default", watch=True, resource_version=version, _preload_content=False
    )
    event = json.loads(response.data)
    assert (response.status, event["type"]) == (200, "ERROR")
    assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")


def test_the_fake_refuses_stale_writes_unknown_fields_and_unknown_groups(site: Site) -> None:
    run = site.submit()
    api = client.CustomObjectsApi(site.server.api_client())
    where = ("kubeflow.org", "v1", "default", "pytorchjobs")
    stale = site.server.job(run.name)
    site.server.condition(run.name, "Running")
    with pytest.raises(client.ApiException) as conflict:
        api.replace_namespaced_custom_object(*where, run.name, stale)
    assert json.loads(conflict.value.body or "")["reason"] == "Conflict"

    body = {key: stale[key] for key in ("apiVersion", "kind", "spec")}
    with pytest.raises(client.ApiException) as twice:
        api.create_namespaced_custom_object(*where, body | {"metadata": {"name": run.name}})
    assert json.loads(twice.value.body or "")["reason"] == "AlreadyExists"

    body["metadata"] = {"name": "other"}
    body["spec"]["runPolicy"]["cleanPods"] = "All"
    api.create_namespaced_custom_object(*where, body)
    body["metadata"] = {"name": "another"}
    with pytest.raises(client.ApiException) as unknown:
        api.create_namespaced_custom_object(*where, body, field_validation="Strict")
    assert (unknown.value.status, "cleanPods" in str(unknown.value.body)) == (400, True)

    with pytest.raises(client.ApiException) as missing:
        api.list_namespaced_custom_object("batch.volcano.sh", "v1", "default", "jobs")
    assert (missing.value.status, missing.value.body) == (404, "404 page not found\n")


# Pods that really run, as processes of this machine.


@pytest.fixture
def busy(environ: dict[str, str]) -> Iterator[Site]:
    with FakeKubernetes(auto_run=True, secrets={"s": {"k": "hush"}}) as fake:
        yield Site(fake, environ)


def shell(site: Site, script: str, **job: Any) -> KubernetesRun:
    """Submit a job whose container is a shell instead of torchrun."""
    made = plan(make_job(**job), PROFILE)
    text = render(plan(made.job, PROFILE, run_name="x"))
    body = yaml.safe_load(text)
    body["metadata"]["name"] = name = f"sh-{len(site.server.jobs())}"
    worker = body["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    container |= {"command": ["sh", "-c"], "args": [script.replace("$", "$$")]}
    api = client.CustomObjectsApi(site.server.api_client())
    api.create_namespaced_custom_object(
        "kubeflow.org", "v1", "default", "pytorchjobs", body, field_validation="Strict"
    )
    record = registry.RunRecord(
        uri=f"k8s://default/{name}", name=name, job="t", profile={}, created=0
    )
    return site.launcher.open(record)


def test_a_pod_has_the_operators_environment_and_its_secrets_and_volumes(busy: Site) -> None:
    script = (
        'echo "$PET_NNODES $PET_NPROC_PER_NODE $PET_RDZV_BACKEND $TOKEN $HOSTNAME $A";'
        'mkdir -p "$TRAIN_RUN_DIR"; echo yes > "$TRAIN_RUN_DIR/it"'
    )
    job = {"secrets": {"TOKEN": {"secret": "s", "key": "k"}}, "env": {"A": "$(HOME) $$"}}
    run = shell(busy, script, **job)
    assert list(run.logs(follow=True)) == ["1:1 1 c10d hush sh-0-worker-0 $(HOME) $$"]
    assert run.wait() == status(RunState.SUCCEEDED)
    assert (busy.server.root / "claims/runs/x/it").read_text() == "yes\n"


def test_a_pod_without_its_secret_never_starts_and_says_why(busy: Site) -> None:
    run = shell(busy, "true", secrets={"TOKEN": {"secret": "s", "key": "other"}})
    expected = status(
        PENDING, "worker-0: CreateContainerConfigError: couldn't find key other in Secret s"
    )
    wait_until(lambda: run.status() == expected)
    run.cancel()
    wait_until(lambda: busy.server.jobs() == [])


def test_a_failed_process_is_a_failed_run_with_its_last_line(busy: Site) -> None:
    run = shell(busy, "echo one; echo two >&2; exit 3")
    assert run.wait(timeout_s=30) == status(
        FAILED, "PyTorchJob sh-0 is failed.; worker-0: exit status 3: two"
    )


def test_a_failed_process_starts_again_as_often_as_the_job_says(busy: Site) -> None:
    count = busy.server.root / "count"
    again = f"echo x >> {count}; test $(wc -l < {count}) = 2"
    assert shell(busy, again, retries={"requeue": 1}).wait(timeout_s=30).state == "succeeded"
    never = shell(busy, "exit 1", retries={"requeue": 1})
    assert never.wait(timeout_s=30) == status(
        FAILED,
        "Job sh-1 has failed because it has reached the specified backoff limit; "
        "worker-0: exit status 1",
    )


def test_cancel_gives_a_process_sigterm_and_time_for_its_last_lines(busy: Site) -> None:
    run = shell(
        busy, "trap 'sleep 0.3; echo saved; exit 1' TERM; echo up; while :; do sleep 0.1; done"
    )
    lines = run.logs(follow=True)
    assert next(lines) == "up"
    run.cancel()
    assert run.status() == status(RUNNING, "being stopped")
    assert list(lines) == ["saved"]
    assert run.wait(timeout_s=30) == status(RunState.CANCELLED)


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace_with_all_it_started(
    busy: Site,
) -> None:
    run = shell(busy, "trap '' TERM; setsid sleep 987 & echo $!; wait; wait; sleep 987")
    lines = run.logs(follow=True)
    child = Path(f"/proc/{next(lines)}")
    with busy.server.changed:
        (pod,) = busy.server._pods_of(run.name)
        pod["spec"]["terminationGracePeriodSeconds"] = 0.2
    run.cancel()
    assert run.wait(timeout_s=30) == status(RunState.CANCELLED)
    wait_until(lambda: not child.exists() or "Z" in child.joinpath("stat").read_text().split())
    assert list(lines) == []


def wait_until(promise: Any, timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not promise():
        assert time.monotonic() < end
        time.sleep(0.02)
