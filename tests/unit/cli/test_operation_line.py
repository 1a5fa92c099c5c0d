"""What a command says of an operation that takes long: a line at a terminal, elsewhere a note."""

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import TOOLKIT, Until
from tests.support.terminal import SEQUENCE, at_terminal
from toolkit.cli import operation_line
from toolkit.runs.long_operation import operation

WAITING = r"""
import sys, time
import click
from toolkit.cli import operation_line
from toolkit.runs.long_operation import operation

try:
    with operation_line.shown() as line, operation("copying [red]x\x1b[5m to login1") as report:
        report(1, 10, "1 of 10")
        line.clear()
        click.echo("between", err=True)
        while True:
            report(3, 10, "3 of 10 [b]")
            time.sleep(0.05)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
"""


@pytest.mark.parametrize("columns", [40, 120])
def test_a_line_at_a_terminal_goes_away_at_the_end(columns: int, until: Until) -> None:
    with at_terminal([sys.executable, "-c", WAITING], columns=columns, rows=24) as terminal:

        def last() -> str:
            return re.split(r"\r|\n", SEQUENCE.sub("", terminal.read()))[-1]

        shown = r"copying \[red\]x" if columns == 40 else r"copying \[red\]x.* 3 of 10 \[b\]"
        until(lambda: "between" in terminal.read(), "a line in between", seen=terminal.read)
        until(lambda: re.search(shown, last()), "the line", seen=terminal.read)
        assert len(last()) <= columns
        assert r"copying [red]x\x1b[5m to" in SEQUENCE.sub("", terminal.drawn) or columns == 40
        assert "\x1b[5m" not in terminal.drawn
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.status() == 130
        # Nothing of it is left on the line, which is the one of the next output.
        assert re.search(r"\x1b\[(2K|K)[^a-z]*interrupted\r\n$", terminal.drawn), terminal.drawn
        # The line was taken away before, and written anew after, what came in between.
        assert re.search(r"\x1b\[(2K|K)[^a-z]*between\r\n", terminal.drawn), terminal.drawn
        assert terminal.drawn.rfind("\x1b[?25h") > terminal.drawn.rfind("\x1b[?25l")


def test_ctrl_c_at_any_moment_leaves_no_half_of_a_line(until: Until) -> None:
    busy = WAITING.replace("time.sleep(0.05)", "line.clear()")
    for _ in range(8):
        with at_terminal([sys.executable, "-c", busy], columns=120, rows=24) as terminal:
            until(lambda t=terminal: "3 of 10" in t.read(), "the line", seen=terminal.read)
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.status() == 130
            assert re.search(r"\x1b\[(2K|K)[^a-z]*interrupted\r\n$", terminal.drawn), terminal.drawn


def test_without_a_terminal_each_kind_is_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    with operation_line.shown():
        for _ in range(2):
            with operation("fetching \x1b[31mfiles") as report:
                report(1, 2, "1 of 2")
        with operation("copying"), operation("quick", long=False):
            pass
    with operation("nobody listens"):
        pass
    assert capsys.readouterr() == ("", "note: fetching \\x1b[31mfiles\nnote: copying\n")


def test_check_says_at_once_that_it_works(tmp_path: Path) -> None:
    script = tmp_path / "a\x1b[5mb.py"
    script.write_text("print()\n")
    with at_terminal([str(TOOLKIT), "check", script], columns=300) as terminal:
        assert terminal.status() == 0, terminal.drawn
    before, after = terminal.drawn.split("\r\x1b[K")
    assert before.startswith("checking ") and r"a\x1b[5mb" in before
    assert after.endswith(": fine\r\n")
