"""A place to submit to whose pods really run, on the fake cluster or on a real one."""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import toolkit
from tests.fakes.kubernetes.real import CLAIM, ClusterUnderTest
from toolkit.job.kubernetes_options import Workload

__all__ = ["NOWHERE", "Live"]

NOWHERE: dict[str, Any] = {
    "image": "registry.invalid/nobody:1",
    "resources": {"cpus_per_node": 100_000},
}
"""A job whose pods are made and never run: no node has so many CPUs."""


class Live:
    """A namespace of a cluster, and jobs for it."""

    def __init__(self, cluster: ClusterUnderTest, workload: Workload, **profile: Any) -> None:
        self.cluster = cluster
        self.workload = workload
        known = {"name": "live", "namespace": cluster.namespace, "runs_claim": CLAIM}
        self.profile = toolkit.KubernetesProfile.model_validate(
            known | {"workload": workload} | profile
        )

    def job(self, **job: Any) -> toolkit.JobSpec:
        """Return a job; without an image of its own it needs one that holds `train`."""
        known = {
            "name": self.cluster.tag,
            "image": job.get("image") or self.cluster.image,
            "env": {"OMP_NUM_THREADS": "1"},
            "stop": {"grace": "60s"},
            "retries": {"in_job": 0, "requeue": 1},
        }
        if not {"command", "module", "script"} & job.keys():
            known["module"] = "train"
        resources = {"memory": "1536MiB", "shm": "64MiB"} | job.get("resources", {})
        return toolkit.JobSpec.model_validate(known | job | {"resources": resources})

    def submit(self, **job: Any) -> toolkit.Run:
        """Submit a job as a user does."""
        return toolkit.submit(self.job(**job), to=self.profile)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition holds, and fail with its description if it never does."""
        deadline = time.monotonic() + self.cluster.patience_s
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"{what}: not within {self.cluster.patience_s} s")
            time.sleep(self.cluster.pause_s)

    def until_reason(self, run: toolkit.Run, words: str) -> toolkit.RunStatus:
        """Wait until a status gives a reason with these words."""
        found: list[toolkit.RunStatus] = []

        def says() -> bool:
            found.append(run.status())
            return words in found[-1].reason

        try:
            self.until(says, f"its reason says {words!r}")
        except pytest.fail.Exception as error:
            pytest.fail(f"{error}; it said {found[-1]}")
        return found[-1]

    def ended(self, run: toolkit.Run) -> toolkit.RunStatus:
        """Wait until a run has ended."""
        found: list[toolkit.RunStatus] = []

        def is_over() -> bool:
            found.append(run.status())
            return found[-1].state.final

        self.until(is_over, f"{run.uri} ends")
        return found[-1]

    def names(self, kind: str = "") -> list[str]:
        """Return the names of what this test, and others of its session, have made of a kind."""
        found = self.cluster.objects(kind or self.workload)
        return sorted(str(one["metadata"]["name"]) for one in found)

    def runs(self) -> Iterator[str]:
        """Return the names of the runs that `toolkit list` shows."""
        return (run.name for run in toolkit.list_runs())

    # What a training leaves on the claim.

    def outcome(self, run: toolkit.Run) -> Any:
        """Return how a training has ended last."""
        return json.loads(self.cluster.read(f"{run.name}/outcome.json"))

    def events(self, run: toolkit.Run, kind: str) -> list[dict[str, Any]]:
        """Return a training's own outcome."""
        lines = self.cluster.read(f"{run.name}/events.jsonl").splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def told(self, run: toolkit.Run) -> str:
        """Return all evidence about a run that ended otherwise than expected."""
        words = [str(event.get("message")) for event in self._events()]
        return "\n".join([*words, *itertools.islice(run.logs(), 2000)])

    def _events(self) -> list[Any]:
        api: Any = _core(self.cluster.api_client())
        found = api.list_namespaced_event(self.cluster.namespace).to_dict()["items"]
        mine = (one for one in found if self.cluster.tag in one["involved_object"]["name"])
        return list(mine)


def _core(client: Any) -> Any:
    from kubernetes.client import CoreV1Api

    return CoreV1Api(client)
