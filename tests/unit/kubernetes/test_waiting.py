"""Waiting for many runs costs as much as waiting for one: one list and one watch."""

import threading
from typing import Any

import pytest

from tests.conftest import Until
from tests.unit.kubernetes.site import (
    PENDING,
    SUCCEEDED,
    Site,
    a_job,
    a_jobset_and_slowly_others,
    status,
)
from toolkit.errors import RunNotFound
from toolkit.kubernetes import KubernetesRun

SWEEP: dict[str, Any] = {"sweep": {"grid": {"--lr": ["0.1", "0.2", "0.3"]}}}


class Waiting(threading.Thread):
    """A client that waits for a run."""

    def __init__(self, run: KubernetesRun) -> None:
        super().__init__()
        self.run_ = run
        self.found: object = None
        self.start()

    def run(self) -> None:
        try:
            self.found = self.run_.wait(180)
        except RunNotFound as error:
            self.found = error


def asked(site: Site) -> list[str]:
    """Return the requests about workloads."""
    return ["watch" if query.get("watch") else "list" for query in site.asked("GET", site.path)]


@a_jobset_and_slowly_others
def test_waiting_for_a_run_is_one_list_and_one_watch(site: Site, until: Until) -> None:
    run = site.submit()
    site.server.requests.clear()
    waiting = Waiting(run)
    until(lambda: site.server.watches, "it watches")
    site.server.run(run.name)
    site.server.finish(run.name)
    waiting.join()
    assert waiting.found == status(SUCCEEDED)
    assert asked(site) == ["list", "watch"]
    others = [path for _, path, _ in site.server.requests if not path.endswith(site.path)]
    assert others == ["/api/v1/namespaces/default/pods"], "what has interrupted it"
    until(lambda: not site.server.watches, "the watch is closed")


@a_job
def test_waiting_for_a_sweep_is_one_list_and_one_watch(site: Site, until: Until) -> None:
    run = site.submit(**SWEEP)
    site.server.requests.clear()
    waiting = Waiting(run)
    until(lambda: site.server.watches, "it watches")
    for index in range(3):
        site.server.finish(f"{run.name}-{index}")
    waiting.join()
    assert waiting.found == status(SUCCEEDED, "3 SUCCEEDED")
    assert asked(site) == ["list", "watch"]


@a_job
def test_who_waits_learns_that_the_run_was_deleted(site: Site, until: Until) -> None:
    run = site.submit()
    waiting = Waiting(run)
    until(lambda: site.server.watches, "it watches")
    site.server.delete(run.name)
    waiting.join()
    assert "it was deleted" in str(waiting.found)


@a_job
def test_where_nobody_may_watch_the_object_is_asked_for(site: Site, until: Until) -> None:
    run = site.submit()
    site.server.forbid("jobs", "list", "watch")
    site.server.requests.clear()
    waiting = Waiting(run)
    until(lambda: site.asked("GET", f"{site.path}/{run.name}"), "it asks")
    site.server.finish(run.name)
    waiting.join()
    assert waiting.found == status(SUCCEEDED)


@pytest.mark.parametrize(
    ("workload", "explained", "said"),
    [("Job", True, "node-0: ErrImagePull: no such image"), ("Job", False, "")],
)
def test_why_a_run_waits_is_asked_where_somebody_looks(
    site: Site, until: Until, explained: bool, said: str
) -> None:
    run = site.submit()
    waits = {"reason": "ErrImagePull", "message": "no such image"}
    site.server.pod_status(site.pod(run), waiting=waits)
    with run.watching([run], explained=explained):
        assert run.status() == status(PENDING, said)
    assert run.status().reason == "node-0: ErrImagePull: no such image"
