"""Every kind of workload really trains: rendered, submitted, made into pods, run as processes.

The cluster is tests/cluster: controllers that do what was seen of the real ones, and pods whose
container's command, the entrypoint and torchrun and the ranks, runs on this machine.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.cluster import FakeKubernetes
from tests.cluster.kubelet import exit_code
from tests.conftest import ROOT, Until
from toolkit.kubernetes_options import Workload

KINDS: tuple[Workload, ...] = ("PyTorchJob", "TrainJob", "JobSet", "Job")
RUNTIME = ROOT / "k8s" / "base" / "trainer" / "runtime.yaml"
TINY = ("--task", "digits", "--checkpoint-every", "10")
STEPS = 150


class Site:
    """A cluster under Pod Security "restricted", and a job for it."""

    def __init__(self, server: FakeKubernetes, kind: Workload) -> None:
        self.server = server
        self.profile = toolkit.KubernetesProfile(name="k", runs_claim="runs", workload=kind)

    def submit(self, *args: str, nnodes: int = 2, **job: Any) -> toolkit.Run:
        spec = toolkit.JobSpec.model_validate(
            {
                "name": "t",
                "module": "train",
                "args": [*TINY, *args],
                "image": "localhost/train:1",
                "resources": {"nnodes": nnodes, "memory": "2GiB", "shm": "64MiB"},
                "env": {"OMP_NUM_THREADS": "1"},
                "stop": {"grace": "60s"},
                "retries": {"in_job": 0, "requeue": 1},
            }
            | job
        )
        return toolkit.submit(spec, to=self.profile)

    @property
    def folder(self) -> Path:
        """Return the run directory, on the claim."""
        (found,) = (self.server.root / "claims" / "runs").iterdir()
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return what the training says of itself."""
        try:
            lines = (self.folder / "events.jsonl").read_text().splitlines()
        except (OSError, ValueError):
            return []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def trains(self, run: toolkit.Run) -> bool:
        """Tell whether there is a checkpoint to go on from."""
        assert not run.status().state.final, self.told(run)
        return bool(self.events("checkpoint"))

    def outcome(self) -> Any:
        """Return how the training ended last."""
        return json.loads((self.folder / "outcome.json").read_text())

    def exits(self, run: toolkit.Run) -> list[int | None]:
        """Return the exit status of each pod that is there."""
        return [exit_code(pod) for pod in self.server.pods(run.name)]

    def told(self, run: toolkit.Run) -> str:
        """Return all that can be said of a run that did not end as it should."""
        words = [event["message"] for event in self.server.objects_of("Event")]
        return "\n".join([*words, *run.logs()])


@pytest.fixture(params=KINDS)
def site(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    path = f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)  # where the containers find torchrun
    with FakeKubernetes(auto_run=True, restricted=True) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
        if request.param == "TrainJob":
            server.apply(RUNTIME.read_text())
        yield Site(server, request.param)


def undisturbed(folder: Path) -> Any:
    """Return the outcome of the same training where nothing happens to it."""
    argv = ["torchrun", "--nproc-per-node=2", "-m", "train", *TINY, "--steps", str(STEPS)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TRAIN_RUN_DIR": str(folder / "alone")}
    subprocess.run(argv, env=environ, cwd=ROOT, check=True, capture_output=True)
    return json.loads((folder / "alone" / "outcome.json").read_text())


def test_a_lost_pod_is_replaced_and_the_run_goes_on_to_its_end(
    site: Site, until: Until, tmp_path: Path
) -> None:
    run = site.submit("--steps", str(STEPS))
    until(lambda: site.trains(run), "it trains")
    pod = site.server.pods(run.name)[-1]["metadata"]["name"]
    # Each way to lose a pod once; what follows is the same for all.
    {
        "PyTorchJob": site.server.kill,
        "TrainJob": lambda name: site.server.delete(name, kind="Pod"),
        "JobSet": site.server.kill,
        "Job": site.server.evict,
    }[site.profile.workload](pod)
    status = run.wait(180)
    assert status.state is toolkit.RunState.SUCCEEDED, (status, site.told(run))
    assert site.outcome()["status"] == "done"
    resumed = site.events("resume")
    assert resumed and all(event["step"] > 0 for event in resumed), "it went on where it was"
    assert site.outcome()["step"] == STEPS
    if site.profile.workload == "JobSet":  # once is enough: the training is the same in all
        assert site.outcome()["metrics"] == undisturbed(tmp_path)["metrics"]


def test_a_failure_of_the_users_making_is_not_tried_again(site: Site) -> None:
    run = site.submit("--steps", "1", "--lr", "nonsense", nnodes=1)
    status = run.wait(180)
    assert status.state is toolkit.RunState.FAILED
    assert site.exits(run) == [42], "what the operators take for final"
    (attempt,) = (site.folder / "logs").glob("attempt-*")
    assert attempt.name == "attempt-0"


@pytest.mark.parametrize("site", ["TrainJob"], indirect=True)  # the longest way down to a pod
def test_a_cancelled_run_writes_a_checkpoint_within_its_grace(site: Site, until: Until) -> None:
    run = site.submit("--steps", "1000000")
    until(lambda: site.trains(run), "it trains")
    run.cancel()
    assert run.wait(180).state is toolkit.RunState.CANCELLED
    assert site.outcome()["status"] == "preempted"
    assert site.events("stopped"), "the last step is kept"
    assert site.server.pods(run.name) == []
