"""Python functions on every rank: the same calls on Slurm, on this machine and in this process."""

import asyncio
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit

import toolkit
from tests.conftest import ROOT, Cluster, Until
from tests.support import calls
from tests.support.record_schemas import faults_of
from tests.support.slurm_site import Site
from toolkit.functions.parameters import job_of, updated
from toolkit.local.launcher import LocalLauncher


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> toolkit.LocalProfile:
    monkeypatch.chdir(ROOT)  # where the ranks find tests.support.calls
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))


@pytest.fixture
def login(
    cluster: Cluster, site: Site, monkeypatch: pytest.MonkeyPatch
) -> Iterator[toolkit.SlurmProfile]:
    """Make this process one of the login node, and return the profile of its cluster."""
    for name, value in cluster.environ.items():
        if not name.startswith("XDG_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    yield site.profile


def attempts(job: submitit.Job[Any]) -> list[str]:
    return sorted(path.name for path in (job.paths.folder / "logs").glob("attempt-*"))


# ---- Parameters


def shown(**given: object) -> dict[str, Any]:
    return job_of(updated({}, given), name="job", source="test").as_written()


def test_submitits_names_and_those_of_a_job_file_make_the_same_job() -> None:
    theirs = shown(
        nodes=2,
        tasks_per_node=4,
        gpus_per_node=4,
        cpus_per_task=3,
        mem_gb=64,
        timeout_min=90,
        slurm_partition="gpu",
        slurm_exclusive=True,
        slurm_signal_delay_s=120,
        slurm_additional_parameters={"mail_type": "END"},
    )
    ours = shown(
        nnodes=2,
        nproc_per_node=4,
        gpus_per_node=4,
        cpus_per_node=12,
        memory="64GiB",
        time_limit="90m",
        stop={"grace": "2m"},
        sbatch={"partition": "gpu", "exclusive": True, "mail-type": "END"},
    )
    assert theirs == ours


def test_unknown_parameters_are_refused_all_at_once_with_the_valid_ones() -> None:
    with pytest.raises(toolkit.SpecError) as caught:
        toolkit.LocalExecutor(node=2, slurm_setup=["module load cuda"], slurm_output="x", nodes=2)
    unknown, setup, output = str(caught.value).splitlines()
    assert unknown.startswith("node: unknown parameter; did you mean 'nodes'? valid are after, ")
    assert "nproc_per_node" in unknown and "timeout_min" in unknown
    assert setup == "slurm_setup: not here: set 'prolog' in the profile"
    assert output.startswith(
        "slurm_output: set by the toolkit: the log belongs to the run directory"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 2, "nnodes": 3}, "nodes and nnodes say the same; keep one"),
        ({"nodes": 0}, "LocalExecutor: resources.nnodes: must be at least 1, not 0"),
        ({"mem_gb": "much"}, "LocalExecutor: resources.memory: 'much' is not a size"),
        ({"nnodes": {"min": 1, "max": 2}}, "a call has one number of ranks"),
        ({"env": {"API_TOKEN": "sk-12345678"}}, "API_TOKEN"),
    ],
)
def test_bad_values_are_refused_when_they_are_set(given: dict[str, Any], message: str) -> None:
    executor = toolkit.LocalExecutor(nodes=1)
    with pytest.raises(toolkit.InputError) as caught:
        executor.update_parameters(**given)
    assert message in str(caught.value)
    assert executor.parameters == {"nnodes": 1}


def test_later_parameters_win_over_earlier_ones(tmp_path: Path) -> None:
    executor = toolkit.LocalExecutor(nodes=3, cpus_per_node=4, env={"A": "1"})
    executor.update_parameters(nnodes=2, cpus_per_task=2, nproc_per_node=2, env={"B": "2"})
    assert executor.parameters == {
        "nnodes": 2,
        "nproc_per_node": 2,
        "cpus_per_task": 2,
        "env": {"A": "1", "B": "2"},
    }


def test_a_profile_of_another_kind_is_refused() -> None:
    with pytest.raises(toolkit.ProfileError, match="is not a Slurm site"):
        toolkit.SlurmExecutor("k8s")
    with pytest.raises(toolkit.ProfileError, match="start it on the login node"):
        toolkit.SlurmExecutor(toolkit.SlurmProfile(name="far", via="ssh login1"))
    with pytest.raises(toolkit.ProfileError, match="is not for this machine"):
        toolkit.DebugExecutor(toolkit.SlurmProfile(name="site"))


