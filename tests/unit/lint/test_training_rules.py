"""The rules for training scripts: each wrong form is found, and nothing in the right one.

tests/data/training_scripts holds whole scripts in the styles of tutorials. In a wrong one, the line
that a rule finds ends with `# finds RULE`.
"""

import re
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT
from toolkit.checks import check
from toolkit.cli import cli
from toolkit.errors import InputError
from toolkit.lint.check import TRAINING_RULES, check_training_script

SCRIPTS = sorted((ROOT / "tests/data/training_scripts").glob("*.py"))
_FINDS = re.compile(r"# finds ([a-z0-9-]+)")


def expected(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a script at which rules find something, with the rules."""
    lines = enumerate(path.read_text().splitlines(), start=1)
    return [(number, rule) for number, line in lines for rule in _FINDS.findall(line)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_trap_of_a_script_is_found_and_nothing_else(path: Path) -> None:
    assert path.stem.startswith("wrong" if expected(path) else "right")
    assert [(finding.line, finding.rule) for finding in check(path)] == expected(path)


def test_every_rule_is_tried_beside_right_forms() -> None:
    assert {rule for path in SCRIPTS for _, rule in expected(path)} == {
        rule.id for rule in TRAINING_RULES
    }
    assert sum(path.stem.startswith("right") for path in SCRIPTS) >= 20


def test_nothing_is_found_in_our_own_code() -> None:
    folders = ("train", "templates/project", "toolkit/supervisor/watchdog", "jobs", "notebooks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 60
    assert {path.name: list(map(str, found)) for path in files if (found := check(path))} == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "train.py:1: not valid Python: "),
        ("x = 1\n  y = 2\n", "train.py:2: not valid Python: unexpected indent"),
        ("print 'done'\n", "train.py:1: not valid Python: "),
        ("x = " + "(" * 5000 + ")" * 5000, "train.py"),
        ("a\0b", "train.py: "),
        ("x" * (1 << 18) + "y", "train.py: has 262145 characters"),
    ],
)
def test_what_is_no_python_is_refused_in_a_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        check_training_script(text, "train.py")
    (line,) = str(refused.value).splitlines()
    assert line.startswith(message)


def test_a_file_is_read_and_never_executed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent(f"""
        import pathlib, torch
        pathlib.Path({str(tmp_path / "ran")!r}).write_text("")
        torch.load("x", weights_only=False)
        """)
    )
    (finding,) = check(path)
    assert (finding.rule, finding.line) == ("untrusted-load", 4)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("comment", ["# toolkit: allow rank0-barrier: they come later", ""])
def test_a_comment_takes_a_finding_back(comment: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    head = "import torch.distributed as dist\nif rank == 0:\n"
    path.write_text(f"{head}    dist.barrier()  {comment}\n")
    assert [finding.rule for finding in check(path)] == ([] if comment else ["rank0-barrier"])


@pytest.mark.parametrize("option", ["--to=slurm", "--server", "--set=name=a"])
def test_options_for_jobs_are_refused(option: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = CliRunner().invoke(cli, ["check", str(tmp_path / "train.py"), option])
    assert done.exit_code == 2
    assert "a training script is only checked as Python code" in done.output
