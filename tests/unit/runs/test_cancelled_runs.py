"""The list of the runs that were cancelled from here."""

import resource
from pathlib import Path

from toolkit.runs.records import registry


def test_the_records_of_cancelled_runs_survive_a_full_disk(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    registry.check(environ=environ)
    for uri in ("k8s://n/a", "k8s://n/b"):
        registry.mark_cancelled(uri, environ=environ)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        registry.withdraw_cancelled("k8s://n/a", environ=environ)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert registry.is_cancelled("k8s://n/b", environ=environ)
    registry.withdraw_cancelled("k8s://n/a", environ=environ)
    assert not registry.is_cancelled("k8s://n/a", environ=environ)