# ---- In this process


@pytest.mark.filterwarnings(  # submitit's DebugJob leaves its log files open
    "ignore:unclosed file:ResourceWarning",
    "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning",
)
def test_debug_calls_in_this_process_with_a_group_of_one_rank(
    local: toolkit.LocalProfile, tmp_path: Path
) -> None:
    executor = toolkit.DebugExecutor(local, nodes=2, env={"WORD": "a"})
    assert isinstance(executor, submitit.Executor)
    job = executor.submit(lambda: (os.getpid(), os.environ["WORD"], calls.gather(2)))
    pid, word, found = job.result()
    assert (pid, word) == (os.getpid(), "a")
    assert (found["rank"], found["sum"], found["backend"]) == (0, 2.0, "gloo")
    assert Path(found["run_dir"]).is_dir()
    assert "RANK" not in os.environ
    assert isinstance(executor.submit(calls.fail_on, 0).exception(), ArithmeticError)
    assert executor.submit(calls.gather, 1).result()["sum"] == 1.0  # the group was left each time


# ---- On this machine


@pytest.mark.slow
def test_a_call_runs_on_every_rank_of_this_machine(local: toolkit.LocalProfile) -> None:
    executor = toolkit.LocalExecutor(local, nodes=2)
    assert isinstance(executor, submitit.Executor)
    job = executor.submit(calls.gather, 10, plus=1)
    assert isinstance(job, submitit.Job)
    results = job.results()
    assert [found["rank"] for found in results] == [0, 1]
    assert [found["submitit"] for found in results] == [0, 1]
    assert {(found["sum"], found["tasks"], found["backend"]) for found in results} == {
        (31.0, 2, "gloo")
    }
    assert [found["writes"] for found in results] == [[True, False]] * 2  # whole lines
    assert job.result() == results[0]
    assert job.task(1).result() == results[1]
    assert job.exception() is None and job.done() and job.state == "COMPLETED"
    assert job.task(1).stdout() == "rank 1 is here\n"
    assert job.stdout() == "rank 0 is here\n\nrank 1 is here\n"
    assert job.submission().args == (10,)
    assert asyncio.run(job.awaitable().results()) == results
    assert pickle.loads(pickle.dumps(job)).results() == results
    assert pickle.loads(pickle.dumps(job.task(1))).result() == results[1]
    outcome = json.loads((job.paths.folder / "outcome.json").read_text())
    assert (outcome["status"], outcome["attempt"]) == ("done", 0)
    assert faults_of(job.paths.folder) == []


MINE = """
import dataclasses, os, sys
import near
import toolkit

@dataclasses.dataclass
class Found:
    word: str
    rank: int

def find(word):
    return Found(near.twice(word), int(os.environ["RANK"]))

if __name__ == "__main__":
    job = toolkit.LocalExecutor(nproc_per_node=2).submit(find, "ab")
    assert [type(found) for found in job.results()] == [Found, Found], job.results()
    print(job.uri)
"""


