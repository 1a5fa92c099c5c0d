"""Option parsers for sbatch, srun and torchrun: command lines and `#SBATCH` lines."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from toolkit.job.sbatch_options import ALLOWED, DECIDED, FLAGS, OPTIONAL, names
from toolkit.lint.scripts.values import Argument, Piece


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option with its long name."""

    name: str
    value: Argument | None
    """The value; None for an option without a value."""

    line: int

    @property
    def text(self) -> str:
        """The text of the value; empty without a value."""
        return self.value.text if self.value else ""

    @property
    def number(self) -> int | None:
        """The value as a whole number; None if it is unknown or not a number."""
        return self.value.number if self.value else None

    @property
    def value_line(self) -> int:
        """The line of the value; for a variable, the line of its assignment."""
        return self.value.line_at(0) if self.value else self.line


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The option names of a program, and the options that take a value."""

    short: Mapping[str, str]
    """Long names by letter."""

    flags: frozenset[str]
    """Options without a value."""

    optional: frozenset[str] = frozenset()
    """Options that take a value only after `=`, or directly after the letter."""

    names: frozenset[str] = frozenset()
    """All long names; a unique prefix of a long name is also valid."""

    underscores: bool = False
    """Whether `_` is equivalent to `-`."""

    others: Mapping[str, str] = field(default_factory=dict)
    """Aliases from older versions or other programs, with the names that rules use."""

    def full(self, written: str) -> str:
        """Return the complete long name for an alias or a prefix."""
        name = written.replace("_", "-") if self.underscores else written
        name = self.others.get(name, name)
        if name in self.names:
            return name
        candidates = [option for option in self.names if option.startswith(name)]
        return candidates[0] if len(candidates) == 1 and name else name


def _short(words: str) -> dict[str, str]:
    return {word[0]: word[2:] for word in words.split()}


_BOTH = """
    A=account b=begin B=extra-node-info c=cpus-per-task C=constraint d=dependency D=chdir e=error
    F=nodefile G=gpus H=hold h=help i=input J=job-name k=no-kill L=licenses M=clusters
    m=distribution N=nodes n=ntasks o=output O=overcommit p=partition Q=quiet q=qos S=core-spec
    s=oversubscribe t=time v=verbose V=version w=nodelist x=exclude
"""
_OLD = {"tasks-per-node": "ntasks-per-node"}
_QUERIES = frozenset({"help", "ignore-pbs", "quiet", "usage", "verbose", "version"})

SBATCH = Grammar(
    short=_short(f"{_BOTH} a=array W=wait"),
    flags=FLAGS | _QUERIES | {"no-requeue", "requeue", "test-only", "wait"},
    optional=OPTIONAL | {"parsable"},
    names=ALLOWED | DECIDED.keys(),
    others=_OLD,
)
"""sbatch(1)."""

PYXIS = names("""
    container-entrypoint container-entrypoint-log container-env container-image container-mount-home
    container-mounts container-name container-readonly container-remap-root container-save
    container-workdir container-writable no-container-entrypoint no-container-entrypoint-log
    no-container-mount-home no-container-remap-root
""")
"""Options that pyxis adds to srun (pyxis, args.c)."""

_PYXIS_VALUED = {
    *("container-env", "container-image", "container-mounts", "container-name"),
    *("container-save", "container-workdir"),
}
_SRUN_FLAGS = names("""
    disable-status exact interactive label multi-prog no-allocate overlap preserve-env
    test-only unbuffered wait-for-children whole
""")

SRUN = Grammar(
    short=_short(
        f"{_BOTH} E=preserve-env I=immediate K=kill-on-bad-exit l=label r=relative T=threads "
        "u=unbuffered W=wait X=disable-status Z=no-allocate"
    ),
    flags=FLAGS | _QUERIES | _SRUN_FLAGS | (PYXIS - _PYXIS_VALUED),
    optional=OPTIONAL | {"bcast", "compress", "immediate", "kill-on-bad-exit", "pty", "send-libs"},
    names=(ALLOWED | DECIDED.keys() | _SRUN_FLAGS | PYXIS)
    | {"bcast", "compress", "cpu-bind", "het-group", "immediate", "jobid", "kill-on-bad-exit"}
    | {"mpi", "pty", "relative", "send-libs", "slurmd-debug", "threads", "wait"},
    others=_OLD,
)
"""srun(1)."""

_TORCHRUN_FLAGS = frozenset({"module", "no-python", "run-path", "standalone", "virtual-local-rank"})
TORCHRUN = Grammar(
    short={"m": "module", "r": "redirects", "t": "tee"},
    flags=_TORCHRUN_FLAGS,
    names=_TORCHRUN_FLAGS
    | names("""
    event-log-handler local-addr local-ranks-filter log-dir logs-specs master-addr master-port
    max-restarts monitor-interval nnodes node-rank nproc-per-node rdzv-backend rdzv-conf
    rdzv-endpoint rdzv-id redirects role shutdown-timeout signals-to-handle start-method tee
