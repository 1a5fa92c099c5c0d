"""What holds on every cluster: on the fake one, and on a real one (`make test-cluster`)."""

import threading
from typing import Any

import pytest

import toolkit
from tests.unit.kubernetes.live import NOWHERE, Live
from tests.unit.kubernetes.site import (
    CANCELLED,
    PENDING,
    RUNNING,
    SUCCEEDED,
    a_job,
    every_workload,
    short,
)
from toolkit.errors import LauncherError, RunNotFound
from toolkit.kubernetes import dry_run, watch_states
from toolkit.planning import plan
from toolkit.rendering import render
from toolkit.text.yaml_reader import documents_of

pytestmark = pytest.mark.any_cluster

SAYS = 'echo "hello from $RANK"; sleep 1; echo "good-bye from $RANK"'


def shown(live: Live, name: str, **job: Any) -> list[Any]:
    """Return the objects that `render` shows of a job."""
    return documents_of(render(plan(live.job(**job), live.profile, run_name=name)))


# What is made.


@every_workload
def test_what_is_made_is_what_render_shows_and_the_rest_goes_with_it(live: Live) -> None:
    run = live.submit(**NOWHERE)
    expected = shown(live, run.name, **NOWHERE)
    assert expected[-1]["kind"] == live.workload
    owner = live.cluster.job(run.name, kind=live.workload)["metadata"]["uid"]
    names = {document["kind"]: document["metadata"]["name"] for document in expected}
    assert names["NetworkPolicy"] == f"{run.name}-{live.workload.lower()}"
    for document in expected:
        (made,) = [
            one["metadata"]
            for one in live.cluster.objects(document["kind"])
            if one["metadata"]["name"] == document["metadata"]["name"]
        ]
        assert made["namespace"] == document["metadata"]["namespace"]
        assert made["labels"].items() >= document["metadata"]["labels"].items()
        if document["kind"] != live.workload:
            assert [reference["uid"] for reference in made["ownerReferences"]] == [owner]
    live.cluster.delete(run.name, kind=live.workload)
    live.until(
        lambda: not any(name in live.names(kind) for kind, name in names.items()), "all are gone"
    )


