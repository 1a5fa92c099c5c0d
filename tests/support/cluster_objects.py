"""Objects that tests create on the fake cluster: the manifest of a small job, and config maps."""

from typing import Any

import yaml

from tests.conftest import ROOT
from tests.support.rendered import manifest

RUNTIME = (ROOT / "k8s" / "base" / "trainer" / "runtime.yaml").read_text()


def workload(kind: str, name: str = "t") -> Any:
    """Return what the toolkit renders of a job on two nodes."""
    document = list(yaml.safe_load_all(manifest({"resources": {"nnodes": 2}}, {}, kind)))[-1]
    document["metadata"]["name"] = name
    return document


def config(name: str, **labels: str) -> Any:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels},
        "data": {"a": "1"},
    }
