"""YAML that every reader reads alike is accepted; other YAML is refused with its line."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from toolkit.errors import InputError
from toolkit.text.yaml_reader import Ambiguous, read_document, read_text


def refusal(text: str) -> str:
    """Return why a text is no YAML that we read."""
    with pytest.raises(InputError) as caught:
        read_document(text, "job.yaml")
    return str(caught.value)


def complaints(text: str) -> str:
    """Return the problems that leave something to read."""
    return "\n".join(map(str, read_document(text, "job.yaml").problems))


def test_every_value_knows_its_line() -> None:
    document = read_document(
        "# a comment\nname: a\nargs:\n- x\n- y: {z: 1}\n\nenv: {A: b,\n  C: d}\n", "job.yaml"
    )
    assert document.data == {
        "name": "a",
        "args": ("x", {"y": {"z": 1}}),
        "env": {"A": "b", "C": "d"},
    }
    assert document.places == {
        (): "job.yaml:2",
        ("name",): "job.yaml:2",
        ("args",): "job.yaml:3",
        ("args", 0): "job.yaml:4",
        ("args", 1): "job.yaml:5",
        ("args", 1, "y"): "job.yaml:5",
        ("args", 1, "y", "z"): "job.yaml:5",
        ("env",): "job.yaml:7",
        ("env", "A"): "job.yaml:7",
        ("env", "C"): "job.yaml:8",
    }
    assert document.place(("env", "C", "nothing", 3)) == "job.yaml:8"
    assert document.problems == ()


@pytest.mark.parametrize(
    "text",
    [
        "a:\n\tb: 1\n",
        "é: é\na:\n\tb: 1\n",
        "a: é\n\tb: 1\n",
        "\ta: 1\n",
        "a:\n- \tb\n",
        "a:\r\n\tb: 1\r\n",
        "\ufeffa:\n\tb: 1\n".removeprefix("\ufeff"),
    ],
)
def test_a_tab_is_called_a_tab(text: str) -> None:
    line = text[: text.index("\t")].count("\n") + 1
    assert refusal(text) == f"job.yaml:{line}: a tab; YAML is indented with spaces"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n---\na: 2\n", "job.yaml:2: a second document begins; one file holds one"),
        ("a: [1\n", "job.yaml:2: not YAML: did not find expected ',' or ']'"),
        ("a: 1\nb: @x\n", "job.yaml:2: not YAML: found character that cannot start any token"),
        ("a: b: c\n", "job.yaml:1: not YAML: mapping values are not allowed in this context"),
        ("a: *nobody\n", "job.yaml:1: not YAML: found undefined alias"),
        ("a: &x [*x]\n", "job.yaml:1: an alias that never ends"),
        ("&x a: &y {b: *y}\n", "job.yaml:1: an alias that never ends"),
        ('a: "\\ud800"\n', "job.yaml:1: not YAML: found invalid Unicode character escape code"),
        ("%YAML 3.0\n---\na: b\n", "job.yaml:1: not YAML: found incompatible YAML document"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_line(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize("char", ["\0", "\x07", "\x1b", "\x7f", "\x85", "\x9f", "\u2028", "\u2029"])
@pytest.mark.parametrize("style", ["{}", "'{}'", '"{}"', "x # {}"])
def test_characters_that_readers_take_differently_are_refused(char: str, style: str) -> None:
    assert refusal(f"a: 1\nb: {style.format(char)}\n") == (
        f"job.yaml:2: the character U+{ord(char):04X}, which not every reader of YAML accepts"
    )


@pytest.mark.parametrize("char", ["\ufeff", "\ufffe", "\uffff", "\ud800", "\udfff"])
def test_characters_that_no_text_file_holds_are_refused(char: str) -> None:
    assert refusal(f"a: 1\nb: {char}\n") == (
        f"job.yaml:2: the character U+{ord(char):04X}, which not every reader of YAML accepts"
    )


@pytest.mark.parametrize("depth", [101, 1_000, 200_000])
@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_refused_and_crashes_nothing(opening: str, depth: int) -> None:
    assert refusal(opening * depth) == "job.yaml:1: more than 100 levels"


def test_an_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 8):
        lines.append(f"a{level}: &a{level} [" + ", ".join([f"*a{level - 1}"] * 10) + "]")
    message = refusal("\n".join(lines))
    assert message == "job.yaml:1: more than 100000 values, aliases counted at each use"


def test_aliases_are_read_where_they_end() -> None:
    assert read_document("a: &x [1, b]\nc: *x\n", "job.yaml").data == {"a": (1, "b"), "c": (1, "b")}


def test_keys_that_stand_twice_are_refused_at_every_level() -> None:
    text = "name: a\nenv: {A: x,\n  A: y}\nresources:\n  nnodes: 1\n  'nnodes': 2\nname: b\n"
    assert complaints(text).splitlines() == [
        "job.yaml:3: duplicate key 'A'; the first is at job.yaml:2",
        "job.yaml:6: duplicate key 'nnodes'; the first is at job.yaml:5",
        "job.yaml:7: duplicate key 'name'; the first is at job.yaml:1",
    ]
    assert read_document(text, "job.yaml").data["name"] == "a"


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        ("!!python/object/apply:os.system [reboot]", "python/object/apply:os.system"),
        ("!!python/tuple [a]", "python/tuple"),
        ("!!python/name:os.system ''", "python/name:os.system"),
        ("!!python/object:x.Y {a: b}", "python/object:x.Y"),
        ("!!set {a, b}", "set"),
        ("!!omap [a: b]", "omap"),
        ("!!str [a]", "str"),
        ("!!map [a]", "map"),
        ("!!seq {a: b}", "seq"),
        ("!!binary aGk=", "binary"),
        ("!!int '3'", "int"),
        ("!!float 3", "float"),
        ("!!null ''", "null"),
        ("!!int 3", "int"),
        ("!!bool no", "bool"),
        ("!!timestamp 2001-01-01x", "timestamp"),
    ],
)
def test_tags_are_refused(value: str, tag: str) -> None:
    assert complaints(f"a: 1\nb: {value}\n") == (
        f"job.yaml:2: the tag 'tag:yaml.org,2002:{tag}' has no meaning here; leave it out"
    )


def test_tags_of_ones_own_are_refused() -> None:
    assert complaints("a: !mine x\nb: !mine [x]\n? !mine c\n: x\n").splitlines() == [
        "job.yaml:1: the tag '!mine' has no meaning here; leave it out",
        "job.yaml:2: the tag '!mine' has no meaning here; leave it out",
        "job.yaml:3: the tag '!mine' has no meaning here; leave it out",
    ]


def test_merge_keys_are_refused() -> None:
    assert complaints("a: &x {b: c}\nd:\n  <<: *x\n  e: f\n") == (
        "job.yaml:3: merge keys (<<) are not read; write the keys out"
    )


def test_keys_that_are_no_strings_are_refused() -> None:
    text = "no: x\n1: x\n012: x\n~: x\n? [a]\n: x\n1.50: x\ntrue: x\n2001-01-01: x\n"
    assert complaints(text).splitlines() == [
        'job.yaml:1: as a key, no is a boolean to YAML 1.1; write "no" if you mean the text',
        'job.yaml:2: the key 1 is not a string; write "1"',
        "job.yaml:3: as a key, 012 is 10 to YAML 1.1 and 12 to YAML 1.2; "
        'write "012" if you mean the text',
        'job.yaml:4: the key ~ is not a string; write "~"',
        "job.yaml:5: a key must be a single word",
        'job.yaml:7: the key 1.50 is not a string; write "1.50"',
        'job.yaml:8: the key true is not a string; write "true"',
        "job.yaml:9: as a key, 2001-01-01 is a date to YAML 1.1; "
        'write "2001-01-01" if you mean the text',
    ]


@pytest.mark.parametrize(
    ("word", "reading"),
    [
        ("no", "a boolean to YAML 1.1"),
        ("Yes", "a boolean to YAML 1.1"),
        ("ON", "a boolean to YAML 1.1"),
        ("off", "a boolean to YAML 1.1"),
        ("1e-3", "a number to YAML 1.2"),
        ("1.0e5", "a number to YAML 1.2"),
        ("0o17", "a number to YAML 1.2"),
        ("09", "a number to YAML 1.2"),
        ("012", "10 to YAML 1.1 and 12 to YAML 1.2"),
        ("-012", "-10 to YAML 1.1 and -12 to YAML 1.2"),
        ("1_000", "a number to YAML 1.1"),
        ("0b11", "a number to YAML 1.1"),
        ("-0x1F", "a number to YAML 1.1"),
        ("4:00:00", "a number to YAML 1.1"),
        ("1:30.5", "a number to YAML 1.1"),
        ("2001-01-01", "a date to YAML 1.1"),
        ("2001-01-01 10:00:00", "a date to YAML 1.1"),
        ("9" * 19, "a number that not every reader can hold"),
        ("0x" + "f" * 5000, "a number that not every reader can hold"),
    ],
)
def test_words_that_are_read_differently_are_kept_as_written(word: str, reading: str) -> None:
    value = read_document(f"a: {word}\n", "job.yaml").data["a"]
    assert (type(value), value) == (Ambiguous, word)
    assert value.reason == f'{word} is {reading}; write "{word}" if you mean the text'


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("null", None),
        ("~", None),
        ("", None),
        ("True", True),
        ("false", False),
        ("0", 0),
        ("-12", -12),
        ("0x1F", 31),
        ("3.10", 3.1),
        ("1.0e+3", 1000.0),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        ("9" * 18, 10**18 - 1),
    ],
)
def test_words_that_are_read_alike_have_their_value(written: str, value: object) -> None:
    document = read_document(f"a: {written}\n", "job.yaml")
    assert (document.data["a"], type(document.data["a"])) == (value, type(value))
    assert document.written == {("a",): written}


@pytest.mark.parametrize("word", ["no", "1e-3", "012", "2001-01-01", "null", "true", "3.10", "<<"])
@pytest.mark.parametrize("style", ["'{}'", '"{}"', "!!str {}", "|-\n  {}", ">-\n  {}"])
def test_quoted_and_tagged_words_are_strings(word: str, style: str) -> None:
    document = read_document(f"a: {style.format(word)}\n", "job.yaml")
    assert (type(document.data["a"]), document.data["a"]) == (str, word)
    assert document.problems == ()


# ---- Beside PyYAML. YAML 1.2's core schema is written out here once more, from its table.

CORE_NOT_TEXT = re.compile(
    r"""(?x) (?: null | Null | NULL | ~ | )
    | (?: true | True | TRUE | false | False | FALSE )
    | [-+]? [0-9]+ | 0o [0-7]+ | 0x [0-9a-fA-F]+
    | [-+]? (?: \. [0-9]+ | [0-9]+ (?: \. [0-9]* )? ) (?: [eE] [-+]? [0-9]+ )?
    | [-+]? (?: \.inf | \.Inf | \.INF ) | \.nan | \.NaN | \.NAN"""
)
WORDS = st.one_of(
    st.from_regex(r"[-+]?[0-9_]{1,4}([.:][0-9_]{0,3}){0,3}([eE][-+]?[0-9]{1,2})?", fullmatch=True),
    st.from_regex(r"[-+]?0[xob]?[0-9a-fA-F_]{0,4}", fullmatch=True),
    st.from_regex(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ][0-9]{1,2}:[0-9]{2}:[0-9]{2}Z?)?"),
    st.from_regex(
        r"(?i)(y|n|yes|no|on|off|true|false|null|~|[-+]?\.inf|\.nan|=|<<)", fullmatch=True
    ),
    st.text("0123456789eE+-._:~xobyYnNtTfF", max_size=8),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=8),
    st.text(" #,[]{}&*!|>'\"%@`=<?:-ab1", max_size=6),
)


def pyyaml(text: str) -> Any:
    """Return what PyYAML reads, or its error."""
    try:
        return yaml.load(text, Loader=yaml.SafeLoader)["key"]
    except (yaml.YAMLError, ValueError) as error:
        return error


@pytest.mark.slow
@settings(deadline=None, max_examples=600)
@given(word=WORDS)
@example("=")
@example("<<")
@example("1:2")
@example("1.")
@example("._1")
@example("+.1e+3")
@example("2001-99-99")
def test_a_plain_word_is_the_string_that_both_yamls_read_or_none(word: str) -> None:
    text = f"key: {word}\n"
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError):
        assume(False)
    assert root is not None
    assume(len(root.value) == 1 and isinstance(root, yaml.MappingNode))
    node = root.value[0][1]
    assume(isinstance(node, yaml.ScalarNode) and not node.style and "!" not in word)
    assume(not re.search("[\u2028\u2029\x7f-\x9f\ufeff]", word))
    document = read_document(text, "job.yaml")
    ours, old = document.data["key"], pyyaml(text)
    if node.value in ("=", "<<"):  # PyYAML has no value for what YAML 1.1 reserved
        assert (type(ours), ours) == (str, node.value)
    elif isinstance(old, str) and not CORE_NOT_TEXT.fullmatch(node.value):
        assert (type(ours), ours) == (str, old)
    else:
        assert type(ours) is not str
        if not isinstance(ours, Ambiguous | float) and not isinstance(old, Exception):
            assert ours == old  # a number, boolean or null that is the same to both


# ---- Files


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xef\xbb\xbfname: a\n")
    assert read_text(file) == "name: a\n"


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    for path, message in [
        (tmp_path / "none.yaml", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "latin.yaml", "is not UTF-8 text (byte 9)"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
    ]:
        with pytest.raises(InputError) as caught:
            read_text(path)
        assert str(caught.value) == f"{path}: {message}"
