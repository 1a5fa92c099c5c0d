"""Files that other users may have written are read as data, within limits, or refused."""

import json
import os
import socket
from pathlib import Path

import pytest

from toolkit.text import untrusted
from toolkit.text.control import printable
from toolkit.text.untrusted import (
    RefusedFile,
    entries,
    finite,
    parse_json,
    read_bytes,
    whole,
)


def test_a_regular_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_bytes(file, limit=5) == b"12345"
    with pytest.raises(RefusedFile, match="has more than 4 bytes"):
        read_bytes(file, limit=4)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "link").symlink_to("secret")
    with pytest.raises(RefusedFile, match="is a link"):
        read_bytes(tmp_path / "link")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RefusedFile):
        read_bytes(tmp_path / "loop")


def test_no_part_of_a_path_below_a_folder_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").write_text("mine")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "logs").symlink_to(tmp_path / "elsewhere")
    assert read_bytes(run_dir / "logs/file") == b"mine"
    with pytest.raises(OSError):
        read_bytes(run_dir / "logs/file", below=run_dir)
    for outside in (tmp_path / "elsewhere/file", run_dir / "../elsewhere/file"):
        with pytest.raises(RefusedFile, match="is not below"):
            read_bytes(outside, below=run_dir)
    # The folder itself is the user's own choice.
    (tmp_path / "alias").symlink_to(tmp_path / "elsewhere")
    assert read_bytes(tmp_path / "alias/file", below=tmp_path / "alias") == b"mine"


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as at:
        at.bind(os.fspath(tmp_path / "socket"))
        for name, said in [
            ("pipe", "is a pipe"),
            ("folder", "is a folder"),
            ("socket", "is a link or a socket"),
        ]:
            with pytest.raises(RefusedFile, match=said):
                read_bytes(tmp_path / name)
    with pytest.raises(RefusedFile, match="is a device"):
        read_bytes("/dev/zero")
    with pytest.raises(RefusedFile, match="no file can have"):
        read_bytes("a\0b")
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "missing")


def test_nothing_stays_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(entries("/proc/self/fd"))
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing/file", tmp_path / "x"):
        with pytest.raises(OSError):
            read_bytes(path, below=tmp_path)
    assert len(entries("/proc/self/fd")) == before


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, b"\xff", "", "9" * 5000])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_text_of_json_can_be_written_anywhere() -> None:
    value = parse_json(r'{"\uD800": ["\udfff", "\ud83d\ude00", 1]}')
    assert value == {"\ufffd": ["\ufffd", "😀", 1]}
    json.dumps(value, ensure_ascii=False).encode()


def test_torn_lines_take_no_other_with_them(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b'{"a": 1}\n{"b": \n\xff\n[[\n\n3\n{"c": 2}')
    assert list(untrusted.lines_of_json(tmp_path / "lines")) == [{"a": 1}, 3, {"c": 2}]


def test_a_stream_yields_objects_and_parses_no_line_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ['{"a": 1}', "{", "[1]", "3", '"}', '{"b": 2} \r', '{"c": 3']
    (tmp_path / "lines").write_text("\n".join(lines), encoding="utf-8")
    parsed: list[str | bytes] = []
    parse = untrusted.parse_json

    def counted(line: str | bytes) -> object:
        parsed.append(line)
        return parse(line)

    monkeypatch.setattr(untrusted, "parse_json", counted)

    rows = list(untrusted.stream_json(tmp_path / "lines", limit=1000, line_limit=1000))

    assert rows == [{"a": 1}, {"b": 2}]
    assert len(parsed) == 3, "a line that is quickly seen to be no object costs an error of json"


def test_a_listing_tells_links_apart(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a").touch()
    (tmp_path / "c").symlink_to("b")
    found = [(e.name, e.is_folder, e.is_file) for e in entries(tmp_path)]
    assert found == [("a", False, True), ("b", True, False), ("c", False, False)]
    assert entries(tmp_path / "c") == entries(tmp_path / "a") == entries(tmp_path / "no") == []


def test_numbers_are_numbers() -> None:
    assert [whole(v) for v in (3, 0, -1, True, 3.0, "3", None, 2**60)] == [3, 0] + [None] * 6
    odd = (float("inf"), float("nan"), True, "1", 10**400, None)
    assert [finite(v) for v in (1, -2.5, *odd)] == [1.0, -2.5] + [None] * 6


def test_a_terminal_is_not_commanded() -> None:
    assert printable("a\tb\nc é 😀") == "a\tb\nc é 😀"
    assert printable("\x1b]52;c;aGk=\x07\x9b31m\u202e\r\ud800") == (
        r"\x1b]52;c;aGk=\x07\x9b31m\u202e\r\ud800"
    )
