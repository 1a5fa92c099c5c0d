"""Sweeps on Kubernetes: an object per point, and one run of all of them."""

from typing import Any

import pytest

import toolkit
from tests.fakes.kubernetes import Fault
from tests.support.told_operation import told_operation
from tests.unit.kubernetes.site import (
    CANCELLED,
    PENDING,
    RUNNING,
    SUCCEEDED,
    Site,
    a_job,
    every_workload,
    status,
)
from toolkit.errors import LauncherError, RunNotFound

SWEEP: dict[str, Any] = {"sweep": {"grid": {"--lr": ["0.1", "0.2", "0.3"]}}}


@every_workload
def test_each_point_is_an_object_with_the_label_of_the_sweep(site: Site) -> None:
    run = site.submit(**SWEEP)
    names = [f"{run.name}-{index}" for index in range(3)]
    assert sorted(site.jobs()) == names
    for name in names:
        labels = site.server.job(name, kind=site.workload)["metadata"]["labels"]
        assert labels["torch-deploy-toolkit/sweep"] == run.name
        assert labels["torch-deploy-toolkit/run"] == name
    assert [dict(point.settings) for point in run.points] == [
        {"--lr": "0.1"},
        {"--lr": "0.2"},
        {"--lr": "0.3"},
    ]
    assert run.status() == status(PENDING, "3 PENDING")


@every_workload
def test_all_points_are_told_by_one_list(site: Site) -> None:
    run = site.submit(**SWEEP)
    site.server.run(f"{run.name}-1")
    site.server.finish(f"{run.name}-2")
    site.server.requests.clear()
    assert [one.state for one in run.statuses()] == [PENDING, RUNNING, SUCCEEDED]
    assert len(site.asked("GET", site.path)) == 1
    assert len(site.server.requests) <= 5  # and those of pods and events
    assert toolkit.statuses([run]) == [status(RUNNING, "1 PENDING, 1 RUNNING, 1 SUCCEEDED")]


@a_job
def test_a_point_is_a_run_of_its_own_in_another_process_too(site: Site) -> None:
    run = site.open_launcher().open(site.submit(**SWEEP).record)
    site.server.finish(f"{run.name}-1")
    point = run.point("1")
    assert (point.uri, point.status()) == (f"{run.uri}_1", status(SUCCEEDED))
    assert run.point(point.name.rpartition("/")[2]).uri == point.uri
    with pytest.raises(RunNotFound, match="it has 0 to 2"):
        run.point("7")


@a_job
def test_the_lines_of_points_tell_their_point(site: Site) -> None:
    run = site.submit(**SWEEP)
    for index, name in ((2, "0002-lr=0.3"), (0, "0000-lr=0.1")):
        assert run.points[index].name == f"{run.name}/{name}"
        site.server.run(f"{run.name}-{index}")
        (pod,) = site.server.pods(f"{run.name}-{index}")
        site.server.log(pod["metadata"]["name"], f"[rank 0] of {index}")
    expected = ["[0000-lr=0.1] [rank 0] of 0", "[0002-lr=0.3] [rank 0] of 2"]
    assert list(run.logs()) == expected
    for index in range(3):
        site.server.finish(f"{run.name}-{index}")
    assert sorted(run.logs(follow=True)) == expected
    assert list(run.points[2].logs()) == ["[rank 0] of 2"]


@a_job
def test_a_sweep_is_cancelled_and_what_was_not_done_goes_on(site: Site) -> None:
    run = site.submit(**SWEEP)
    site.server.finish(f"{run.name}-0")
    site.server.finish(f"{run.name}-1", succeeded=False)
    with pytest.raises(LauncherError, match="1 of 3 points have not ended"):
        site.launcher.resubmit(run)
    run.cancel()
    assert run.statuses()[2] == status(CANCELLED, "by `toolkit cancel`")
    kept = site.server.job(f"{run.name}-0")["metadata"]["uid"]
    site.launcher.resubmit(run)
    assert [one.state for one in run.statuses()] == [SUCCEEDED, PENDING, PENDING]
    assert site.server.job(f"{run.name}-0")["metadata"]["uid"] == kept


@a_job
def test_a_sweep_whose_last_point_is_refused_leaves_none(site: Site) -> None:
    site.server.faults = [
        Fault(method="PATCH", path=".*/jobs/.*-2", status=403, message="exceeded quota")
    ]
    with pytest.raises(LauncherError, match="exceeded quota"):
        site.submit(**SWEEP)
    assert site.jobs() == []
    assert site.server.objects_of("NetworkPolicy") == []


@a_job
def test_a_sweep_of_many_points_reports_how_many_are_submitted_and_deleted(site: Site) -> None:
    with told_operation() as told:
        site.submit(**SWEEP)
        assert told == [], "it takes no time"
        run = site.submit(sweep={"grid": {"--lr": [f"0.{n}" for n in range(1, 18)]}})
    assert told[0] == ("submitting 17 runs", 0, None, "")
    assert told[1:] == [("submitting 17 runs", n, 17, f"{n} of 17") for n in range(1, 18)]
    for index in range(17):
        site.server.finish(f"{run.name}-{index}", succeeded=False)
    with told_operation() as told:
        site.launcher.resubmit(run)
    what = "deleting the objects of 17 ended runs"
    assert told[1:18] == [(what, n, 17, f"{n} of 17") for n in range(17)]
    assert told[-1] == ("submitting 17 runs", 17, 17, "17 of 17")
