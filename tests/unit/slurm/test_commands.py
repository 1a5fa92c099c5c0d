"""What is said where Slurm's commands, or a cluster, are missing."""

from pathlib import Path

import pytest

from tests.conftest import ROOT
from toolkit.errors import SchedulerMissing
from toolkit.slurm import commands


@pytest.mark.parametrize("from_wheel", [False, True])
def test_the_sandbox_is_named_in_a_checkout_only(
    from_wheel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_CHECKOUT", tmp_path if from_wheel else ROOT)
    with pytest.raises(SchedulerMissing, match="no Slurm here: no-sbatch is not in PATH") as error:
        commands.run_command(["no-sbatch"])
    assert ("make sandbox-up" in str(error.value)) != from_wheel
    assert str(error.value).endswith("; `--to` names another profile")