@every_workload
def test_what_is_submitted_twice_under_a_name_is_one_run(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{live.cluster.tag}-same-{live.workload.lower()}"
    monkeypatch.setattr("toolkit.kubernetes.launcher.new_run_name", lambda job: name)
    live.submit(**NOWHERE)
    before = live.cluster.job(name, kind=live.workload)["metadata"]
    live.submit(**NOWHERE)
    after = live.cluster.job(name, kind=live.workload)["metadata"]
    assert (after["uid"], after.get("generation")) == (before["uid"], before.get("generation"))
    with pytest.raises(LauncherError, match=f'"{name}" already exists, and is not this run'):
        live.submit(args=["other"], **NOWHERE)
    assert live.cluster.job(name, kind=live.workload)["metadata"]["uid"] == before["uid"]


@a_job
def test_two_submits_are_two_runs_that_any_process_can_open(live: Live) -> None:
    first, second = live.submit(**NOWHERE), live.submit(**NOWHERE)
    assert {first.name, second.name} <= set(live.names())
    assert list(live.runs()) == [first.name, second.name]
    assert first.uri == f"k8s://{live.cluster.namespace}/{first.name}"
    again = toolkit.open_run(first.uri)
    assert (again.name, again.status().state) == (first.name, PENDING)


# From the start to the end.


@pytest.mark.slow
@every_workload
def test_a_run_is_followed_from_its_start_to_its_success(live: Live) -> None:
    states: list[Any] = []
    changes = watch_states(live.profile, live.workload)

    def watch() -> None:
        for change in changes:
            if change.name == run.name:
                states.append(change.state)
                if change.state is SUCCEEDED:
                    return

    run = live.submit(command=["sh", "-c", SAYS], resources={"nnodes": 2})
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    lines = list(run.logs(follow=True))
    nodes = [short(live.workload, index) for index in (0, 1)]
    for words in ("hello", "good-bye"):
        said = sorted(line for line in lines if f"{words} from" in line)
        assert len(said) == 2, lines
        for rank in (0, 1):
            assert any(line.endswith(f"[rank {rank}] {words} from {rank}") for line in said), said
        assert [line.partition(" ")[0] for line in said] == [f"[{node}]" for node in nodes], said
    assert run.wait(live.cluster.patience_s) == toolkit.RunStatus(state=SUCCEEDED, reason="")
    assert toolkit.statuses([run]) == [run.status()]
    watcher.join(live.cluster.patience_s)
    assert list(dict.fromkeys(s for s in states if s is not PENDING)) == [RUNNING, SUCCEEDED]
    assert list(live.runs()) == [run.name]
    assert sorted(run.logs(grep="hello")) == sorted(line for line in lines if "hello" in line)


# Why a run waits.


@every_workload
def test_what_no_node_has_room_for_is_told_with_what_is_short(live: Live) -> None:
    run = live.submit(**NOWHERE)
    found = live.until_reason(run, "Unschedulable")
    expected = f"{short(live.workload)}: Unschedulable: no node has enough cpu"
    assert (found.state, found.reason.startswith(expected)) == (PENDING, True), found
    assert toolkit.statuses([run])[0].state is PENDING


@every_workload
def test_an_image_that_cannot_be_pulled_is_told(live: Live) -> None:
    run = live.submit(image=NOWHERE["image"])
    found = live.until_reason(run, "Pull")
    pod = short(live.workload)
    # The first second has only the event "Failed: Error: ErrImagePull".
    expected = tuple(f"{pod}: {word}" for word in ("ErrImagePull", "ImagePullBackOff", "Failed"))
    assert (found.state, found.reason.startswith(expected)) == (PENDING, True), found


@a_job
def test_a_secret_that_is_not_there_is_told(live: Live) -> None:
    missing = f"{live.cluster.tag}-missing"
    run = live.submit(secrets={"TOKEN": {"secret": missing, "key": "token"}})
    found = live.until_reason(run, missing)
    assert found.state is PENDING
    assert found.reason.startswith("node-0: CreateContainerConfigError"), found


@every_workload
def test_pods_that_pod_security_refuses_are_told(live: Live) -> None:
    if not live.cluster.refuses_root():
        pytest.skip('the namespace does not enforce Pod Security "restricted", as far as we see')
    loose = Live(live.cluster, live.workload, pod_security="privileged", run_as_user=0)
    found = loose.until_reason(loose.submit(image=NOWHERE["image"]), "violates PodSecurity")
    assert (found.state, found.reason.startswith("FailedCreate")) == (PENDING, True), found


@a_job
def test_a_queue_that_is_not_there_is_told(live: Live) -> None:
    if why := live.cluster.lacks("Workload"):
        pytest.skip(why)
    queue = f"{live.cluster.tag}-none"
    queued = Live(live.cluster, live.workload, queue=queue)
    found = queued.until_reason(queued.submit(**NOWHERE), "doesn't exist")
    assert found.reason.startswith(f"queue '{queue}': unknown queue: LocalQueue {queue}"), found
    assert found.state is PENDING


# Stopping, and going on.


@every_workload
def test_a_cancelled_run_leaves_nothing_and_goes_on_when_it_is_told_to(live: Live) -> None:
    run = live.submit(**NOWHERE)
    before = live.cluster.job(run.name, kind=live.workload)["metadata"]["uid"]
    with pytest.raises(LauncherError, match="has not ended: PENDING"):
        toolkit.resubmit(run)
    run.cancel()
    assert live.ended(run).state is CANCELLED
    live.until(lambda: not live.cluster.pods(run.name), "its pods are gone")
    assert toolkit.open_run(run.uri).wait(timeout_s=0).state is CANCELLED
    run.cancel()
    again = toolkit.resubmit(run)
    assert (again.uri, again.status().state) == (run.uri, PENDING)
    assert live.cluster.job(run.name, kind=live.workload)["metadata"]["uid"] != before


@every_workload
def test_a_run_that_somebody_else_deleted_is_lost_and_not_waited_for(live: Live) -> None:
    run = live.submit(**NOWHERE)
    live.cluster.delete(run.name, kind=live.workload)
    found = live.until_reason(run, "it was deleted")
    assert found.lost
    assert toolkit.wait([run], live.cluster.patience_s) == [found]
    with pytest.raises(RunNotFound, match=f"the {live.workload} is gone"):
        run.wait(live.cluster.patience_s)


# Asking without doing.


@every_workload
def test_a_dry_run_tells_the_servers_words_and_makes_nothing(live: Live) -> None:
    name = f"{live.cluster.tag}-dry"
    documents = shown(live, name, **NOWHERE)
    bad = shown(live, name, **NOWHERE)[-1]
    bad["spec"]["nonsense"] = 1
    unknown = {"apiVersion": "x.io/v1", "kind": "Thing", "metadata": {"name": "x"}}
    assert dry_run(documents, live.profile) == [(document, "") for document in documents]
    (_, refused), (_, not_known) = dry_run([bad, unknown], live.profile)
    assert "nonsense" in refused
    assert not_known.startswith("the cluster knows no Thing")
    for document in documents:
        assert name not in live.names(document["kind"])


@every_workload
def test_what_check_finds_nothing_wrong_with_the_server_takes(live: Live, tmp_path: Any) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"name: {live.cluster.tag}\nmodule: train\nimage: {NOWHERE['image']}\n")
    assert toolkit.check(file, to=[live.profile], server=True) == []
    assert live.cluster.tag not in live.names()
