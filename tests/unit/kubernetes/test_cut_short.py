"""The submitting process is killed: the run is in the local list, or not in the cluster."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import TOOLKIT, Until
from tests.fakes.kubernetes import FakeKubernetes, Fault
from tests.unit.kubernetes.site import CANCELLED, FAILED, GROUPS, PENDING, UNKNOWN, runtime
from toolkit.errors import LauncherError
from toolkit.job.kubernetes_options import Workload
from toolkit.runs.records import registry
from toolkit.runs.records.state_dir import state_folder

POLICY = ".*/networkpolicies/.*"
HOUR_S = 3600.0


@dataclass
class User:
    """A user at a cluster whose processes get killed."""

    folder: Path
    server: FakeKubernetes
    kind: Workload
    held: threading.Event = field(default_factory=threading.Event)

    def is_killed_at(self, fault: Fault, until: Until, **job: Any) -> None:
        """Submit, and be killed while the server holds the request that a fault is for."""
        spec = {"name": "t", "module": "train", "image": "i:1", **job}
        (self.folder / "job.yaml").write_text(toolkit.text.yaml_reader.write_document(spec))
        (self.folder / "site.yaml").write_text(
            f"kind: kubernetes\nworkload: {self.kind}\nruns_claim: runs\n"
        )
        fault.held = self.held
        self.server.faults.append(fault)
        argv = [str(TOOLKIT), "submit", "job.yaml", "--to", "site.yaml"]
        with subprocess.Popen(argv, cwd=self.folder, stderr=subprocess.PIPE) as process:
            until(lambda: fault.times == 0 or process.poll() is not None, "the request has come")
            assert process.poll() is None, process.stderr and process.stderr.read()
            process.kill()
        self.held.set()

    def submits(self, **changes: Any) -> toolkit.Run:
        """Submit the same job, or a changed one, and be left alone."""
        job = toolkit.load(self.folder / "job.yaml").replace(**changes)
        return toolkit.submit(job, to=toolkit.load_profile(str(self.folder / "site.yaml")))

    @property
    def objects(self) -> list[str]:
        return sorted(self.server.jobs(self.kind))

    @property
    def run(self) -> toolkit.Run:
        """The only run of the list."""
        (found,) = toolkit.list_runs()
        return found

    @property
    def intents(self) -> list[Path]:
        return list(registry.intents_folder().glob("*.json"))

    def let_pass(self, seconds: float) -> None:
        """Make the recorded submission that old."""
        (path,) = self.intents
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: Workload) -> Iterator[User]:
    with FakeKubernetes() as server:
        server.apply(runtime())
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "config")))
        found = User(tmp_path, server, workload)
        try:
            yield found
        finally:
            found.held.set()


a_job = pytest.mark.parametrize("workload", ["Job"])


def workload_path(workload: Workload) -> str:
    return GROUPS[workload] + "/.*"


@pytest.mark.parametrize(
    ("moment", "workload"),
    [("first question", "Job"), ("companion", "TrainJob"), ("workload", "JobSet")],
)
def test_what_never_arrived_is_told_and_forgotten_after_a_day(
    user: User, until: Until, moment: str, workload: Workload
) -> None:
    path = {"companion": POLICY}.get(moment, workload_path(workload))
    method = "GET" if moment == "first question" else "PATCH"
    user.is_killed_at(Fault(method=method, path=path), until)
    assert user.objects == []
    reason = f"its submission was cut short, and the cluster has no {workload} of it yet"
    assert user.run.status() == toolkit.RunStatus(state=UNKNOWN, reason=reason)
    with pytest.raises(LauncherError, match=r"cannot be cancelled now: .* of it yet; try again"):
        user.run.cancel()
    user.let_pass(HOUR_S)
    assert toolkit.statuses([user.run])[0].state is FAILED
    assert "`toolkit resubmit t-" in user.run.status().reason
    user.run.cancel()
    assert user.server.objects_of("NetworkPolicy") == []
    user.let_pass(25 * HOUR_S)
    assert user.run.status().state is FAILED  # this is the last time
    assert list(toolkit.list_runs()) == []
    assert list((state_folder() / "kubernetes").iterdir()) == []


@pytest.mark.parametrize(
    ("moment", "workload"), [("workload", "PyTorchJob"), ("owners of companions", "Job")]
)
def test_what_arrives_after_the_kill_is_a_run_like_any_other(
    user: User, until: Until, moment: str, workload: Workload
) -> None:
    path = workload_path(workload)
    if moment != "workload":
        user.server.faults.append(Fault(method="PATCH", path=POLICY, status=200))
        path = POLICY
    user.is_killed_at(Fault(method="PATCH", path=path, status=200), until)
    until(lambda: user.objects, "the workload has come")
    run = user.run
    assert (run.name, run.state) == (user.objects[0], PENDING)
    assert user.intents == [] and user.run.uri == run.uri == toolkit.open_run(run.name).uri
    (policy,) = user.server.objects_of("NetworkPolicy")
    assert [owner["name"] for owner in policy["metadata"]["ownerReferences"]] == [run.name]
    run.cancel()
    assert user.run.state is CANCELLED
    assert user.objects == [] and user.server.objects_of("NetworkPolicy") == []


@a_job
def test_what_was_cut_short_can_be_submitted_after_all(user: User, until: Until) -> None:
    user.is_killed_at(Fault(method="PATCH", path=GROUPS["Job"] + "/.*"), until)
    run = toolkit.resubmit(user.run)
    assert [run.name] == user.objects
    assert (user.run.state, user.run.uri, user.intents) == (PENDING, run.uri, [])


@a_job
def test_what_was_cut_short_stands_by_its_time_in_the_list(user: User, until: Until) -> None:
    user.is_killed_at(Fault(method="PATCH", path=POLICY), until)
    cut_short = user.run.name
    user.submits()
    first, second = toolkit.list_runs()
    assert first.name == cut_short != second.name


@a_job
def test_what_arrived_after_the_kill_is_taken_up_by_the_next_submission_of_it(
    user: User, until: Until
) -> None:
    user.is_killed_at(Fault(method="PATCH", path=workload_path("Job"), status=200), until)
    until(lambda: user.objects, "the workload has come")
    first = user.objects
    user.submits(time_limit="1h")
    assert len(user.objects) == 2 and len(user.intents) == 1
    argv = [str(TOOLKIT), "submit", "job.yaml", "--to", "site.yaml"]
    done = subprocess.run(argv, cwd=user.folder, capture_output=True, text=True, check=True)
    assert done.stdout == f"k8s://default/{first[0]}\n"
    assert done.stderr == f"note: {first[0]} continues after an interrupted submission\n"
    assert len(user.objects) == 2 and user.intents == []
    owned = [p["metadata"].get("ownerReferences") for p in user.server.objects_of("NetworkPolicy")]
    assert all(owned)
    assert user.submits().name not in first and len(user.objects) == 3


@a_job
def test_a_job_with_notifications_of_its_own_is_taken_up_as_well(user: User, until: Until) -> None:
    fault = Fault(method="PATCH", path=workload_path("Job"), status=200)
    user.is_killed_at(fault, until, notify={"command": "cat"})
    until(lambda: user.objects, "the workload has come")
    assert [user.submits().name] == user.objects


@a_job
def test_what_has_ended_since_is_not_taken_up(user: User, until: Until) -> None:
    user.is_killed_at(Fault(method="PATCH", path=workload_path("Job"), status=200), until)
    until(lambda: user.objects, "the workload has come")
    user.server.finish(user.objects[0])
    ended = user.objects
    assert user.submits().name not in ended and len(user.objects) == 2


@a_job
def test_the_next_submission_of_a_sweep_submits_the_points_that_did_not_come(
    user: User, until: Until
) -> None:
    sweep = {"grid": {"--lr": [str(number) for number in range(20)]}}
    path = workload_path("Job") + "-18"
    user.is_killed_at(Fault(method="PATCH", path=path), until, sweep=sweep)
    until(lambda: len(user.objects) >= 16, "a first batch has come")
    assert user.submits().uri == user.run.uri
    assert len(user.objects) == 20 and user.intents == []
    assert user.run.status() == toolkit.RunStatus(state=PENDING, reason="20 PENDING")


@a_job
def test_while_a_process_submits_nobody_takes_its_run_for_cut_short(
    user: User, until: Until
) -> None:
    seen: list[list[str]] = []

    def look() -> None:
        until(lambda: not user.server.faults[0].times, "the request has come")
        seen.append([run.name for run in toolkit.list_runs()])
        user.held.set()

    user.server.faults = [
        Fault(method="PATCH", path=GROUPS["Job"] + "/.*", status=200, held=user.held)
    ]
    looking = threading.Thread(target=look)
    looking.start()
    job = toolkit.JobSpec.model_validate({"name": "t", "module": "train", "image": "i:1"})
    run = toolkit.submit(job, to=toolkit.KubernetesProfile(name="k", workload="Job"))
    looking.join()
    assert seen == [[]]
    assert user.run.uri == run.uri


@a_job
def test_a_sweep_that_was_cut_short_has_the_points_that_came_and_gets_the_others(
    user: User, until: Until
) -> None:
    rates = [str(number) for number in range(20)]
    path = GROUPS["Job"] + "/.*-18"
    sweep = {"grid": {"--lr": rates}}
    user.is_killed_at(Fault(method="PATCH", path=path), until, sweep=sweep)
    until(lambda: len(user.objects) >= 16, "a first batch has come")
    assert user.run.points[18].state is UNKNOWN
    user.let_pass(HOUR_S)
    assert user.run.points[18].state is FAILED
    owned = [p["metadata"].get("ownerReferences") for p in user.server.objects_of("NetworkPolicy")]
    assert 20 > len(owned) == len(user.objects) and all(owned)
    states = [point.state for point in user.run.points]
    assert states.count(PENDING) == 20 - states.count(FAILED) == len(user.objects)
    run = toolkit.resubmit(user.run)
    assert len(user.objects) == 20
    assert run.status() == toolkit.RunStatus(state=PENDING, reason="20 PENDING")
    assert user.intents == [] and len(user.run.points) == 20
    user.run.cancel()
    assert user.objects == []


@a_job
def test_a_submit_that_was_not_answered_leaves_a_run_that_can_be_asked_for(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes the run and does not answer before the client gives up; it has the run."""
    monkeypatch.setattr("toolkit.kubernetes.client.connection.FIRST_PAUSE_S", 0.01)
    path = GROUPS["Job"] + "/.*"
    user.server.faults = [
        Fault(method="PATCH", path=path, arrives=True, times=6),
        Fault(method="GET", path=path, status=200),
        Fault(method="GET", path=path, times=9),
    ]
    job = toolkit.JobSpec.model_validate({"name": "t", "module": "train", "image": "i:1"})
    with pytest.raises(LauncherError, match=r"\(6 attempts\); `toolkit status t-.*` tells"):
        toolkit.submit(job, to=toolkit.KubernetesProfile(name="k", workload="Job"))
    user.server.faults = []
    assert [user.run.name] == user.objects
    assert (user.run.state, user.intents) == (PENDING, [])
