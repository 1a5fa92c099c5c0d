"""The lines of all pods of a run on Kubernetes, merged."""

import threading
from collections.abc import Iterator

import pytest

from tests.fakes.kubernetes import Fault
from tests.unit.kubernetes.site import Site, a_job, every_workload, short
from toolkit.errors import InputError, LauncherError
from toolkit.kubernetes.logs import Round, read_lines
from toolkit.kubernetes.workloads import Object
from toolkit.runs.records.log_reader import LogView


@every_workload
def test_the_lines_of_one_pod_come_as_they_are(site: Site) -> None:
    run = site.submit()
    assert list(run.logs()) == []
    site.server.run(run.name)
    lines = ["", "  two", "2026-01-01T00:00:00Z x", "caf\xe9 \u2028 \U0001f600", "tail\r"]
    site.server.log(site.pod(run), *lines)
    assert list(run.logs()) == lines


@every_workload
def test_the_lines_of_many_pods_tell_their_pod_in_order(site: Site) -> None:
    run = site.submit(resources={"nnodes": 11})
    site.server.run(run.name)
    for index in (10, 2, 0):
        site.server.log(site.pod(run, index), f"line {index}")
    assert list(run.logs()) == [f"[{short(site.workload, i)}] line {i}" for i in (0, 2, 10)]


@every_workload
def test_lines_of_certain_ranks_are_found_in_all_pods(site: Site) -> None:
    run = site.submit(resources={"nnodes": 2})
    site.server.run(run.name)
    site.server.log(site.pod(run, 0), "torchrun says", "[rank 0] a", "[rank 1] b")
    site.server.log(site.pod(run, 1), "[rank 2] c", "[rank 1] x", "[rank 12] d")
    node = [short(site.workload, i) for i in (0, 1)]
    assert list(run.logs(ranks=[0, 2])) == [f"[{node[0]}] [rank 0] a", f"[{node[1]}] [rank 2] c"]
    site.server.finish(run.name)
    assert sorted(run.logs(follow=True, ranks=[1], grep="b$")) == [f"[{node[0]}] [rank 1] b"]


@every_workload
def test_output_that_is_gone_with_its_pod_is_named(site: Site) -> None:
    """The operator of a PyTorchJob deletes the pods that still run when one has ended the run."""
    run = site.submit(resources={"nnodes": 2})
    site.server.run(run.name)
    site.server.finish(run.name, succeeded=False)
    assert run.lost_output() == ""
    site.server.delete(site.pod(run, 0), kind="Pod")
    assert run.lost_output() == (
        f"the output of {short(site.workload, 0)} is gone with its pod; what the ranks printed is "
        "in the run directory, logs/attempt-N/POD"
    )


@a_job
def test_a_run_prints_the_rank_before_each_line(site: Site) -> None:
    run = site.submit()
    (container,) = site.server.pods(run.name)[0]["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[rank ${rank}] "
    assert "--tee=3" in container["args"]


@every_workload
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


@pytest.mark.parametrize("workload", ["TrainJob", "JobSet"])
def test_following_goes_over_to_the_pods_of_a_gang_restart(site: Site) -> None:
    run = site.submit(resources={"nnodes": 2})
    lines = run.logs(follow=True)
    site.server.run(run.name)
    site.server.log(site.pod(run), "one")
    assert next(lines) == "[node-0] one"
    site.server.recreate(run.name)
    site.server.run(run.name)
    site.server.log(site.pod(run, 1), "two")
    assert next(lines) == "[node-1] two"
    site.server.finish(run.name)
    assert list(lines) == []


@pytest.mark.parametrize("workload", ["TrainJob", "JobSet"])
def test_an_attempt_is_told_by_its_pods(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    lines = run.logs(follow=True, attempt=0)
    site.server.log(site.pod(run), "first")
    assert next(lines) == "first"
    site.server.recreate(run.name)
    site.server.run(run.name)
    site.server.log(site.pod(run), "second")
    assert list(lines) == []
    assert list(run.logs(attempt=1)) == ["second"]
    with pytest.raises(InputError, match=r"--attempt 0: the pods are of attempt 1; .*logs/attempt"):
        list(run.logs(attempt=0))


@pytest.mark.parametrize("workload", ["PyTorchJob", "Job"])
def test_where_nothing_counts_attempts_a_later_one_is_refused(site: Site) -> None:
    run = site.submit()
    with pytest.raises(LauncherError, match=f"the attempts of a {site.workload}; all are 0"):
        run.logs(attempt=1)
    assert list(run.logs(attempt=0)) == []
    assert run.failure() is None


@a_job
def test_the_lines_before_a_restart_are_shown_too(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.log(site.pod(run), "first")
    site.server.restart(site.pod(run))
    site.server.log(site.pod(run), "second")
    assert list(run.logs()) == ["first", "second"]


@a_job
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


@a_job
def test_following_outlives_a_server_that_is_away(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.log(site.pod(run), "a")
    lines = run.logs(follow=True)
    assert next(lines) == "a"
    site.server.faults = [Fault(method="GET", path=".*/(pods|jobs/.*)", status=503, times=2)]
    site.server.finish(run.name)
    assert list(lines) == []


@a_job
def test_a_start_that_ends_while_the_one_before_it_is_read_is_shown_too(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.log(site.pod(run), "one")
    site.server.restart(site.pod(run))
    site.server.log(site.pod(run), "two")
    held = threading.Event()
    site.server.faults = [Fault(path=".*/log", query="previous", held=held)]

    class Seen(list[Object]):
        def __iter__(self) -> Iterator[Object]:
            yield from super().__iter__()
            if ended:
                held.set()

    ended: list[bool] = []

    def look() -> Round:
        if site.server.faults[0].times == 0:
            if not ended:
                site.server.finish(run.name)
            ended.append(True)
        return Round(pods=Seen(run.cluster.pods(run.pod_selector)), ended=bool(ended))

    lines = read_lines(run.cluster, run.kind, LogView(follow=True), look, lambda _: "")
    assert list(lines) == ["one", "two"]


@a_job
def test_following_may_be_left_at_any_time(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.log(site.pod(run), "a")
    lines = run.logs(follow=True)
    assert next(lines) == "a"
    lines.close()  # type: ignore[attr-defined]  # the promise is an iterator; this one is a generator


@a_job
@pytest.mark.parametrize("follow", [False, True])
def test_logs_that_may_not_be_read_are_an_error(site: Site, follow: bool) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.faults = [Fault(method="GET", path=".*/log", status=403, message="no", times=9)]
    with pytest.raises(LauncherError, match="Kubernetes refused: no"):
        list(run.logs(follow=follow))


@a_job
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
    shown = [f"[node-1] {line}" for line in (*trace[:2], f"{trace[2]}.Error: real")]
    assert sorted(run.logs(follow=follow)) == sorted(["[node-0] before", "[node-1] before", *shown])
    assert list(run.logs(follow=follow, grep="real$")) == shown[2:]
