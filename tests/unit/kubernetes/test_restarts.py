"""What has interrupted a run that has succeeded: told by its pods, and kept when they are gone."""

import json
from typing import Any

import pytest

from tests.unit.kubernetes.site import SUCCEEDED, Site, every_workload, short, status
from tests.unit.kubernetes.test_states import pod
from toolkit.cli.summary import rows_of, summary_of
from toolkit.kubernetes.pods import seconds_of
from toolkit.kubernetes.restarts import restarts_of
from toolkit.runs.evidence.restarts import in_words

VERDICT = "torchrun ended with 1; failed: rank 1: ValueError: NaN; started again: 138\n"
KILLED = "[rank 1] ValueError: NaN\n" + VERDICT


def at(minute: int, second: int = 0) -> str:
    return f"2026-01-01T00:{minute:02}:{second:02}Z"


def made(index: int, minute: int, *, restarts: int = 0, attempt: str = "", **states: Any) -> Any:
    """Return a pod that was made at a minute."""
    found = pod(index, attempt=attempt, containerStatuses=[{"restartCount": restarts, **states}])
    found["metadata"]["creationTimestamp"] = at(minute)
    return found


def end(minute: int, *, code: int = 138, message: str = KILLED, began: int = 0) -> dict[str, Any]:
    ended = {"exitCode": code, "reason": "Error", "message": message, "finishedAt": at(minute)}
    return {"terminated": ended | {"startedAt": at(began)}}


def shown(*pods: Any) -> list[tuple[str, float, float]]:
    start = seconds_of(at(0))
    return [(one.why, one.time - start, one.away_s) for one in restarts_of(pods)]


DONE = end(30, code=0, message="", began=11)
WHY = "node-1: exit status 138: rank 1: ValueError: NaN"


def test_a_container_that_was_started_again_says_why_and_for_how_long_it_was_away() -> None:
    again = made(1, 0, restarts=1, state=DONE, lastState=end(10))
    assert shown(made(0, 0, state=DONE), again) == [(WHY, 600, 60)]
    assert in_words(restarts_of([again])).startswith(f"1 restart: {WHY} at ")


def test_a_pod_that_was_replaced_says_so() -> None:
    first, then = made(1, 0, state=end(10)), made(1, 12, state=DONE)
    taken = made(1, 0, state={})
    taken["status"] |= {"reason": "Evicted", "message": "disk pressure"}
    assert shown(then, first) == [(WHY, 600, 120)]
    assert shown(taken, then) == [("node-1: Evicted: disk pressure", 720, 0)]
    assert shown(made(1, 0), then) == [("node-1: ended without a trace", 720, 0)]


def test_pods_that_end_before_all_are_back_are_one_interruption() -> None:
    other = end(10, code=1, message="[rank 0] RuntimeError: Connection closed by peer\n")
    other["terminated"]["finishedAt"] = at(10, 30)
    late = {"terminated": DONE["terminated"] | {"startedAt": at(13)}}
    pods = [
        made(1, 0, restarts=1, state=DONE, lastState=end(10)),
        made(0, 0, restarts=1, state=late, lastState=other),
    ]
    assert shown(*pods) == [(WHY, 600, 180)]
    pods[1] = made(0, 0, restarts=1, state=late, lastState=end(12, code=1))
    assert [when for _, when, _ in shown(*pods)] == [600, 720]


def test_restarts_without_a_trace_count() -> None:
    unknown = "unknown, as its pods are gone"
    twice = made(1, 0, restarts=2, state=DONE, lastState=end(10))
    assert shown(twice) == [(unknown, 0, 0), (WHY, 600, 60)]
    assert shown(made(0, 9, attempt="1", state=DONE)) == [(unknown, 540, 0)]
    assert shown(made(0, 9, state=DONE)) == shown() == []


@every_workload
def test_status_and_list_tell_what_a_run_has_succeeded_after(site: Site) -> None:
    run = site.submit(resources={"nnodes": 2})
    site.server.run(run.name)
    site.server.restart(site.pod(run, 1), exit_code=138)
    site.server.run(run.name)
    site.server.finish(run.name)
    assert run.status() == status(SUCCEEDED)
    expected = f"1 restart: {short(site.workload, 1)}: exit status 138 at "
    (row,) = rows_of([run], brief=True)
    assert row["restarts"] == {"count": 1}
    asked = len(site.server.requests)
    site.server.delete(run.name, kind=site.workload)
    opened = site.open_launcher().open(run.record)
    for one in (run, opened):
        assert one.status().state is SUCCEEDED
        summary = summary_of(one)["restarts"]
        assert summary["summary"].startswith(expected)
        assert json.loads(json.dumps(summary))["count"] == 1
    requests = site.server.requests[asked:]
    assert not [path for _, path, _ in requests if path.endswith("/pods")], "read from its file"


@pytest.mark.parametrize("workload", ["Job"])
def test_what_a_run_has_succeeded_after_is_forgotten_when_it_is_submitted_again(
    site: Site,
) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.finish(run.name)
    assert (run.status().state, run.local.restarts(run.name)) == (SUCCEEDED, [])
    run.withdraw_end()
    assert run.local.restarts(run.name) is None
    (run.local.folder / f"restarts-{run.name}.json").write_text('[{"why": 7}]')
    assert run.local.restarts(run.name) is None
    assert run.count_restarts() == 0


def test_without_the_right_to_list_pods_nothing_is_told(server: Any, environ: Any) -> None:
    site = Site(server, environ, "Job")
    run = site.submit()
    site.server.run(run.name)
    site.server.finish(run.name)
    site.server.forbid("pods", "list")
    assert run.status() == status(SUCCEEDED)
    assert run.restarts() == ()
