"""Lines in a file: whole, in order, and where they can be found."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from train.rundir import jsonl
from train.rundir.jsonl import Journal


def test_lines_follow_each_other(tmp_path: Path) -> None:
    lines = Journal(tmp_path / "lines")
    for text in ("one", "two", "three"):
        lines.append(text)
        # Nothing waits in a buffer: a kill right now loses no line.
        assert (tmp_path / "lines").read_text().endswith(f"{text}\n")
    assert (tmp_path / "lines").read_text() == "one\ntwo\nthree\n"


def test_a_line_torn_by_another_writer_meanwhile_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = Journal(path)
    lines.append("one")
    lines.append("two")
    with path.open("a") as killed:
        killed.write('{"torn')
    lines.append("three")
    lines.append("four")
    assert path.read_text() == 'one\ntwo\n{"torn\nthree\nfour\n'


def test_a_removed_file_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = Journal(path)
    for text in ("one", "two"):
        lines.append(text)
    path.unlink()
    lines.append("three")
    assert path.read_text() == "three\n"


def open_files(path: Path) -> int:
    return sum(link.exists() and link.samefile(path) for link in Path("/proc/self/fd").iterdir())


def test_lines_that_are_rare_leave_the_file_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    lines = Journal(path)
    lines.append("one")
    assert open_files(path) == 0
    # Any line now follows the one before too late.
    monkeypatch.setattr(jsonl, "OPEN_S", -1.0)
    lines.append("two")
    assert open_files(path) == 0


def test_lines_that_come_fast_find_the_file_open_and_it_is_let_go_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    monkeypatch.setattr(jsonl, "OPEN_S", 1e9)
    lines = Journal(path)
    for text in ("one", "two", "three"):
        lines.append(text)
    assert open_files(path) == 1
    del lines
    assert open_files(path) == 0


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    # A limit on the size of files stands for the full disk: the same error path, without root.
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from train.rundir.jsonl import Journal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))\n"
        "lines = Journal(Path(sys.argv[1]))\n"
        "lines.append('12345678')\n"  # 9 bytes: one is left
        "lines.append('abcdefgh')\n"  # torn after a byte
        "resource.setrlimit(resource.RLIMIT_FSIZE, (11, resource.RLIM_INFINITY))\n"
        "try: lines.append('x')\n"
        "except OSError as error: print(error.errno)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (99, resource.RLIM_INFINITY))\n"
        "lines.append('y')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    path = tmp_path / "lines"
    subprocess.run([sys.executable, "-c", script, str(path)], env=env, check=True)
    # Only torn lines are lost.
    assert path.read_text() == "12345678\na\ny\n"


def test_two_threads_append_to_one_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's thread writes events, too."""
    journal, write = Journal(tmp_path / "events.jsonl"), os.write
    others: list[threading.Thread] = []

    def slow(handle: int, data: bytes) -> int:
        if not others:  # meanwhile another thread comes
            others.append(threading.Thread(target=journal.append, args=("{}",)))
            others[0].start()
            others[0].join(0.5)
        return write(handle, data)

    monkeypatch.setattr(os, "write", slow)
    journal.append("{}")
    others[0].join()
    assert (tmp_path / "events.jsonl").read_text() == "{}\n{}\n"
