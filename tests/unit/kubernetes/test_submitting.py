"""Submitting to Kubernetes: the objects, each created once, and the messages of refusals."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.kubernetes import FakeKubernetes, Fault
from tests.support.costs import others_slow
from tests.support.kubectl import kubectl
from tests.unit.kubernetes.site import (
    PENDING,
    WORKLOADS,
    Site,
    a_job,
    every_workload,
    make_job,
    make_profile,
    runtime,
    status,
)
from toolkit.errors import LauncherError, PlanError, SchedulerMissing
from toolkit.job.kubernetes_options import Workload
from toolkit.kubernetes import KubernetesLauncher, dry_run
from toolkit.planning import plan
from toolkit.profile import KubernetesProfile
from toolkit.rendering import render
from toolkit.runs.records import registry

PROFILE = make_profile("Job")


def submit_by(environ: dict[str, str], profile: KubernetesProfile = PROFILE) -> Any:
    return KubernetesLauncher(profile, environ=environ).submit(plan(make_job(), profile))


# Importing and connecting.


def test_importing_the_launcher_does_not_import_the_client() -> None:
    code = "import sys, toolkit.kubernetes; print('kubernetes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_the_client_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(LauncherError, match="pip install kubernetes"):
        submit_by(environ)


def test_without_a_cluster_the_error_says_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "none"
    with pytest.raises(SchedulerMissing) as error:
        submit_by({"KUBECONFIG": str(file), "HOME": str(tmp_path)})
    assert str(error.value) == (
        f"no Kubernetes cluster found: {file} does not exist, and this is not a pod; "
        "name a context in the profile, or set KUBECONFIG; "
        "`toolkit render JOB.yaml --to PROFILE | kubectl apply --server-side -f -` needs no Python "
        "client"
    )


def test_a_context_that_does_not_exist_is_named(server: FakeKubernetes, tmp_path: Path) -> None:
    file = server.kubeconfig(tmp_path / "config")
    profile = PROFILE.model_copy(update={"context": "prod"})
    with pytest.raises(SchedulerMissing, match=f"context 'prod' of {file} cannot be used"):
        submit_by({"KUBECONFIG": str(file), "HOME": str(tmp_path)}, profile)


def test_a_broken_kubeconfig_is_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "config"
    for broken in ("{", "[]", "a: b", ""):
        file.write_text(broken)
        with pytest.raises(SchedulerMissing, match="no Kubernetes cluster found"):
            submit_by({"KUBECONFIG": str(file), "HOME": str(tmp_path)})


def test_a_server_that_is_not_there_is_missing_at_once(
    server: FakeKubernetes, tmp_path: Path
) -> None:
    file = server.kubeconfig(tmp_path / "config")
    known = yaml.safe_load(file.read_text())
    known["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    file.write_text(yaml.safe_dump(known))
    slept: list[float] = []
    environ = {"KUBECONFIG": str(file), "HOME": str(tmp_path)}
    launcher = KubernetesLauncher(PROFILE, sleep=slept.append, environ=environ)
    with pytest.raises(SchedulerMissing, match=r"API server does not answer: .*refused"):
        launcher.submit(plan(make_job(), PROFILE))
    assert slept == []


def test_the_current_context_is_kept_for_tomorrow(server: FakeKubernetes, tmp_path: Path) -> None:
    file = server.kubeconfig(tmp_path / "config", context="today")
    environ = {"KUBECONFIG": str(file), "HOME": str(tmp_path)}
    run = submit_by(environ)
    record = registry.find(run.name, environ=environ)
    assert record.profile["context"] == "today"
    document = yaml.safe_load(file.read_text())
    document["current-context"] = "elsewhere"
    file.write_text(yaml.safe_dump(document))
    profile = KubernetesProfile.model_validate(dict(record.profile))
    again = KubernetesLauncher(profile, environ=environ).open(record)
    assert again.status() == status(PENDING)


def test_a_token_that_has_become_too_old_is_read_again(
    server: FakeKubernetes, tmp_path: Path
) -> None:
    file = server.kubeconfig(tmp_path / "config")
    environ = {"KUBECONFIG": str(file), "HOME": str(tmp_path)}
    run = submit_by(environ)
    known = yaml.safe_load(file.read_text())
    known["users"][0]["user"] = {"token": "renewed"}
    server.tokens = {"renewed"}
    with pytest.raises(LauncherError, match=r"credentials \(Unauthorized\); log in again"):
        run.status()
    file.write_text(yaml.safe_dump(known))
    assert run.status() == status(PENDING)


def test_a_plugin_of_the_kubeconfig_is_asked_again_when_its_token_is_over(
    server: FakeKubernetes, tmp_path: Path
) -> None:
    file, token = server.kubeconfig(tmp_path / "config"), tmp_path / "token"
    says = (
        '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": '
        '{"token": "\'$(cat "$0")\'", "expirationTimestamp": "2020-01-01T00:00:00Z"}}'
    )
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "sh",
        "args": ["-c", f"echo '{says}'", str(token)],
        "interactiveMode": "Never",
    }
    known = yaml.safe_load(file.read_text())
    known["users"][0]["user"] = {"exec": plugin}
    file.write_text(yaml.safe_dump(known))
    environ = {"KUBECONFIG": str(file), "HOME": str(tmp_path)}
    token.write_text("one")
    server.tokens = {"one"}
    run = submit_by(environ)
    token.write_text("two")
    server.tokens = {"two"}
    assert run.status() == status(PENDING)


@pytest.mark.parametrize("workload", ["Job"])
def test_what_is_no_api_server_is_told(site: Site) -> None:
    site.server.faults = [Fault(method="GET", status=404, text="<html>", times=9)]
    run = site.submit()
    site.server.faults = [Fault(method="GET", status=201, text="<html>log in</html>")]
    with pytest.raises(
        LauncherError, match=r"is not a Kubernetes API server: b'<html>log in</html>'"
    ):
        run.status()


# What is made.


@every_workload
def test_what_is_made_is_what_render_shows_strictly_and_by_our_manager(site: Site) -> None:
    job = {"args": ["$(HOME)", "\u2028"], "resources": {"nnodes": 2}}
    run = site.submit(**job)
    expected = site.shown(run.name, **job)
    for document in expected:
        made = site.server.object(document["kind"], document["metadata"]["name"])
        for key in ("labels", "name", "namespace"):
            assert made["metadata"][key] == document["metadata"][key]
    assert expected[-1]["kind"] == site.workload
    ours = {"fieldManager": "torch-deploy-toolkit", "fieldValidation": "Strict"}
    assert all(query == ours for query in site.asked("PATCH", run.name))
    assert site.asked("POST") == [ours], "the supervisor, with no other right than to create it"


@every_workload
def test_an_object_that_is_applied_again_is_no_change(site: Site) -> None:
    job: dict[str, Any] = {
        "resources": {"cpus_per_node": 2000, "memory": "500MB", "shm": "2MB"},
        "mounts": [{"source": "empty:2048TiB", "target": "/scratch"}],
    }
    text = render(plan(make_job(**job), site.profile))
    first, again = (site.server.apply(text, manager="us")[-1] for _ in range(2))
    assert again["metadata"]["generation"] == first["metadata"]["generation"] == 1
    assert again["spec"] == first["spec"]


@pytest.mark.parametrize("workload", others_slow(WORKLOADS, "TrainJob"))
def test_the_command_in_the_head_of_a_manifest_may_be_given_again(
    workload: Workload, tmp_path: Path
) -> None:
    text = render(plan(make_job(), make_profile(workload, queue="gpus")))
    (tmp_path / "job.yaml").write_text(text)
    command = re.findall("# Apply with: kubectl (.*) FILE", text)[0].split()
    # The fake has no OpenAPI documents for kubectl to look into first; it looks itself.
    argv = [*command, str(tmp_path / "job.yaml"), "--validate=false"]
    with FakeKubernetes(kueue=True) as server:
        server.apply(runtime())
        config = server.kubeconfig(tmp_path / "config")
        kubectl(*argv, config=config)
        if workload != "PyTorchJob":  # which Kueue leaves alone
            server.admit("t")
        before = server.job("t", kind=workload)
        kubectl(*argv, config=config)
        after = server.job("t", kind=workload)
        assert after["spec"] == before["spec"]
        assert after["metadata"]["generation"] == before["metadata"]["generation"]


@pytest.mark.parametrize("workload", ["TrainJob"])
def test_a_trainjob_takes_as_many_variables_as_a_plan_allows(site: Site) -> None:
    sent = len(site.shown("t", env={"V": "x"})[-1]["spec"]["trainer"]["env"])
    most = {f"V{index}": "x" for index in range(128 - sent + 1)}
    run = site.submit(env=most)
    made = site.server.object("TrainJob", run.name)["spec"]["trainer"]["env"]
    assert len(made) == 128
    with pytest.raises(PlanError, match="takes 128 variables; these are 129"):
        site.submit(env={**most, "ONE_MORE": "x"})


@every_workload
def test_a_run_can_be_opened_again_by_another_process(site: Site) -> None:
    run = site.submit()
    assert run.uri == f"k8s://default/{run.name}"
    record = registry.find(run.uri, environ=site.environ)
    # The list of runs keeps no diff of the working tree.
    assert replace(record, provenance={}) == replace(run.record, provenance={})
    assert site.open_launcher().open(record).status() == status(PENDING)


@a_job
def test_a_kind_that_the_job_wishes_is_remembered(site: Site) -> None:
    run = site.submit(kubernetes={"workload": "JobSet"})
    profile = KubernetesProfile.model_validate(dict(run.record.profile))
    again = KubernetesLauncher(profile, api_client=site.server.api_client(), environ=site.environ)
    assert again.open(run.record).kind.kind == "JobSet"
    assert again.open(run.record).status() == status(PENDING)


# Answers that are lost.


@every_workload
@pytest.mark.parametrize("code", [None, 504])
def test_an_answer_that_was_lost_makes_no_second_run(site: Site, code: int | None) -> None:
    site.server.faults = [Fault(method="PATCH", path=f"{site.path}/.*", arrives=True, status=code)]
    run = site.submit()
    assert site.jobs() == [run.name]
    assert site.slept == [0.5]


@every_workload
def test_that_it_is_there_already_is_success_where_it_is_ours(site: Site) -> None:
    site.server.faults = [
        Fault(method="PATCH", path=f"{site.path}/.*", arrives=True, status=409, message="exists")
    ]
    run = site.submit()
    assert site.jobs() == [run.name]
    site.server.faults = [Fault(method="PATCH", path=f"{site.path}/.*", status=409, message="no")]
    with pytest.raises(LauncherError, match=r"^Kubernetes refused: no$"):
        site.submit()


@a_job
def test_what_never_arrived_is_tried_again(site: Site) -> None:
    site.server.faults = [Fault(method="PATCH", times=2)]
    run = site.submit()
    assert site.jobs() == [run.name]


@a_job
def test_the_server_says_how_long_to_wait(site: Site) -> None:
    site.server.faults = [
        Fault(method="PATCH", status=429, retry_after="7"),
        Fault(method="PATCH", status=503, retry_after="3600"),
        Fault(method="PATCH", status=500),
    ]
    site.submit()
    assert site.slept == [7.0, 30.0, 2.0]


@a_job
def test_attempts_are_bounded_and_the_last_words_are_shown(site: Site) -> None:
    words = "failed calling webhook: connection refused"
    site.server.faults = [Fault(method="PATCH", status=500, message=words, times=99)]
    with pytest.raises(SchedulerMissing) as error:
        site.submit()
    assert site.slept == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert str(error.value).startswith(f"the Kubernetes API server cannot answer: {words} (6 att")
    words = (
        'Internal error occurred: failed calling webhook "mjobset.kb.io": failed to call webhook: '
        'Post "https://jobset-webhook.jobset-system.svc:443/mutate?timeout=10s": dial tcp: refused'
    )
    site.server.faults = [Fault(method="PATCH", status=500, message=words, times=99)]
    with pytest.raises(SchedulerMissing) as error:
        site.submit()
    who = "the operator behind webhook mjobset.kb.io"
    assert str(error.value).startswith(f"{who} does not answer: {words} (6 att")


@a_job
def test_a_run_that_has_arrived_although_no_answer_did_is_taken(site: Site) -> None:
    site.server.faults = [
        Fault(method="PATCH", path=f"{site.path}/.*", arrives=True, status=503, times=6)
    ]
    run = site.submit()
    assert site.jobs() == [run.name]


# Refusals.


@pytest.mark.parametrize("workload", WORKLOADS[:3])
def test_a_cluster_without_the_operator_names_it_and_what_would_work(
    workload: Workload, environ: dict[str, str]
) -> None:
    operators = {
        "PyTorchJob": "the Kubeflow Training Operator",
        "TrainJob": "Kubeflow Trainer",
        "JobSet": "the JobSet controller",
    }
    with FakeKubernetes(operator=False) as server:
        with pytest.raises(LauncherError) as error:
            Site(server, environ, workload).submit()
        assert server.objects_of("NetworkPolicy") == []
    assert f"the cluster knows no {workload} (404 page not found): " in str(error.value)
    assert operators[workload] in str(error.value)
    assert "write workload: Job in the profile" in str(error.value)
    assert list(registry.records(environ=environ)) == []


def test_a_missing_operator_is_told_with_the_others_that_are_there(
    environ: dict[str, str],
) -> None:
    told = pytest.raises(LauncherError, match="workload: TrainJob or JobSet or Job in the prof")
    with FakeKubernetes(without=("kubeflow.org",)) as server, told:
        Site(server, environ, "PyTorchJob").submit()


@a_job
def test_a_namespace_that_is_not_there_is_told(environ: dict[str, str], workload: Workload) -> None:
    with FakeKubernetes(namespaces=("other",)) as server, pytest.raises(LauncherError) as error:
        Site(server, environ, workload).submit()
    assert str(error.value) == (
        'Kubernetes refused: namespaces "default" not found; correct `namespace` in the profile, '
        "or have it made: `kubectl apply -k k8s/base` makes one called training"
    )


@a_job
def test_a_gang_scheduler_that_is_not_there_is_told(
    environ: dict[str, str], workload: Workload
) -> None:
    told = pytest.raises(LauncherError, match=r"knows no PodGroup .* leave gang_scheduler out")
    with FakeKubernetes(without=("scheduling.volcano.sh",)) as server, told:
        Site(server, environ, workload, gang_scheduler="volcano").submit()


@every_workload
def test_a_webhooks_refusal_is_shown_in_its_words_and_leaves_nothing(site: Site) -> None:
    site.server.deny[site.workload] = "not on Fridays"
    with pytest.raises(LauncherError, match=r"Kubernetes refused: .*not on Fridays$"):
        site.submit()
    assert site.slept == []
    assert site.server.objects_of("NetworkPolicy") == []
    assert list(registry.records(environ=site.environ)) == []


@a_job
def test_who_may_make_no_network_policy_is_told_the_way_out(site: Site) -> None:
    site.server.forbid("networkpolicies", "create", "patch")
    with pytest.raises(LauncherError, match=r"networkpolicies.*; leave .* network_policy: false"):
        site.submit()


@a_job
def test_who_may_not_submit_is_told_which_role_can(site: Site) -> None:
    site.server.forbid("jobs", "create", "patch")
    denied = r"jobs.* cannot (create|patch) .*you may not submit .*k8s/base has a Role"
    with pytest.raises(LauncherError, match=denied):
        site.submit()
    assert site.server.objects_of("NetworkPolicy") == []
    # Who may only watch needs no way around the NetworkPolicy, which is made first.
    site.server.forbid("networkpolicies", "create", "patch")
    with pytest.raises(LauncherError, match=denied):
        site.submit()


@a_job
def test_who_may_make_jobs_and_not_look_at_them_can_submit(site: Site) -> None:
    site.server.forbid("jobs", "get", "list")
    site.server.forbid("networkpolicies", "get", "list")
    run = site.submit()
    assert site.jobs() == [run.name]


@a_job
@pytest.mark.parametrize("code", [400, 403, 422])
def test_a_refusal_is_final_and_in_the_servers_words(site: Site, code: int) -> None:
    site.server.faults = [
        Fault(method="PATCH", path=site.path + "/.*", status=code, message="exceeded quota: gpus")
    ]
    with pytest.raises(LauncherError, match=r"^Kubernetes refused: exceeded quota: gpus$"):
        site.submit()
    assert site.slept == []


@every_workload
def test_an_unknown_field_is_refused_at_once_although_the_server_calls_it_its_own_error(
    site: Site,
) -> None:
    """Server-side apply answers 500 to it (1.34.9), which elsewhere means: ask again."""
    *_, document = site.shown("t-bad")
    document["spec"]["nonsense"] = 1
    client = site.server.api_client()
    ((_, words),) = dry_run([document], site.profile, api_client=client)
    assert words.startswith("failed to create typed patch object (")
    assert words.endswith(".spec.nonsense: field not declared in schema")
    kind = site.path + "/.*"
    site.server.faults = [Fault(method="PATCH", path=kind, status=500, message=words)]
    with pytest.raises(LauncherError, match=r"^Kubernetes refused: failed to create typed patch"):
        site.submit()
    assert site.slept == []


# A runtime that is made just now.


@pytest.mark.parametrize("workload", ["TrainJob"])
def test_a_runtime_that_was_made_just_now_is_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.server.delete("torch-deploy-toolkit", kind="TrainingRuntime")
    with pytest.raises(
        LauncherError, match=r"kubectl apply -n default -k k8s/base/trainer.*training_runtime"
    ):
        site.submit()
    assert site.slept == [0.5, 1.0, 2.0, 4.0]
    site.slept.clear()

    def bring(pause_s: float) -> None:
        site.slept.append(pause_s)
        site.server.apply(runtime())

    site.launcher._cluster.connection.sleep = bring
    assert site.submit().status() == status(PENDING)
    assert site.slept == [0.5]


# Asking without doing.


@every_workload
def test_a_dry_run_tells_the_servers_words_and_makes_nothing(site: Site) -> None:
    documents = site.shown("t-dry")
    bad = site.shown("t-bad")[-1]
    bad["spec"]["nonsense"] = 1
    unknown = {"apiVersion": "x.io/v1", "kind": "Thing", "metadata": {"name": "x"}}
    site.server.deny[site.workload] = "not on Fridays"
    found = dry_run(
        [*documents[:-1], bad, unknown], site.profile, api_client=site.server.api_client()
    )
    assert [words for _, words in found[: len(documents) - 1]] == [""] * (len(documents) - 1)
    assert "nonsense" in found[-2][1] or "Fridays" in found[-2][1]
    assert found[-1] == (unknown, "the cluster knows no Thing (404 page not found)")
    site.server.deny.clear()
    client = site.server.api_client()
    assert dry_run(documents, site.profile, api_client=client) == [(d, "") for d in documents]
    assert site.jobs() == []
    assert site.server.objects_of("NetworkPolicy") == []
