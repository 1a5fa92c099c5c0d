"""What runs on batch hosts and in images begins with the oldest Python that these have."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SUPERVISOR = ROOT / "toolkit/supervisor"


@pytest.mark.parametrize(
    ("oldest", "files"),
    [
        ("3.6", [*SUPERVISOR.glob("*.py"), *SUPERVISOR.glob("[es]*/*.py")]),
        ("3.8", [*SUPERVISOR.glob("watchdog/*.py")]),
    ],
    ids=["3.6", "3.8"],
)
def test_syntax_and_library_are_those_of_the_oldest_python(oldest: str, files: list[Path]) -> None:
    vermin = Path(sys.executable).with_name("vermin")
    argv = [str(vermin), "--no-tips", f"--target={oldest}-", "--violations", *map(str, files)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    # What it cannot see: methods of text and dictionaries that came with Python 3.9.
    for path in files:
        assert not re.search(r"\.remove(prefix|suffix)\(| \|=? \{", path.read_text()), path
