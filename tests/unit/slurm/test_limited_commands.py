"""A command that prints without end is ended, whichever output it writes to."""

import tempfile
import time
from pathlib import Path

import pytest

from toolkit.slurm import commands
from toolkit.slurm.commands import TooLong, run_limited


def shell(text: str, **options: object) -> tuple[int, str, str]:
    done = run_limited(["sh", "-c", text], limit_s=30, **options)  # type: ignore[arg-type]
    return done.returncode, done.stdout, done.stderr


FLOODS_OF_STDERR = (
    "exec yes >&2",
    "exec >&-; exec yes >&2",
    "exec >&-; yes >&2; true",  # printed by a child, which ends when nobody reads it
    "echo an answer; exec >&-; sleep 0.2; exec yes >&2",
)


# What is passed on is not kept, and has no limit.
@pytest.mark.parametrize(
    ("text", "streamed"),
    [("exec yes", False), *((text, on) for text in FLOODS_OF_STDERR for on in (False, True))],
)
def test_a_flood_is_ended(
    text: str, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))  # no output is written to disk
    shown: list[bytes] = []
    began = time.monotonic()
    with pytest.raises(TooLong, match="sh prints more than 1 MiB: ended"):
        shell(text, show=shown.append if streamed else None)
    assert time.monotonic() - began < 20


def test_both_outputs_are_returned_whole() -> None:
    assert shell("echo a; echo b >&2; exit 3") == (3, "a\n", "b\n")
    assert shell("exec >&-; sleep 0.2; echo b >&2; sleep 0.2; echo c >&2; exit 3") == (
        3,
        "",
        "b\nc\n",
    )
    status, stdout, stderr = shell("seq 99999; seq 99999 >&2")
    assert (status, stdout) == (0, stderr)
    assert stdout.endswith("\n99999\n")


def test_a_process_in_the_background_does_not_delay_the_answer() -> None:
    """As the master of ssh's shared connection, which keeps stderr."""
    began = time.monotonic()
    assert shell("sleep 20 >/dev/null & echo a; echo b >&2") == (0, "a\n", "b\n")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "text", ["exec sleep 60", "exec >&-; exec sleep 60", "exec >&- 2>&-; exec sleep 60"]
)
def test_a_silent_command_is_ended(text: str) -> None:
    with pytest.raises(TooLong, match=r"sh gives no answer within 0\.5 s: ended"):
        run_limited(["sh", "-c", text], limit_s=0.5)
