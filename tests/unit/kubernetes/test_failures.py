"""What failed first in a run on Kubernetes: as on Slurm, by what the pods have printed."""

import re
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import toolkit
from tests.conftest import TOOLKIT
from tests.fakes.kubernetes import FakeKubernetes, Fault
from tests.unit.kubernetes.site import Site, a_job, every_workload, short
from toolkit.cli.summary import summary_of
from toolkit.errors import LauncherError
from toolkit.kubernetes import KubernetesRun
from toolkit.runs.evidence.failure import Failure

VERDICT = "torchrun ended with 1; failed: killed; started again: 138"
STOPPED = "torchrun ended with 1; preempted: stopped from outside; started again: 138"
TRACE = (
    "Traceback (most recent call last):",
    '  File "/app/train.py", line 7, in <module>',
    "    main()",
    "ValueError: sample 7",
)
LOST = (
    "Traceback (most recent call last):",
    '  File "/app/train.py", line 9, in <module>',
    "RuntimeError: Connection closed by peer [10.0.0.7]:44198",
)


def of_rank(rank: int, *lines: str) -> list[str]:
    return [f"[rank {rank}] {line}" for line in lines]


def report(
    rank: int, local_rank: int, *, exitcode: int = 1, told: str = "", time: datetime | None = None
) -> list[str]:
    """Return how torchrun ends whose rank has failed."""
    now = (time or datetime.now()).strftime("%Y-%m-%d_%H:%M:%S")
    file = "/runs/x/logs/attempt-0/t-0/id/attempt_0/0/error.json" if told else "<N/A>"
    shown = told.replace("\n", "\n  ") or "To enable traceback see: https://pytorch.org/"
    text = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "------------------------------------------------------------\n"
        "Root Cause (first observed failure):\n[0]:\n"
        f"  time      : {now}\n  host      : t-0\n  rank      : {rank} (local_rank: {local_rank})\n"
        f"  exitcode  : {exitcode} (pid: 7)\n  error_file: {file}\n  traceback : {shown}\n"
        "============================================================"
    )
    return ["Traceback (most recent call last):", "    run(args)", *text.split("\n")]


def printed(site: Site, run: KubernetesRun, index: int, *lines: str) -> None:
    site.server.log(site.pod(run, index), *lines)


def failure_of(run: KubernetesRun, attempt: int | None = None) -> Failure:
    found = run.failure(attempt=attempt)
    assert found is not None
    return found


def told(failure: Failure) -> tuple[object, ...]:
    return failure.kind, failure.rank, failure.local_rank, failure.node, failure.message


@every_workload
def test_the_rank_that_failed_is_told_before_those_that_have_lost_it(site: Site) -> None:
    run = site.submit(resources={"nnodes": 2, "nproc_per_node": 2})
    site.server.run(run.name)
    printed(site, run, 0, *of_rank(1, *LOST), *report(1, 1), VERDICT)
    printed(site, run, 1, *of_rank(3, "step 1", *TRACE), *of_rank(2, *LOST), *report(3, 1), VERDICT)
    assert run.failure() is None, "the pods run"
    site.server.finish(run.name, succeeded=False, exit_code=42)
    found = failure_of(run)
    node = short(site.workload, 1)
    assert told(found) == ("exception", 3, 1, node, "ValueError: sample 7")
    assert (found.traceback, found.attempt, found.restart) == (TRACE, 0, 0)
    assert abs(found.time - datetime.now().timestamp()) < 600
    first, *rest = found.lines()
    assert first.endswith(f": rank 3 on {node}: ValueError: sample 7")
    assert rest == list(TRACE)


@a_job
def test_where_nothing_failed_nothing_is_told(site: Site) -> None:
    run = site.submit()
    assert run.failure() is None
    site.server.run(run.name)
    printed(site, run, 0, *of_rank(0, *TRACE))  # which it has caught
    site.server.finish(run.name)
    assert run.failure() is None
    stopped = site.submit()
    site.server.run(stopped.name)
    printed(site, stopped, 0, *report(0, 0, exitcode=-15), STOPPED)
    site.server.finish(stopped.name, succeeded=False, exit_code=138)
    assert stopped.failure() is None
    stopped.cancel()
    site.server.delete(run.name)
    assert run.failure() is None, "it is gone"


