"""The reader of bash: what bash itself makes of a text, with lines."""

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT
from toolkit.errors import InputError
from toolkit.lint.bash.ast import CommandList, Compound, FunctionDefinition, Node, SimpleCommand
from toolkit.lint.bash.parser import read_script


def commands(found: CommandList) -> Iterator[SimpleCommand]:
    """Yield the simple commands of a script, those in substitutions last."""
    for item in found:
        for pipeline in item.pipelines:
            for node in pipeline.nodes:
                yield from of_node(node)


def of_node(node: Node) -> Iterator[SimpleCommand]:
    if isinstance(node, FunctionDefinition):
        yield from of_node(node.body)
    elif isinstance(node, Compound):
        for inner in (*node.conditions, *node.bodies):
            yield from commands(inner)
    else:
        yield node
        for word in node.words:
            for part in word.parts:
                yield from commands(part.inner)


def seen(text: str) -> list[tuple[int, str]]:
    """Return line and words of every command."""
    return [
        (command.line, " ".join(word.shown for word in command.words))
        for command in commands(read_script(text, "x.sh").commands)
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a b # c\n# d\ne", [(1, "a b"), (3, "e")]),
        ("a \\\n  b \\\n  c\nd", [(1, "a b c"), (4, "d")]),
        ("a 'b\nc' \"d\ne\" f\ng", [(1, "a b\nc d\ne f"), (4, "g")]),
        ("a#b c'#'d \"#e\"", [(1, "a#b c#d #e")]),
        ("a; b & c && d || e | f", [(1, x) for x in "abcdef"]),
        ("if a; then b; elif c; then d; else e; fi", [(1, x) for x in "acbde"]),
        ("while a\ndo\n  b\ndone\nc", [(1, "a"), (3, "b"), (5, "c")]),
        ("for x in 1 2; do\n a $x\ndone", [(2, "a $x")]),
        ("for ((i=0; i<3; i++)); do a; done", [(1, "a")]),
        ("case $x in\n a|b) c ;;\n (d) e ;& *) f\nesac", [(2, "c"), (3, "e"), (3, "f")]),
        ("f() { a; }\nfunction g { b; }\nh() ( c )", [(1, "a"), (2, "b"), (3, "c")]),
        ("[[ $a == (b|c)* && $d =~ ^x;y$ ]] && e", [
            (1, "[[ $a == (b|c)* && $d =~ ^x;y$"), (1, "e")
        ]),
        ("[[ a ]];then", None),
        ("cat <<EOF\n$(a) 'b\nEOF\nc", [(1, "cat"), (4, "c")]),
        ("cat <<'A' <<-B\na\nA\n\tb\n\tB\nc", [(1, "cat"), (6, "c")]),
        ("x=$(cat <<E\n)\nE\n)\na", [(1, ""), (5, "a")]),
        ("a $(b; c) `d`", [(1, "a $(…) $(…)"), (1, "b"), (1, "c"), (1, "d")]),
        ("a $((1 + (2))) ${b:-c d} ${e%%$'\\n'*} \"${f:-it's}\"", [
            (1, "a $((1 + (2))) ${b:-c d} ${e%%\n*} ${f:-it's}")
        ]),
        ("((a > 1)) && b > c 2>&1 <<< d", [(1, "b")]),
        ("a=(1 # one\n  2) b=3 c d", [(1, "c d")]),
        ("time ! a | b", [(1, "a"), (1, "b")]),
        ("a <(b) >(c)", [(1, "a $(…) $(…)"), (1, "b"), (1, "c")]),
        ("@(a|b) !(c)", [(1, "@(a|b) !(c)")]),
        ("a $'it\\'s' $\"b\"", [(1, "a it's b")]),
    ],
)  # fmt: skip
def test_commands_are_found_with_their_lines(
    text: str, found: list[tuple[int, str]] | None
) -> None:
    if found is None:
        with pytest.raises(InputError, match="is missing for what begins here"):
            read_script(f"if {text} a\n", "x.sh")
    else:
        assert seen(text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\necho 'b\nc", "x.sh:2: this single quote is never closed"),
        ('a "b', "x.sh:1: this double quote is never closed"),
        ("a\nb $(c", "x.sh:2: this $( is never closed"),
        ("if a; then b", "x.sh:1: 'fi' is missing for what begins here"),
        ("{ a; ", "x.sh:1: '}' is missing for what begins here"),
        ("a\n)", "x.sh:2: ')' closes nothing here"),
        ("cat <<E\nb", "x.sh:1: the here-document has no end 'E'"),
        ("a | | b", "x.sh:1: a command is missing here"),
        ("for x in 1; {a,b}", "x.sh:1: the body of this loop cannot be read"),
        ("a ${b", "x.sh:1: } is missing for what begins here"),
        ("$(" * 3000 + ")" * 3000, "x.sh: nested too deeply to be read"),
    ],
)
def test_what_bash_refuses_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_script(text, "x.sh")
    assert str(caught.value) == message


def accepted(path: Path) -> bool:
    argv = ["bash", "-O", "extglob", "-n", str(path)]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def test_every_script_of_this_machine_that_bash_reads_is_read() -> None:
    folders = ("/usr/bin", "/usr/sbin", "/etc/init.d", "/usr/share/bash-completion/completions")
    found = sorted({path.resolve() for folder in folders for path in Path(folder).glob("*")})
    found += [*ROOT.glob("slurm/**/*.sh"), *ROOT.glob("slurm/examples/*"), *ROOT.glob("tests/*.sh")]
    read = 0
    for path in found:
        if not path.is_file() or not os.access(path, os.R_OK):
            continue
        with path.open("rb") as file:
            first = file.readline(100)
        if path.stat().st_size > 30_000:
            continue
        shell = first.startswith((b"#!/bin/sh", b"#!/bin/bash", b"#!/usr/bin/env bash"))
        if not shell and "completions" not in str(path):
            continue
        try:
            read_script(path.read_text(), str(path))
            read += 1
        except UnicodeDecodeError:
            continue
        except InputError as error:
            assert not accepted(path), error
    assert read > 20, "there are shell scripts on every machine"


CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0\r")
PIECES = st.sampled_from([
    *("a", "b c", "'", '"', "$(", ")", "`", "${x", "}", "{ ", "\n", ";", "&", "|", "<<E\n"),
    *("\nE\n", "if ", "then ", "fi\n", "do ", "done\n", "case x in ", "esac\n", "((", "))", "[[ "),
    *(" ]]", "\\"),
    *("x=(", "f() ", "#", "!", "<(", ">", "$'", "@(", "for x in ", "$((", "while "),
])  # fmt: skip


@settings(max_examples=300)
@given(st.lists(PIECES, max_size=12).map("".join))
def test_no_text_is_more_than_a_message(text: str) -> None:
    try:
        read_script(text, "x.sh")
    except InputError as error:
        assert str(error).startswith("x.sh:")


@settings(max_examples=60)
@given(words=st.lists(st.text(CHARACTERS, max_size=8), min_size=1, max_size=4))
def test_quoted_words_come_back_as_bash_gives_them(words: list[str]) -> None:
    (command,) = commands(read_script(f"cmd {shlex.join(words)}", "x.sh").commands)
    assert [word.literal for word in command.words[1:]] == words
