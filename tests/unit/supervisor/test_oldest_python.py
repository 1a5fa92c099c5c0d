"""What runs on batch hosts and in images begins with the oldest Python that these have."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("folder", "oldest"),
    [("toolkit/supervisor", "3.6"), ("templates/common/watchdog", "3.8")],
)
def test_syntax_and_library_are_those_of_the_oldest_python(folder: str, oldest: str) -> None:
    vermin = Path(sys.executable).with_name("vermin")
    argv = [vermin, "--no-tips", f"--target={oldest}-", "--violations", str(ROOT / folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    # What it cannot see: methods of text and dictionaries that came with Python 3.9.
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\.remove(prefix|suffix)\(| \|=? \{", text), path
