"""The last traceback in what a rank has printed."""

import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.supervisor.evidence.first_error import Attempt, last_failure
from toolkit.supervisor.evidence.traceback import last_trace

FRAMES = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "    f()"]
CHAINED = [
    *FRAMES,
    "KeyError: 'x'",
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    *FRAMES,
    "ValueError: y",
    "with more to say",
]
GROUP = [
    "  + Exception Group Traceback (most recent call last):",
    '  |   File "a.py", line 1, in <module>',
    "  | ExceptionGroup: two (1 sub-exception)",
    "  +-+---------------- 1 ----------------",
    "    | Traceback (most recent call last):",
    "    | ValueError: a",
    "    +------------------------------------",
]
FATAL = [
    "Fatal Python error: Segmentation fault",
    "",
    "Current thread 0x1 (most recent call first):",
]


@pytest.mark.parametrize(
    ("printed", "message", "lines", "rank", "at_end"),
    [
        (CHAINED, "ValueError: y", CHAINED, None, True),
        (
            [*FRAMES, "KeyError: 1", "caught it", *FRAMES, "Error"],
            "Error",
            [*FRAMES, "Error"],
            None,
            True,
        ),
        ([f"[rank3]: {line}" for line in CHAINED if line], "ValueError: y", None, 3, True),
        (["[rank3]: " + FRAMES[0], "[rank3]: X: y", "bye"], "X: y", [FRAMES[0], "X: y"], 3, False),
        (
            [*FRAMES, "X: y", "[rank1]:[W1121 x.cpp:1] Warning"],
            "X: y",
            [*FRAMES, "X: y"],
            1,
            True,
        ),
        (GROUP, "ExceptionGroup: two (1 sub-exception)", GROUP, None, True),
        (FATAL, FATAL[0], FATAL, None, True),
        ([*FRAMES, "X: y", *FRAMES[:2]], "X: y", [*FRAMES, "X: y"], None, True),
    ],
    ids=["chained", "the last", "by torch", "goes on", "noise", "group", "fatal", "cut"],
)
def test_the_last_traceback_is_found_whole(
    printed: list[str], message: str, lines: list[str] | None, rank: int | None, at_end: bool
) -> None:
    found = last_trace(["before", *printed])
    assert found is not None
    assert (found.message, found.rank, found.at_end) == (message, rank, at_end)
    assert lines is None or list(found.lines) == lines


def test_what_is_no_traceback_is_none() -> None:
    assert last_trace([]) is None
    assert last_trace(["SyntaxError: of somebody else", "  Traceback in prose"]) is None


@pytest.mark.parametrize("lines", [FRAMES[:1], FRAMES, ["[rank1]: " + FRAMES[0]]])
def test_a_rank_that_was_killed_within_its_traceback_has_said_nothing(lines: list[str]) -> None:
    assert last_trace(lines) is None


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("OSError('no space (left)')", "OSError: no space (left)"),
        ('my.Error("it\'s full")', "my.Error: it's full"),
        ("KeyError()", "KeyError"),
        ("OSError(28, 'No space')", "OSError(28, 'No space')"),
    ],
)
@pytest.mark.parametrize("before", [[], FRAMES[:1], FRAMES, [*FRAMES, "OSError: full"]])
def test_an_exception_that_python_dumps_is_named(
    before: list[str], exception: str, message: str, tmp_path: Path
) -> None:
    dump = ["object address  : 0x7f1a", "object refcount : 2", "object type     : 0x11"]
    dump += ["object type name: OSError", f"object repr     : {exception}", "lost sys.stderr"]
    found = last_trace(["step 4", *before, *dump])
    assert found is not None
    assert found.message == message
    assert found.at_end
    stderr = tmp_path / "attempt_0" / "0" / "stderr.log"
    stderr.parent.mkdir(parents=True)
    stderr.write_text("".join(f"{line}\n" for line in [*before, *dump]))
    first = last_failure(Attempt(str(tmp_path), 0), str(tmp_path))
    assert first is not None
    assert first.message == message


def test_a_real_dump_of_python_is_named() -> None:
    script = "import sys; del sys.stderr; raise OSError('no space left')"
    rank = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert "object repr" in rank.stderr
    found = last_trace(rank.stderr.splitlines())
    assert found is not None
    assert found.message == "OSError: no space left"


def test_a_dump_after_an_unfinished_line_is_read() -> None:
    dump = ["OSError: fullobject address  : 0x7f1a", "object repr     : OSError('full')"]
    found = last_trace([*FRAMES, *dump, "lost sys.stderr"])
    assert found is not None
    assert found.message == "OSError: full"