@a_job
def test_the_words_of_an_error_file_count_before_what_was_printed(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    words = "TypeError: no batch\nin layer 3"
    printed(site, run, 0, *of_rank(0, *TRACE), *report(0, 0, told=words), VERDICT)
    site.server.finish(run.name, succeeded=False, exit_code=42)
    found = failure_of(run)
    assert (found.message, found.traceback) == (words, TRACE)
    assert str(found) == "rank 0 on node-0: TypeError: no batch"


@a_job
@pytest.mark.parametrize("hours", [-7, 0, 9])
def test_the_clock_of_a_pod_may_be_in_another_time_zone(site: Site, hours: int) -> None:
    run = site.submit()
    site.server.run(run.name)
    there = datetime.now() + timedelta(hours=hours)
    printed(site, run, 0, *report(0, 0, exitcode=-9, time=there), VERDICT)
    site.server.finish(run.name, succeeded=False, exit_code=42)
    found = failure_of(run)
    assert told(found) == ("signal", 0, 0, "node-0", "killed by SIGKILL")
    assert abs(found.time - datetime.now().timestamp()) < 600


@a_job
def test_starts_before_the_last_one_are_told_as_earlier_failures(site: Site) -> None:
    run = site.submit(resources={"nproc_per_node": 2})
    site.server.run(run.name)
    noticed = (
        "E1122 07:17:10.189000 8 torch/x/api.py:1002] failed (exitcode: {}) local_rank: 1 (pid"
    )
    printed(site, run, 0, *of_rank(1, *TRACE), noticed.format(1))
    printed(site, run, 0, *of_rank(0, "again"), noticed.format(-9))
    last = ("Traceback (most recent call last):", "KeyError: 'x'")
    printed(site, run, 0, *of_rank(0, "again"), noticed.format(1), *of_rank(1, *last))
    printed(site, run, 0, *report(1, 1), VERDICT)
    site.server.finish(run.name, succeeded=False, exit_code=42)
    found = failure_of(run)
    assert (found.restart, found.message) == (2, "KeyError: 'x'")
    assert [told(one)[:2] + told(one)[4:] for one in found.earlier] == [
        ("exception", 1, "ValueError: sample 7"),
        ("signal", 1, "killed by SIGKILL"),
    ]
    assert [one.restart for one in found.earlier] == [0, 1]


@a_job
def test_a_log_that_is_not_for_us_is_replaced_by_its_end(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    said = "\n".join([*of_rank(0, *TRACE), *report(0, 0), VERDICT])
    site.server.forbid("pods/log", "get")
    site.server.finish(run.name, succeeded=False, exit_code=42, last_words=said)
    assert told(failure_of(run)) == ("exception", 0, 0, "node-0", "ValueError: sample 7")
    assert failure_of(run).traceback == TRACE


@a_job
def test_where_the_pod_is_gone_what_the_object_says_of_it_counts(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    pod = site.pod(run)
    said = f"Container node for pod default/{pod} failed with exit code 42 matching FailJob rule"
    site.server.finish(run.name, succeeded=False, exit_code=42, message=said)
    site.server.delete(pod, kind="Pod")
    found = failure_of(run)
    assert told(found)[:4] == ("exit", None, None, "node-0")
    assert str(found) == f"node-0: exit status 42; its pod is gone: {said}"


@every_workload
def test_a_pod_that_ran_out_of_memory_is_told_without_a_word_of_it(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.finish(run.name, succeeded=False, reason="OOMKilled", exit_code=137)
    node = short(site.workload)
    assert told(failure_of(run)) == (
        *("signal", None, None, node),
        "OOMKilled: the pod needs more memory",
    )


@a_job
def test_a_program_that_did_not_start_is_told_by_what_was_said_last(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    end = "torchrun ended with 127; fatal: exit status 127; not started again: 42"
    printed(site, run, 0, "entrypoint: 40: torchrun: not found", end)
    site.server.finish(run.name, succeeded=False, exit_code=42)
    assert str(failure_of(run)) == (
        f"node-0: exit status 42: entrypoint: 40: torchrun: not found; {end}"
    )


@a_job
def test_a_question_that_fails_once_is_asked_again_and_silence_is_no_answer(site: Site) -> None:
    """A server that is away must not read as "no rank failed"."""
    run = site.submit()
    site.server.run(run.name)
    printed(site, run, 0, *of_rank(0, *TRACE), *report(0, 0), VERDICT)
    site.server.finish(run.name, succeeded=False, exit_code=42)
    for path in (r"/jobs/[\w-]+$", "/pods$", "/log$"):
        site.server.faults = [Fault(method="GET", path=".*" + path, status=503)]
        assert told(failure_of(run))[-1] == "ValueError: sample 7", path
        assert [fault.times for fault in site.server.faults] == [0], path
    site.server.faults = [Fault(method="GET", path=".*/log$", status=503, times=99)]
    with pytest.raises(LauncherError, match="earliest convenience"):
        run.failure()
    assert "earliest convenience" in summary_of(run)["failure"]["summary"]
    site.server.faults = []
    with site.server.away(), pytest.raises(LauncherError):
        run.failure()


@pytest.mark.parametrize("workload", ["JobSet"])
def test_an_attempt_whose_pods_are_gone_tells_nothing(site: Site) -> None:
    run = site.submit()
    site.server.run(run.name)
    site.server.recreate(run.name)
    site.server.run(run.name)
    printed(site, run, 0, *of_rank(0, *TRACE), *report(0, 0), VERDICT)
    site.server.finish(run.name, succeeded=False, exit_code=42)
    assert failure_of(run).attempt == failure_of(run, attempt=1).attempt == 1
    assert run.failure(attempt=0) is None


@a_job
def test_secrets_are_left_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run = site.submit()
    site.server.run(run.name)
    words = ["Traceback (most recent call last):", "ValueError: no hunter2-hunter2 here"]
    printed(site, run, 0, *of_rank(0, *words), *report(0, 0), VERDICT)
    site.server.finish(run.name, succeeded=False, exit_code=42)
    object.__setattr__(run, "environ", {**site.environ, "API_TOKEN": "hunter2-hunter2"})
    assert failure_of(run).message == "ValueError: no ***API_TOKEN*** here"


FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(0.2)
    raise ValueError("sample 7\\nhas no label")
time.sleep(60)
"""


def test_a_real_failure_ends_the_log_with_the_traceback_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun, the entrypoint and the ranks run; `toolkit logs` shows it as on Slurm."""
    (tmp_path / "fails.py").write_text(FAILS)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    with FakeKubernetes(auto_run=True) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "config")))
        spec = {
            "name": "t",
            "script": str(tmp_path / "fails.py"),
            "image": "i:1",
            "resources": {"nproc_per_node": 2},
            "retries": {"in_job": 1, "requeue": 0},
        }
        profile = toolkit.KubernetesProfile(name="k", runs_claim="runs", workload="Job")
        run = toolkit.submit(toolkit.JobSpec.model_validate(spec), to=profile)
        assert run.wait(180).state is toolkit.RunState.FAILED
        found = run.failure()
        assert found is not None
        assert (found.kind, found.rank, found.local_rank, found.node) == (
            "exception",
            1,
            1,
            "node-0",
        )
        argv = [str(TOOLKIT), "logs", run.name, "--rank", "7"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
    lines = re.sub(r"\d\d:\d\d:\d\d", "TIME", done.stderr).splitlines()
    assert lines[1:3] == [
        "earlier failure, in attempt 0, restart 0, TIME: rank 1 on node-0: ValueError: sample 7",
        "first failure, in attempt 0, restart 1, TIME: rank 1 on node-0: ValueError: sample 7",
    ]
    assert lines[3] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ValueError: sample 7", "has no label"]
