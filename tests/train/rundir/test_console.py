"""What people see: torchrun and the launchers pass on what a rank writes, piece by piece."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT


def pieces(reader: int) -> Iterator[str]:
    """Yield the text of each write into the pipe."""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while piece := pipe.read(1 << 16):
            yield piece.decode()


@pytest.mark.parametrize("module", ["train", "train.collectives"])
def test_a_line_is_written_with_its_end(module: str) -> None:
    reader, writer = os.pipe2(os.O_DIRECT)  # each read returns the bytes of one write
    subprocess.run(
        [sys.executable, "-m", module, "--no-such-flag"],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stderr=writer,
        check=False,
    )
    os.close(writer)
    written = list(pieces(reader))
    assert "--no-such-flag" in "".join(written)
    assert all(piece.endswith("\n") and piece.strip() for piece in written)
