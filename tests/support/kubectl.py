"""The real kubectl."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

__all__ = ["kubectl", "kubectl_path"]

_OWN = ROOT / ".cache/kubectl/usr/bin"
"""Where tests/packages.sh puts it if the machine has none."""


def kubectl_path() -> str:
    """Return a PATH on which there is one; skip the test without, but not in CI."""
    path = f"{os.environ['PATH']}:{_OWN}"
    if shutil.which("kubectl", path=path) is None:
        if os.environ.get("CI"):
            pytest.fail("CI must run kubectl")
        pytest.skip("needs kubectl; see tests/packages.sh")
    return path


def kubectl(*argv: str, config: Path | None = None) -> str:
    """Run kubectl; return its output."""
    environ = {**os.environ, "PATH": kubectl_path(), "KUBECONFIG": str(config or os.devnull)}
    done = subprocess.run(
        ["kubectl", *argv], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), f"kubectl {argv}: {done.stdout}{done.stderr}"
    return done.stdout
