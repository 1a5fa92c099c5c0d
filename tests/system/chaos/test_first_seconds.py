"""Runs that a fault hits between `sbatch` and their first step."""

from pathlib import Path

import pytest

from tests.conftest import Cluster
from tests.system.chaos.first_seconds import again, draw, line, play_all

SEED = 44


@pytest.mark.slurm
def test_a_fault_in_the_first_seconds_ends_no_run_and_is_told_as_what_it_was(
    cluster: Cluster, tmp_path: Path
) -> None:
    """`make chaos` draws more of them."""
    moments = [draw(SEED, number) for number in range(10)]
    found = play_all(cluster, tmp_path, moments, SEED, lanes=3)
    told = [f"{line(played)}\n  again: {again(SEED, played)}" for played in found if played.broken]
    assert not told, "\n".join([f"seed {SEED}", *told])