"""),
    underscores=True,
)
"""torch.distributed.run."""


class CommandLine(NamedTuple):
    """The options at the beginning of a command line, and the rest."""

    options: dict[str, Option]
    """The options by long name."""

    rest: tuple[Argument, ...]
    """The words after the options."""

    unsure: bool = False
    """Whether an unknown word among the options may contain more options."""


def read_options(arguments: Sequence[Argument], grammar: Grammar) -> CommandLine:
    """Read the options at the beginning of a command line.

    An unknown word contains options if an option of this program follows. If a program follows,
    the word may contain options.
    """
    options: dict[str, Option] = {}
    at, unsure = 0, False
    while at < len(arguments):
        argument = arguments[at]
        if _unknown(argument):
            after = arguments[at + 1] if at + 1 < len(arguments) else None
            options_follow = after and (_unknown(after) or _belongs(after, grammar))
            if not options_follow:  # the word is the program, or options that end with the program
                unsure = unsure or (after is not None and not after.text.startswith("-"))
                break
            at, unsure = at + 1, True
            continue
        if not argument.text.startswith("-") or argument.text == "-":
            break
        at += 1
        if argument.text == "--":
            break
        for name, value in _read_one(argument, grammar):
            if value is None and name not in grammar.flags | grammar.optional:
                value = arguments[at] if at < len(arguments) else None
                at += 1
            options[name] = Option(name=name, value=value, line=argument.line_at(0))
    return CommandLine(options, tuple(arguments[at:]), unsure)


def _unknown(argument: Argument) -> bool:
    """Whether a word is entirely unknown, including whether it is one word."""
    pieces = [piece for piece in argument.pieces if piece.text]
    return bool(pieces) and all(
        not piece.known and (not piece.quoted or piece.name.endswith("[@]")) for piece in pieces
    )


def _belongs(argument: Argument, grammar: Grammar) -> bool:
    """Whether a word is a long option of the program."""
    written = argument.text[2:].partition("=")[0] if argument.text.startswith("--") else ""
    return bool(written) and grammar.full(written) in grammar.names


def _read_one(argument: Argument, grammar: Grammar) -> Iterator[tuple[str, Argument | None]]:
    """Yield the long names of the options in one word, with their values in the word."""
    text = argument.text
    if text.startswith("--"):
        written, equals, _ = text[2:].partition("=")
        yield grammar.full(written), argument.cut(len(written) + 3) if equals else None
        return
    for at in range(1, len(text)):
        name = grammar.short.get(text[at], text[at])
        if name not in grammar.flags:
            start = at + 1 + (text[at + 1 : at + 2] == "=")
            yield name, argument.cut(start) if at + 1 < len(text) else None
            return
        yield name, None


# ---- `#SBATCH` lines

_SUFFIXES = (".sbatch", ".sh", ".slurm", ".job")
_LINE = re.compile(r"#SBATCH(?=\s|$)")


@dataclass(frozen=True, kw_only=True)
class Directive:
    """One `#SBATCH` line."""

    line: int
    options: tuple[Option, ...]
    stray: tuple[str, ...]
    """Words that are not options."""

    late: bool
    """Whether the line is below a command, so that sbatch ignores it."""


def is_batch_script(path: str, text: str) -> bool:
    """Whether a file is a batch script, rather than a job file."""
    if path.endswith(_SUFFIXES) or text.startswith("#!"):
        return True
    return re.search(r"^#SBATCH\s", text, re.MULTILINE) is not None


def read_directives(text: str, hidden: range | None = None) -> Iterator[Directive]:
    """Yield the directives in order, up to the lines `hidden` of a nested script."""
    late = False
    for number, row in enumerate(text.splitlines(), start=1):
        if hidden is not None and number in hidden:
            return
        if _LINE.match(row):
            words: Sequence[Argument] = [
                Argument(pieces=(Piece(text=word, line=number),), line=number)
                for word in _words(row[len("#SBATCH") :])
            ]
            collected: list[Option] = []
            stray: list[str] = []
            while words:
                if words[0].text.startswith("-") and words[0].text != "-":
                    options, words, _ = read_options(words, SBATCH)
                    collected += options.values()
                else:
                    stray.append(words[0].text)
                    words = words[1:]
            yield Directive(line=number, options=tuple(collected), stray=tuple(stray), late=late)
        elif row.strip() and not row.lstrip().startswith("#"):
            late = True


def _words(row: str) -> Iterator[str]:
    """Split as sbatch does: quotes group, backslashes escape even in quotes, `$` is literal."""
    word, in_word, quote, escaped = list[str](), False, "", False
    for char in row:
        if escaped:
            word.append(char)
            escaped = False
        elif char == "\\":
            in_word = escaped = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                word.append(char)
        elif char in "\"'":
            in_word, quote = True, char
        elif char.isspace():
            if in_word:
                yield "".join(word)
            word, in_word = [], False
        elif char == "#" and not in_word:
            return
        else:
            word.append(char)
            in_word = True
    if in_word:
        yield "".join(word)