def test_what_a_script_defines_runs_and_another_process_has_its_results(
    local: toolkit.LocalProfile, tmp_path: Path
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(MINE)
    (tmp_path / "near.py").write_text("def twice(word):\n    return word * 2\n")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    job = toolkit.attach(done.stdout.strip())
    assert [(found.word, found.rank) for found in job.results()] == [("abab", 0), ("abab", 1)]
    assert toolkit.attach(str(job.paths.folder)).uri == job.uri


# As sitecustomize.py: the supervisor's clock leaps by a day as soon as a file is there. So it does
# not matter how long the first attempt takes until it counts, and the second one until it is done.
LEAP = """
import os, sys, time
if sys.orig_argv[1:4] == ["-m", "toolkit.supervisor", "keep"]:
    steady, leap = time.monotonic, os.environ["PROBE_LEAP"]
    time.monotonic = lambda: steady() + 86400 * os.path.exists(leap)
"""


def test_here_too_a_checkpoint_when_time_is_over_is_where_the_next_attempt_goes_on(
    local: toolkit.LocalProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(LEAP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.setenv("PROBE_LEAP", str(tmp_path / "leap"))
    executor = toolkit.LocalExecutor(local, stop={"grace": "2m"}, time_limit="10h")
    job = executor.submit(calls.Counter(str(tmp_path)), 7, leap=1)
    until((tmp_path / "rank-0-0").exists, "it counts")
    (tmp_path / "leap").touch()
    counted, where, last = job.result()
    assert (counted > 0, where, last) == (True, [0, 1], 108)
    assert attempts(job) == ["attempt-0", "attempt-1"]


def test_what_is_no_call_cannot_be_attached_to(local: toolkit.LocalProfile) -> None:
    spec = toolkit.JobSpec.model_validate({"name": "plain", "command": ["true"]})
    run = toolkit.submit(spec, to=local)
    with pytest.raises(toolkit.LauncherError, match="is not the call of a function"):
        toolkit.attach(run.uri)
    run.wait(300)


def test_a_call_that_cannot_be_read_or_returned_says_so(local: toolkit.LocalProfile) -> None:
    executor = toolkit.LocalExecutor(local)
    job = executor.submit(lambda: (_ for _ in ()))
    with pytest.raises(submitit.core.utils.FailedJobError, match="the result cannot be pickled"):
        job.result()
    assert job.state == "FAILED"


# ---- On Slurm


@pytest.mark.slurm
def test_a_call_runs_on_every_rank_of_the_nodes(login: toolkit.SlurmProfile) -> None:
    executor = toolkit.SlurmExecutor(login, nodes=2, tasks_per_node=2, timeout_min=10)
    assert isinstance(executor, submitit.Executor)
    job = executor.submit(calls.gather, 1)
    results = job.results()
    assert [found["rank"] for found in results] == [0, 1, 2, 3]
    assert {found["sum"] for found in results} == {10.0}
    assert len({found["host"] for found in results}) == 2
    assert job.paths.submission_file.read_text().startswith("#!/bin/bash\n# Job gather ")
    assert job.job_id.isdecimal() and job.uri == f"slurm://sandbox/{job.job_id}"
    assert job.get_info()["State"] == "COMPLETED"


@pytest.mark.slurm
def test_the_first_rank_to_fail_is_told_and_not_tried_again(login: toolkit.SlurmProfile) -> None:
    executor = toolkit.SlurmExecutor(login, nodes=2)
    job = executor.submit(calls.fail_on, 1)
    with pytest.raises(submitit.core.utils.FailedJobError) as caught:
        job.result()
    assert "rank 1 on node" in str(caught.value)
    assert "ArithmeticError: rank 1 cannot do this" in str(caught.value)
    assert "Connection" not in str(caught.value)
    assert str(job.task(0).exception()) == str(caught.value)
    assert job.run.wait(300).state is toolkit.RunState.FAILED
    assert attempts(job) == ["attempt-0"]


@pytest.mark.slow
@pytest.mark.slurm
def test_a_checkpoint_when_time_is_over_is_where_the_next_attempt_goes_on(
    cluster: Cluster, login: toolkit.SlurmProfile, tmp_path: Path, until: Until
) -> None:
    executor = toolkit.SlurmExecutor(login, nodes=2, timeout_min=10)
    job = executor.submit(calls.Counter(str(tmp_path)), 7, leap=1)
    until((tmp_path / "rank-1-0").exists, "both ranks count")
    until((tmp_path / "rank-0-0").exists, "both ranks count")
    cluster.end_in(110, job.job_id)
    (counted, where, last), (_, _, other) = job.results()
    assert counted > 0
    assert where == [0, 1]
    assert (last, other) == (108, 108)
    assert attempts(job) == ["attempt-0", "attempt-1"]
    reason = (job.paths.folder / "logs/attempt-0/reason").read_text()
    assert reason == "walltime: out of time; queued again\n"


@pytest.mark.slow
@pytest.mark.slurm
def test_without_a_checkpoint_a_preempted_call_starts_anew_and_one_out_of_time_fails(
    cluster: Cluster, login: toolkit.SlurmProfile, tmp_path: Path, until: Until
) -> None:
    executor = toolkit.SlurmExecutor(login, nodes=2, timeout_min=10)
    job = executor.submit(calls.wait_for_ever, str(tmp_path))
    for attempt in (0, 1):
        for rank in (0, 1):
            until((tmp_path / f"rank-{rank}-{attempt}").exists, f"rank {rank} of {attempt}")
        if attempt == 0:
            cluster.slurm("scontrol", "requeue", job.job_id)
    assert not job.done()
    cluster.slurm("scancel", "--batch", "--signal=USR1", job.job_id)  # as when time is over
    with pytest.raises(submitit.core.utils.FailedJobError) as caught:
        job.result()
    assert "timed-out and not checkpointable" in str(caught.value)
    assert "in wait_for_ever\n" in str(caught.value)
    assert attempts(job) == ["attempt-0", "attempt-1"]


@pytest.mark.slow
@pytest.mark.slurm
def test_an_array_of_calls_is_one_job_of_groups_of_their_own(
    cluster: Cluster, login: toolkit.SlurmProfile
) -> None:
    executor = toolkit.SlurmExecutor(login, nodes=2, slurm_array_parallelism=2)
    jobs = executor.map_array(calls.gather, [1, 2, 3])
    array = {job.job_id.partition("_")[0] for job in jobs}
    assert [job.job_id.partition("_")[2] for job in jobs] == ["0", "1", "2"]
    (job_id,) = array
    assert "#SBATCH --array=0-2%2\n" in jobs[0].paths.submission_file.read_text()
    assert [[found["sum"] for found in job.results()] for job in jobs] == [
        [3.0, 3.0],
        [6.0, 6.0],
        [9.0, 9.0],
    ]
    with pytest.raises(toolkit.LauncherError, match="is an array of 3 calls; name one, like"):
        toolkit.attach(f"slurm://sandbox/{job_id}")
    assert toolkit.attach(f"slurm://sandbox/{job_id}_1").result()["sum"] == 6.0


@pytest.mark.slow
@pytest.mark.slurm
def test_what_dies_without_a_word_is_found_out_without_accounting(
    cluster: Cluster, login: toolkit.SlurmProfile, tmp_path: Path, until: Until
) -> None:
    asked = subprocess.run(["sacct"], capture_output=True, text=True, check=False)
    assert asked.returncode != 0, "this cluster was to have no accounting"
    executor = toolkit.SlurmExecutor(login, nodes=1, retries={"requeue": 0})
    with executor.batch():
        folders = [tmp_path / name for name in ("cancelled", "lost")]
        for folder in folders:
            folder.mkdir()
        jobs = [executor.submit(calls.wait_for_ever, str(folder)) for folder in folders]
    for folder in folders:
        until((folder / "rank-0-0").exists, f"{folder.name} runs")
    cancelled, lost = jobs
    (node,) = _nodes(cluster, lost)
    cluster("power-off", node)
    try:
        cluster.slurm("scancel", cancelled.job_id)
        assert "it is CANCELLED" in str(cancelled.exception())
        error = lost.exception()
        assert type(error) is submitit.core.utils.UncompletedJobError
        assert "it is FAILED: NODE_FAIL" in str(error)
    finally:
        cluster("power-on", node)
    until(lambda: "idle" in cluster.slurm("sinfo", "-h", "-n", node, "-o", "%t"), f"{node} is back")


def _nodes(cluster: Cluster, job: submitit.Job[Any]) -> list[str]:
    listed = cluster.slurm("squeue", "-h", "-j", job.job_id, "-o", "%N").strip()
    return cluster.slurm("scontrol", "show", "hostnames", listed).split()


# ---- All calls, or none


def test_no_call_starts_if_one_cannot_be_pickled(local: toolkit.LocalProfile) -> None:
    with pytest.raises(TypeError, match="pickle"):
        toolkit.LocalExecutor(local).map_array(type, [1, threading.Lock()])
    assert not list(Path(local.runs_dir).glob("*"))


def test_calls_that_were_submitted_before_a_refused_one_are_cancelled(
    local: toolkit.LocalProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    submitted: list[toolkit.Run] = []
    submit = LocalLauncher.submit

    def once(*args: Any, **kwargs: Any) -> Any:
        if submitted:
            raise toolkit.LauncherError("no space left")
        submitted.append(submit(*args, **kwargs))
        return submitted[0]

    monkeypatch.setattr(LocalLauncher, "submit", once)
    with pytest.raises(toolkit.LauncherError, match="no space left"):
        toolkit.LocalExecutor(local).map_array(calls.wait_for_ever, [str(tmp_path)] * 2)
    assert submitted[0].wait(300).state is toolkit.RunState.CANCELLED
