"""The plan is submitted byte for byte as `render` shows it."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kubernetes import FakeKubernetes
from tests.support.rendered import manifest
from tests.unit.kubernetes.site import Site, every_workload, make_job, make_profile, runtime
from toolkit.errors import PlanError
from toolkit.job.kubernetes_options import Workload
from toolkit.job.spec import JobSpec
from toolkit.kubernetes.workloads import KINDS, objects_by_run
from toolkit.planning import plan
from toolkit.planning.kubernetes import KubernetesPlan
from toolkit.rendering import render

JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nodes": {"resources": {"nnodes": 4}},
    "elastic": {"resources": {"nnodes": {"min": 2, "max": 4}}},
    "payload": {"module": None, "script": "$TRAIN_RUN_DIR/function/worker.py"},
    "sweep": {"sweep": {"grid": {"env.A": ["x", "y", "z"]}}},
    "requeue": {"retries": {"requeue": 3}},
}
SITES: dict[str, dict[str, Any]] = {
    "plain": {},
    "service": {"service": "training"},
    "near": {"topology": {"key": "rack", "required": True}},
    "apart": {"one_pod_per_node": True, "host_network": True, "pod_security": "privileged"},
    "gang": {"gang_scheduler": "volcano"},
    "labelled-gang": {"gang_scheduler": "scheduler-plugins"},
    "queue": {"queue": "research"},
}


def planned(workload: Workload, job: str, site: str, run_name: str | None = None) -> KubernetesPlan:
    spec = JobSpec.model_validate({"name": "t", "image": "i:1"} | {"module": "train"} | JOBS[job])
    return plan(spec, make_profile(workload, **SITES[site]), run_name=run_name)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("job", JOBS)
@every_workload
def test_a_plan_that_is_named_is_the_plan_made_with_that_name(
    workload: Workload, job: str, site: str
) -> None:
    try:
        whole = planned(workload, job, site, "other-0102")
    except PlanError as error:
        # Gangs of a PyTorchJob alone, and elastic ones: with this name or that, it cannot be.
        with pytest.raises(PlanError, match=re.escape(str(error))):
            planned(workload, job, site)
        return
    assert planned(workload, job, site).named("other-0102") == whole
    assert planned(workload, job, site, "third").named("other-0102") == whole


def test_a_name_that_is_too_long_for_the_pods_is_refused() -> None:
    with pytest.raises(PlanError, match="more than 63; shorten"):
        plan(make_job(), make_profile("JobSet")).named("n" * 50)


@every_workload
def test_what_a_caller_has_changed_in_a_plan_arrives_as_render_shows_it(
    site: Site, server: FakeKubernetes
) -> None:
    made = plan(make_job(env={"A": "1"}), site.profile)
    changed = dataclasses.replace(made, env={**made.env, "ADDED": "2"}, image="another:1")
    run = site.launcher.submit(changed)
    with FakeKubernetes() as other:
        other.apply(runtime())
        other.apply(render(changed.named(run.name)))
        for kind in ("NetworkPolicy", "Service", site.workload):
            sent, rendered = objects(server, kind, run.name), objects(other, kind, run.name)
            assert sent == rendered
    made_of = server.job(run.name)
    assert shown(made_of) >= {("ADDED", "2"), ("A", "1")}
    assert values(made_of, "image") == {"another:1"}


@every_workload
def test_what_was_changed_is_there_when_the_run_is_submitted_again(
    site: Site, server: FakeKubernetes
) -> None:
    made = plan(make_job(env={"A": "1"}), site.profile)
    changed = dataclasses.replace(made, env={**made.env, "ADDED": "2"}, image="another:1")
    run = site.launcher.submit(changed)
    server.finish(run.name, succeeded=False)
    before = shown(server.job(run.name))
    site.open_launcher().resubmit(run)
    after = shown(server.job(run.name))
    assert {"another:1"} == values(server.job(run.name), "image")
    differing = {name for name, _ in before ^ after}
    assert differing == ({"TRAIN_START"} if site.workload == "PyTorchJob" else set())


def objects(server: FakeKubernetes, kind: str, name: str) -> Any:
    """Return the spec of an object, without what the server itself has put there."""
    try:
        spec = server.object(kind, name)["spec"]
    except LookupError:
        return None
    for patch in spec.get("runtimePatches", ()):
        del patch["time"]
    return spec


def shown(body: Any) -> set[tuple[str, str]]:
    """Return the variables of the containers of an object."""
    if isinstance(body, dict):
        own = {(body["name"], body["value"])} if {"name", "value"} <= body.keys() else set()
        return own.union(*map(shown, body.values()))
    return set().union(*map(shown, body)) if isinstance(body, list) else set()


def values(body: Any, key: str) -> set[str]:
    """Return all that a key stands for in an object."""
    if isinstance(body, dict):
        own = {body[key]} if isinstance(body.get(key), str) else set()
        return own.union(*(values(entry, key) for entry in body.values()))
    return set().union(*(values(item, key) for item in body)) if isinstance(body, list) else set()


def test_what_a_template_adds_after_the_workload_is_submitted(tmp_path: Path) -> None:
    folder = tmp_path / "kubernetes"
    folder.mkdir()
    (folder / "job.yaml.j2").write_text(
        '{% extends "toolkit/kubernetes/job.yaml.j2" %}\n{% block after %}\n---\n'
        "apiVersion: policy/v1\nkind: PodDisruptionBudget\n"
        "metadata: {name: {{ plan.run_name }}, namespace: {{ plan.namespace }}, "
        "labels: {{ plan.labels | yaml_flow }}}\nspec: {maxUnavailable: 0}\n{% endblock %}\n"
    )
    for job in ({}, {"sweep": {"grid": {"--lr": ["1", "2"]}}}):
        runs = objects_by_run(manifest(job, {"templates_dir": str(tmp_path)}, "Job"), KINDS["Job"])
        for run in runs:
            added = [one for one in run.companions if one["kind"] == "PodDisruptionBudget"]
            assert [one["metadata"]["name"] for one in added] == [run.name]
