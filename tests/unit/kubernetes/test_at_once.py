"""The points of a large sweep are submitted several at a time, and all or none of them stay."""

import threading
from typing import Any

import pytest

from tests.conftest import Until
from tests.fakes.kubernetes import Fault
from tests.unit.kubernetes.site import PENDING, Site, a_job, status
from toolkit.errors import LauncherError

SWEEP: dict[str, Any] = {"sweep": {"grid": {"--lr": [str(number) for number in range(20)]}}}


@a_job
def test_a_point_does_not_wait_for_the_one_before(site: Site, until: Until) -> None:
    held = threading.Event()
    site.server.faults = [Fault(method="PATCH", path=".*/jobs/.*-0", status=200, held=held)]
    submitting = threading.Thread(target=lambda: site.submit(**SWEEP))
    submitting.start()
    until(lambda: len(site.jobs()) == 15, "the others of its batch are made")
    held.set()
    submitting.join()
    assert len(site.jobs()) == 20


@a_job
def test_a_refusal_late_in_a_sweep_takes_back_what_came_before(site: Site) -> None:
    site.server.faults = [
        Fault(method="PATCH", path=".*/jobs/.*-17", status=403, message="exceeded quota")
    ]
    with pytest.raises(LauncherError, match=r"^Kubernetes refused: exceeded quota$"):
        site.submit(**SWEEP)
    assert site.jobs() == [] and site.server.objects_of("NetworkPolicy") == []


@a_job
def test_answers_that_get_lost_make_no_point_twice(site: Site) -> None:
    site.server.faults = [
        Fault(method="PATCH", path=".*/jobs/.*", arrives=True, times=5),
        Fault(method="PATCH", path=".*/jobs/.*", times=5),
    ]
    run = site.submit(**SWEEP)
    assert sorted(site.jobs()) == sorted(f"{run.name}-{index}" for index in range(20))
    assert run.status() == status(PENDING, "20 PENDING")
