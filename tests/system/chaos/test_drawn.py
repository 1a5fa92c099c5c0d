"""Runs that drawn faults hit at drawn moments, and each fault alone."""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Cluster
from tests.system.chaos.arena import Arena, LocalArena, SlurmArena, own_pods, own_slurm
from tests.system.chaos.fault_table import run_alone
from tests.system.chaos.faults import FAULTS, Fault
from tests.system.chaos.frame import Trial
from tests.system.chaos.play import draw, play

pytestmark = pytest.mark.slurm


@contextlib.contextmanager
def opened(place: str, cluster: Cluster, folder: Path) -> Iterator[Arena]:
    """Open an arena in the session's cluster, or of its own."""
    if place == "pods":
        with own_pods(folder / "pods") as pods:
            yield pods
        return
    arena = SlurmArena(cluster, folder) if place == "slurm" else LocalArena(folder)
    yield arena
    arena.restore()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "seed"),
    [
        ("slurm", 105),
        ("pods", 2),
        ("local", 6),
    ],
)
def test_a_run_survives_faults_at_any_moment(
    place: str, seed: int, cluster: Cluster, tmp_path: Path, reference: Trial
) -> None:
    with opened(place, cluster, tmp_path) as arena:
        play(arena, draw(seed, 0, place=place, quick=True), reference, random.Random(seed))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_is_survived_and_told_as_its_row_says(
    fault: Fault, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, reference: Trial
) -> None:
    folder = tmp_path_factory.mktemp("arena")
    with contextlib.ExitStack() as stack:
        if fault.need:
            arena: Arena = stack.enter_context(own_slurm(folder))
        else:
            arena = stack.enter_context(opened(fault.place, cluster, folder))
        if not arena.offers(fault.need):
            if os.environ.get("CI"):
                pytest.fail(f"nothing is there for {fault.need}")
            pytest.skip(f"needs {fault.need}")
        run_alone(arena, fault, reference)
