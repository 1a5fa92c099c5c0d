"""The watch: it survives what a cluster does to it, and grows with the runs, not with time."""

import contextlib
import itertools
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.fakes.kubernetes import Fault
from tests.unit.kubernetes.site import PENDING, RUNNING, SUCCEEDED, Site, a_job, every_workload
from toolkit.errors import LauncherError
from toolkit.kubernetes import watch_states
from toolkit.kubernetes.client.connection import Connection
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.client.watcher import ObjectWatch
from toolkit.kubernetes.status import Change, changes_of, digest
from toolkit.kubernetes.workloads import KINDS
from toolkit.planning.pods import RUN_LABEL

digest_of_job = partial(digest, KINDS["Job"])


@pytest.fixture
def changes(site: Site) -> Iterator[Iterator[Change]]:
    """Yield the changes of all runs of a site."""
    found = changes_of(cluster_of(site), KINDS[site.workload], RUN_LABEL)
    yield found
    found.close()  # type: ignore[attr-defined]  # it is a generator


def cluster_of(site: Site) -> Cluster:
    """Return a client of the cluster with short pauses."""
    client = site.server.api_client()
    return Cluster(Connection(site.profile, api_client=client, sleep=lambda _: time.sleep(0.02)))


@a_job
def test_anybody_can_watch_a_namespace(site: Site) -> None:
    run = site.submit()
    client = site.server.api_client()
    (first, *_) = itertools.islice(watch_states(site.profile, "Job", api_client=client), 1)
    assert first == Change(name=run.name, state=PENDING)


def told(changes: Iterator[Change], name: str) -> Any:
    """Return the next state of a run."""
    return next(change.state for change in changes if change.name == name)


@every_workload
def test_every_change_of_every_run_is_told_by_one_connection(
    site: Site, changes: Iterator[Change]
) -> None:
    first = site.submit()
    assert told(changes, first.name) is PENDING
    second = site.submit()
    assert told(changes, second.name) is PENDING
    site.server.run(second.name)
    assert told(changes, second.name) is RUNNING
    if site.workload in ("TrainJob", "Job"):  # whose objects do not tell that they ran
        site.server.recreate(second.name)
        assert next(changes) == Change(name=second.name, state=RUNNING, reason="starts again")
    site.server.finish(first.name)
    assert told(changes, first.name) is SUCCEEDED
    site.server.delete(second.name)
    assert told(changes, second.name) is None
    asked = site.asked("GET", site.path)
    assert [bool(query.get("watch")) for query in asked] == [False, True]


@a_job
@pytest.mark.parametrize(
    "harm",
    [
        lambda server: server.expire(),
        lambda server: server.hang_up(),
        lambda server: (server.faults.append(Fault(method="GET", times=3)), server.hang_up()),
        lambda server: (
            server.faults.append(Fault(method="GET", status=429, retry_after="0", times=2)),
            server.hang_up(),
        ),
        lambda server: (
            server.faults.append(Fault(method="GET", status=503, times=2)),
            server.hang_up(),
        ),
        lambda server: (
            server.faults.append(Fault(method="GET", status=410, reason="Expired")),
            server.hang_up(),
        ),
    ],
    ids=["expired", "dropped", "refused", "busy", "away", "gone"],
)
def test_a_watch_loses_and_repeats_nothing(
    site: Site, changes: Iterator[Change], harm: Callable[[Any], object]
) -> None:
    run, other = site.submit(), site.submit()
    assert {next(changes).name, next(changes).name} == {run.name, other.name}
    site.server.run(run.name)
    assert next(changes) == Change(name=run.name, state=RUNNING)
    harm(site.server)
    site.server.finish(run.name)
    site.server.delete(other.name)
    rest = sorted([next(changes), next(changes)], key=lambda change: change.name != run.name)
    assert rest == [Change(name=run.name, state=SUCCEEDED), Change(name=other.name, state=None)]
    third = site.submit()
    assert next(changes) == Change(name=third.name, state=PENDING)
    watched = [query for query in site.asked("GET", site.path) if query.get("watch")]
    versions = [int(query["resourceVersion"]) for query in watched]
    assert versions[-1] > versions[0]


@a_job
def test_a_watch_outlives_a_server_that_is_away(site: Site) -> None:
    run = site.submit()
    watch = ObjectWatch(cluster_of(site), KINDS["Job"], RUN_LABEL, digest_of_job)
    watch.start()
    try:
        refused = pytest.raises(LauncherError, match="API server does not answer")
        with site.server.away(), refused:
            wait_for(watch, lambda: watch.look() is None)
        site.server.finish(run.name)

        def done() -> bool:
            try:
                found = watch.look()[run.name]
            except LauncherError:
                return False
            return any(c["type"] == "Complete" for c in found["status"].get("conditions", ()))

        wait_for(watch, done)
    finally:
        watch.close()


@a_job
def test_a_refusal_ends_the_watch_with_the_servers_words(
    site: Site, changes: Iterator[Change]
) -> None:
    site.server.forbid("jobs", "list")
    with pytest.raises(LauncherError, match="cannot list resource"):
        next(changes)


class Endless:
    """A response with many events about a few runs."""

    def __init__(self, events: int) -> None:
        self.events = events
        self.connection = None

    def stream(self, **_: object) -> Iterator[bytes]:
        padding = "x" * 500
        for number in range(self.events):
            kind = "Complete" if number % 2 else "Suspended"
            said = {"type": kind, "status": "True", "message": str(number)}
            metadata = {"name": f"run-{number % 50}", "resourceVersion": str(number)}
            thing = {
                "metadata": metadata | {"annotations": {"a": f"{padding}{number}"}},
                "status": {"conditions": [said]},
            }
            yield json.dumps({"type": "MODIFIED", "object": thing}).encode() + b"\n"


def test_memory_stays_flat_over_many_events() -> None:
    watch = ObjectWatch(Silent(), KINDS["Job"], RUN_LABEL, digest_of_job)  # type: ignore[arg-type]
    sizes = []
    tracemalloc.start()
    try:
        for number, _ in enumerate(watch._watch()):
            if number in (300, 1_500):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(watch.objects) == 50
    assert sizes[1] < sizes[0] + 200_000


class Silent:
    """A cluster that only answers watches."""

    def changes(self, *_: object) -> Any:
        return contextlib.nullcontext(Endless(1_501))


def wait_for(watch: ObjectWatch, promise: Callable[[], bool], tries: int = 200) -> None:
    for _ in range(tries):
        if promise():
            return
        watch.wait(0.1)
    raise AssertionError("it did not come")
