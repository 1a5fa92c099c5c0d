"""What version 0.1 has written still opens: run directories, the list of runs, pickled jobs.

tests/data/recorded/version-0.1.tar.gz holds a state folder and run directories: two calls of
functions (one raised), a training run of jobs/digits.yaml, and a run and a sweep on Kubernetes, of
which the state folder keeps the job files. Paths in it begin with /tmp/rec.
"""

import json
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import submitit

import toolkit
from tests.conftest import ROOT
from tests.fakes.kubernetes import FakeKubernetes
from tests.support.record_schemas import faults_of
from toolkit.kubernetes import KubernetesLauncher
from toolkit.runs import registry
from toolkit.runs.state import RunState


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "rec"
    with tarfile.open(ROOT / "tests/data/recorded/version-0.1.tar.gz") as archive:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4; Debian 12 has 3.11.2
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    state = folder / "state/torch-deploy-toolkit/runs.jsonl"
    state.write_text(state.read_text().replace("/tmp/rec", str(folder)))
    (folder / "state/torch-deploy-toolkit").chmod(0o700)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    return folder


def run_of(job: str) -> toolkit.Run:
    (run,) = toolkit.list_runs(job=job)
    return run


def test_the_list_of_runs(recorded: Path) -> None:
    jobs = [run.record.job for run in toolkit.list_runs()]
    assert jobs == ["pow", "divmod", "digits", "t", "sweep"]
    here = [run_of(job).status().state for job in ("pow", "divmod", "digits")]
    assert here == [RunState.SUCCEEDED, RunState.FAILED, RunState.SUCCEEDED]


def test_the_schemas_describe_what_they_hold(recorded: Path) -> None:
    faults = {path.name.partition("-")[0]: faults_of(path) for path in recorded.glob("runs/*")}
    assert faults == {"pow": [], "divmod": [], "digits": []}


def test_pickled_jobs_of_calls(recorded: Path) -> None:
    job, task, failed = (
        pickle.loads((recorded / f"{name}.pkl").read_bytes()) for name in ("job", "task", "failed")
    )
    assert job.results() == [32, 32]
    assert task.result() == 32
    with pytest.raises(submitit.core.utils.FailedJobError, match="ZeroDivisionError"):
        failed.results()


def test_a_failure_and_where_it_came_from(recorded: Path) -> None:
    failure = run_of("divmod").failure()
    assert failure is not None
    assert "ZeroDivisionError" in failure.message
    assert failure.rank in (0, 1)


def test_logs_and_metrics(recorded: Path) -> None:
    run = run_of("digits")
    assert "[rank 0] done: step 23/23" in "\n".join(run.logs())
    assert run.metrics()["step"].iloc[-1] == 23


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(recorded: Path) -> None:
    run = run_of("digits")
    argv = ["-m", "train", "--task", "digits", "--epochs", "2", "--run-dir", str(run.run_dir)]
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert run.run_dir is not None
    rows = (run.run_dir / "events.jsonl").read_text().splitlines()
    events = [json.loads(row) for row in rows]
    assert [event["step"] for event in events if event["event"] == "resume"] == [23]


@pytest.mark.parametrize("name", ["t", "sweep"])
def test_a_run_on_kubernetes_that_is_submitted_again(recorded: Path, name: str) -> None:
    record = run_of(name).record
    with FakeKubernetes() as server:
        profile = toolkit.KubernetesProfile.model_validate(dict(record.profile))
        launcher = KubernetesLauncher(profile, api_client=server.api_client())
        job = toolkit.load(
            recorded / f"state/torch-deploy-toolkit/kubernetes/{record.name}/job.yaml"
        )
        server.apply(toolkit.render(toolkit.plan(job, profile, run_name=record.name)))
        run = launcher.open(registry.find(record.uri))
        before = {part: server.job(part)["metadata"]["uid"] for part in server.jobs("Job")}
        for part in before:
            server.finish(part, succeeded=False)
        launcher.resubmit(run)
        after = {part: server.job(part)["metadata"]["uid"] for part in server.jobs("Job")}
    assert after.keys() == before.keys()
    assert not {*after.values()} & {*before.values()}
