"""Processes that read ahead end with the program that started them, and not before."""

import subprocess
import sys

import pytest

PROGRAM = """
import itertools, threading

import torch

from train.data.loader import DatasetReader


class Numbered:
    def __len__(self):
        return 100

    def __getitem__(self, number):
        if number >= STUCK_FROM:
            threading.Event().wait()
        return torch.zeros(1), torch.zeros(1)


batches = DatasetReader(Numbered(), workers=2).read(torch.arange(100).split(2))
print(len(list(itertools.islice(batches, 2))), flush=True)
END
"""


@pytest.mark.parametrize(
    ("stuck_from", "end", "status"),
    [
        (100, "", 0),
        (4, "raise SystemExit(3)", 3),
        # torch waits 5 s for each of them.
        pytest.param(4, "batches.close(); del batches", 0, marks=pytest.mark.slow),
    ],
)
def test_reading_processes_end_with_a_program_that_ends_early(
    stuck_from: int, end: str, status: int
) -> None:
    program = PROGRAM.replace("STUCK_FROM", str(stuck_from)).replace("END", end)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "2\n", "")
