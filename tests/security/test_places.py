"""An impossible value is reported with its place, by every command."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import TOOLKIT


@pytest.mark.parametrize("command", ["render", "submit", "check"])
def test_what_a_job_lacks_at_a_site_is_told_with_its_file(tmp_path: Path, command: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: x\nmodule: train\n")
    done = subprocess.run(
        [TOOLKIT, command, path, "--to", "k8s"],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    (said,) = (done.stdout + done.stderr).splitlines()
    assert said.startswith(f"{path}:1: ") and said.endswith("the job needs the key 'image'")
