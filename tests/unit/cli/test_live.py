"""The live view, as rich draws it at a terminal of some width."""

import io
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console, ConsoleOptions
from rich.text import Text

from tests.support.terminal import OTHER_SCREEN, OWN_SCREEN
from toolkit.cli.live import LiveScreen
from toolkit.cli.summary import Row
from toolkit.runs.evidence.progress import Progress
from toolkit.runs.state import RunState

HOSTILE = "[red]x[/red] \x1b[31mred\x1b]0;title\x07 :boom: \u202egnp"
SHOWN = r"[red]x[/red] \x1b[31mred\x1b]0;title\x07 :boom: \u202egnp"
PROGRESS = Progress(
    step=840,
    steps_planned=1500,
    loss=0.31,
    step_s=0.21,
    left_s=138.6,
    spread_s=None,
    attempt=0,
    restart=0,
    silent_s=0.0,
)


def row(name: str, state: RunState, progress: Progress | None = None, note: str = "") -> Row:
    return Row(name=name, state=state, progress=progress, note=note)


def drawn(columns: int, *rows: Row, summary: dict[str, Any] | None = None) -> str:
    """Return what stays of a view without colours."""
    file = io.StringIO()
    console = Console(file=file, width=columns, height=24, markup=False, emoji=False)
    with LiveScreen(console) as screen:
        screen.show_rows(rows) if summary is None else screen.show_summary(summary)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


RUNS = [
    row("digits-1120-174558-k3f9", RunState.RUNNING, PROGRESS),
    row("bert-1120-174612-x9p2", RunState.PENDING, note="Resources: waits for nodes"),
]


def test_a_wide_terminal_has_a_line_for_each_run() -> None:
    assert drawn(120, *RUNS) == (
        "RUN                      STATE    PROGRESS\n"
        "digits-1120-174558-k3f9  RUNNING  ━━━━━━━━━━━━━             840/1500 (56%)  "
        "loss 0.31, 0.21 s per step, 2 min 19 s left\n"
        "bert-1120-174612-x9p2    PENDING  Resources: waits for nodes\n"
    )


def test_the_table_of_a_usual_terminal_has_the_bar_above_the_figures() -> None:
    assert drawn(80, *RUNS) == (
        "RUN                      STATE    PROGRESS\n"
        "digits-1120-174558-k3f9  RUNNING  ━━━━━━━━━━━━━━━━╸               840/1500 (56%)\n"
        "                                  loss 0.31, 0.21 s per step, 2 min 19 s left\n"
        "bert-1120-174612-x9p2    PENDING  Resources: waits for nodes\n"
    )


def test_a_narrow_terminal_has_the_progress_below_the_name() -> None:
    assert drawn(40, *RUNS) == (
        "digits-1120-174558-k3f9  RUNNING\n"
        "  ━━━━━━━━━━━━            840/1500 (56%)\n"
        "  loss 0.31, 0.21 s per step, 2 min 19 s\n"
        "  left\n"
        "bert-1120-174612-x9p2  PENDING\n"
        "  Resources: waits for nodes\n"
    )


def test_without_a_run_a_sentence_says_so() -> None:
    assert drawn(40) == "you have no active runs\n"


@pytest.mark.parametrize("columns", [40, 200])
def test_texts_of_runs_are_text(columns: int) -> None:
    shown = drawn(columns, row(HOSTILE, RunState.RUNNING, PROGRESS, note=HOSTILE))
    assert not any(char in shown for char in "\x1b\x07\u202e")
    assert "".join(shown.split()).count("".join(SHOWN.split())) == 2
    summary = {
        "uri": HOSTILE,
        "state": "FAILED",
        "reason": HOSTILE,
        "failure": {"summary": HOSTILE},
        "points": [{"name": HOSTILE, "state": "FAILED", "reason": HOSTILE, "metrics": None}],
    }
    shown = drawn(columns, summary=summary)
    assert not any(char in shown for char in "\x1b\x07\u202e")
    assert "".join(shown.split()).count("".join(SHOWN.split())) == 5


def test_more_steps_than_there_should_be_fill_the_bar() -> None:
    over = row("r", RunState.RUNNING, Progress(**{**vars(PROGRESS), "step": 2000}))
    assert f"{'━' * 24}  2000/1500 (133%)" in drawn(120, over)


class StoppedWhileDrawn:
    """A view during whose drawing the terminal's user types Ctrl-Z."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text("drawn")
        if not self.stopped:
            self.stopped = True
            signal.raise_signal(signal.SIGTSTP)

    stopped = False


def test_who_is_stopped_while_drawing_leaves_the_terminal_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, at_stop = io.StringIO(), []
    monkeypatch.setattr(os, "kill", lambda pid, number: at_stop.append((number, file.getvalue())))
    console = Console(file=file, width=80, height=24, force_terminal=True)
    with LiveScreen(console) as screen:
        screen._show(StoppedWhileDrawn())
        screen.pause(0)
        ((number, seen),) = at_stop
        assert number == signal.SIGSTOP
        assert seen.endswith(OWN_SCREEN)
        assert file.getvalue().count(OTHER_SCREEN) == 2
