"""The benchmark of the language model: the ratios that it prints."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys

import pytest
import torch

from benchmarks import language_model
from benchmarks.language_model import PEAKS, Work, data_sheet, flops_per_token, peak
from tests.conftest import ROOT
from train.tasks.chars import VOCABULARY, Chars, Sizes

SIZES = Sizes(context=32, width=16, heads=2, layers=3)


def work(precision: str = "fp32") -> Work:
    return Work(
        task=Chars(SIZES),
        batch=2,
        device=torch.device("cpu"),
        precision=precision,
        compiled=False,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_operations_of_a_token_are_those_of_the_model_on_paper(precision: str) -> None:
    matrices = SIZES.layers * 12 * SIZES.width**2 + SIZES.width * VOCABULARY
    # Two for each number of a matrix, and twice as many backwards. Attention: each product of its
    # two takes 2 x context x width, backwards five of them, since scores are computed once more.
    attention = SIZES.layers * (2 + 5) * 2 * SIZES.context * SIZES.width
    assert flops_per_token(work(precision)) == 6 * matrices + attention


def test_the_peak_of_a_known_gpu_is_its_data_sheets() -> None:
    assert doctest.testmod(language_model).failed == 0
    # Of two names that fit, the longer one comes first.
    names = list(PEAKS)
    assert all(a not in b for n, a in enumerate(names) for b in names[n + 1 :])
    assert data_sheet("NVIDIA H200") == 989
    assert data_sheet("Quadro K600") == 0


def test_the_peak_of_anything_else_is_measured() -> None:
    speed, source = peak(work())
    assert 1e8 < speed < 1e15
    assert source == "the fastest product of 1024 x 1024 matrices here"


@pytest.mark.slow
def test_both_loops_are_timed_and_their_utilisation_is_a_share_of_the_peak() -> None:
    sizes = "--width=16 --heads=2 --layers=1 --context=16 --batch=2 --steps=2 --rounds=2"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.language_model", "--device=cpu", *sizes.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "0.0 million parameters on the CPU: fp32, 32 tokens a step"
    shares = [float(text) for text in re.findall(r"([0-9.]+)%$", done.stdout, re.MULTILINE)]
    assert [line.split("  ")[0] for line in lines[3:5]] == ["by hand", "ours"]
    assert len(shares) == 2
    assert all(0 <= share < 100 for share in shares)
    found = re.fullmatch(
        r"ours / by hand: ([0-9.]+) \(target: at least 0.98, (met|missed)\)", lines[5]
    )
    assert found, done.stderr
    assert done.returncode == (0 if found[2] == "met" else 1)
