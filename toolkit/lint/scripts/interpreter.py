"""The walk over a script: it records every call, including steps and torchruns."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Literal

from toolkit.errors import InputError
from toolkit.job.sbatch_options import names
from toolkit.lint.bash import ast
from toolkit.lint.bash.parser import DECLARES, read_script
from toolkit.lint.scripts.launchers import Launcher, launcher_of
from toolkit.lint.scripts.options import SRUN, Option, read_options
from toolkit.lint.scripts.values import Argument, Values


@dataclass(frozen=True, kw_only=True, eq=False)
class SrunStep:
    """An srun command."""

    options: dict[str, Option]
    program: tuple[Argument, ...]
    call: "Call"
    unsure: bool = False
    """Whether an unknown variable may contain more options."""

    @property
    def line(self) -> int:
        """The line of the srun."""
        return self.call.line


@dataclass(frozen=True, kw_only=True, eq=False)
class Torchrun:
    """A torchrun, `python -m torch.distributed.run`, or an equivalent launcher."""

    launcher: Launcher
    options: dict[str, Option]
    """The options by torchrun's names."""

    unsure: bool
    """Whether an unknown variable or a file may contain more options."""

    line: int
    step: SrunStep | None
    remote: str
    """The program that starts it on other nodes, if not srun."""

    call: "Call"


@dataclass(frozen=True, kw_only=True)
class Trap:
    """A `trap` command."""

    signals: tuple[str, ...]
    handler: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An assignment to a variable."""

    name: str
    value: Argument
    line: int
    exported: bool
    prefix: bool
    """Whether the assignment applies to one command only."""

    call: "Call"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Surroundings:
    """The context of a command."""

    level: Literal["batch", "task", "handler"] = "batch"
    """`task` for a command on every node; `handler` for a command of a trap."""

    function: str = ""
    """The enclosing function; empty outside functions."""

    container: str = ""
    """The runtime of the enclosing container; empty without a container."""

    captured: bool = False
    """Whether its output becomes part of a word, except in `echo` and `printf`."""

    background: bool = False
    looped: bool = False
    piped_to: ast.SimpleCommand | None = None
    """The command that reads its output."""

    on_nodes: bool = False
    """Whether a shell on each node expands its words."""

    step: SrunStep | None = None
    remote: str = ""
    parent: "Call | None" = None
    """The call that starts the command, such as srun or `bash -c`."""

    depth: int = 0
    """The nesting depth of the programs and shells that start the command."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Call(_Surroundings):
    """A command with its expanded arguments."""

    arguments: tuple[Argument, ...]
    line: int
    node: ast.SimpleCommand
    errexit: bool
    pipefail: bool
    order: int

    @property
    def name(self) -> str:
        """The program's name without the folder."""
        return self.arguments[0].text.rpartition("/")[2] if self.arguments else ""

    @property
    def words(self) -> list[str]:
        """The texts of the arguments; the first is the program."""
        return [argument.text for argument in self.arguments]


@dataclass
class Walk:
    """The collected steps and settings, in the order of the script."""

    calls: list[Call] = field(default_factory=list)
    steps: list[SrunStep] = field(default_factory=list)
    torchruns: list[Torchrun] = field(default_factory=list)
    traps: list[Trap] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    functions: dict[str, ast.FunctionDefinition] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)


QUIET = names("""
    : [ [[ alias cat complete declare echo export grep hash help local logger man pip pip3
    printf read readonly sed set sbatch test trap type typeset unset whereis which
""")
"""Commands that do not start a program named in their arguments."""

_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
_CONTAINERS = {
    **dict.fromkeys(("apptainer", "singularity"), ("exec", "run")),
    **dict.fromkeys(("podman", "docker", "nerdctl"), ("run", "exec")),
    "enroot": ("start", "exec"),
    "shifter": (),
}
"""Container runtimes, and their subcommands that run a command in a container."""

REMOTE = frozenset({"mpirun", "mpiexec", "ssh", "pdsh", "clush", "parallel", "pbsdsh"})
"""Programs that start commands on other nodes, each with a different syntax."""

_DEEPEST = 8
_MOST_WORDS = 1000  # words before the program that a command starts


def walk(commands: ast.CommandList, source: str, *, errexit: bool = False) -> Walk:
    """Walk over a script.

    Raises:
        InputError: a script inside it (`bash -c '…'`) cannot be read.
    """
    walker = _Walker(source, errexit=errexit)
    walker.commands(commands, _Surroundings(), Values())
    return walker.walk


class _Walker:
    def __init__(self, source: str, *, errexit: bool) -> None:
        self.source = source
        self.walk = Walk()
        self.errexit, self.pipefail = errexit, False

    @contextmanager
    def own_options(self) -> Iterator[None]:
        """Limit `set -e` and `set -o pipefail` to the commands inside."""
        state = self.errexit, self.pipefail
        yield
        self.errexit, self.pipefail = state

    # ---- Traversal of the syntax tree

    def commands(self, commands: ast.CommandList, around: _Surroundings, values: Values) -> None:
        for item in commands:
            here = replace(around, background=around.background or item.background)
            for pipeline in item.pipelines:
                for node, after in zip(pipeline.nodes, (*pipeline.nodes[1:], None), strict=True):
                    reader = after if isinstance(after, ast.SimpleCommand) else None
                    self.node(node, replace(here, piped_to=reader), values)

    def node(self, node: ast.Node, around: _Surroundings, values: Values) -> None:
        if isinstance(node, ast.FunctionDefinition):
            self.walk.functions[node.name] = node
            with self.own_options():
                self.node(node.body, replace(around, function=node.name), values)
        elif isinstance(node, ast.Compound):
            for word in node.words:
                self.substitutions(word.parts, around, values)
            if node.variable:
                values.forget(node.variable)
            if node.kind in ("for", "while", "until"):
                around = replace(around, looped=True)
            subshell = node.kind == "subshell"
            inner = values.copy() if subshell else values
            with self.own_options() if subshell else nullcontext():
                for commands in (*node.conditions, *node.bodies):
                    self.commands(commands, around, inner)
        else:
            self.command(node, around, values)

    def substitutions(
        self,
        parts: Iterable[ast.WordPart],
        around: _Surroundings,
        values: Values,
        *,
        captured: bool = True,
    ) -> None:
        for part in parts:
            if part.inner:
                with self.own_options():
                    inside = replace(around, captured=captured, background=False)
                    self.commands(part.inner, inside, values.copy())
            self.substitutions(part.argument, around, values, captured=captured)

    # ---- One command

    def command(self, node: ast.SimpleCommand, around: _Surroundings, values: Values) -> None:
        for redirection in node.redirections:
            self.substitutions((*redirection.target.parts, *redirection.body), around, values)
        for assignment in node.assignments:
            for word in (assignment.value, *(assignment.items or ())):
                self.substitutions(word.parts, around, values)
        for word in node.words:
            captured = node.name not in ("echo", "printf")
            self.substitutions(word.parts, around, values, captured=captured)
        arguments = tuple(a for word in node.words for a in values.arguments(word))
        call = self.call(node, arguments, around)
        declares = node.name in DECLARES
        scope = values if declares or not node.words else values.copy()
        for assignment in node.assignments:
            value = scope.assign(assignment)
            if node.name == "export" or any(a.text == "-x" for a in arguments[1:]):
                self.walk.exported.add(assignment.name)
            self.walk.settings.append(
                Setting(
                    name=assignment.name,
                    value=value,
                    line=assignment.line,
                    exported=assignment.name in self.walk.exported,
                    prefix=bool(node.words) and not declares,
                    call=call,
                )
            )
        self.builtin(call, values)
        self.start(call, arguments, around, values)
        for redirection in node.redirections:
            if redirection.body and call.name in _SHELLS and len(arguments) == 1:
                body = values.one(ast.Word(parts=redirection.body, line=node.line))
                self.again(body.spans, around, values, call)

    def call(
        self, node: ast.SimpleCommand, arguments: Sequence[Argument], around: _Surroundings
    ) -> Call:
        call = Call(
            **vars(around),
            arguments=tuple(arguments),
            line=arguments[0].line if arguments else node.line,
            node=node,
            errexit=self.errexit,
            pipefail=self.pipefail,
            order=len(self.walk.calls),
        )
        self.walk.calls.append(call)
        return call

    def builtin(self, call: Call, values: Values) -> None:
        match call.words:
            case ["set", *options] if call.level == "batch":
                for index, option in enumerate(options):
                    if option[:1] not in "+-" or not option:
                        continue
                    on, after = option[0] == "-", options[index + 1 : index + 2]
                    named = after if option[1:].endswith("o") else []
                    if "e" in option[1:] or "errexit" in named:
                        self.errexit = on
                    if "pipefail" in named:
                        self.pipefail = on
            case ["export", *names]:
                self.walk.exported |= {name for name in names if name.isidentifier()}
            case ["read" | "mapfile" | "readarray" | "unset", *names]:
                for name in names:
                    values.forget(name)
            case ["trap", handler, *signals] if signals and not handler.startswith("-"):
                plain = tuple(signal.upper().removeprefix("SIG") for signal in signals)
                self.walk.traps.append(Trap(signals=plain, handler=handler, line=call.line))
                around = _Surroundings(level="handler", parent=call, depth=1)
                self.again(call.arguments[1].spans, around, Values(), call)

    # ---- Started programs

    def start(
        self, call: Call, arguments: Sequence[Argument], around: _Surroundings, values: Values
    ) -> None:
        """Record what a command line starts: a step, a container, a shell or torchrun."""
        if not arguments or around.depth > _DEEPEST:
            return
        words = [argument.text for argument in arguments[:2]]
        asks = words[0] == "command" and words[1:] in (["-v"], ["-V"])
        if asks or PurePath(words[0]).name in QUIET:
            return
        for index, argument in enumerate(arguments[:_MOST_WORDS]):
            name, rest = PurePath(argument.text).name, arguments[index + 1 :]
            if name in REMOTE:
                around = replace(around, remote=name, level="task")
            elif name == "eval":
                spans = [s for a in rest for s in (*a.spans, ast.SourceText(" ", a.line))]
                return self.again(spans, around, values, call)
            elif name == "srun":
                options, program, unsure = read_options(rest, SRUN)
                step = SrunStep(options=options, program=program, call=call, unsure=unsure)
                self.walk.steps.append(step)
                pyxis = any(option.startswith("container") for option in options)
                container = "srun --container-image" if pyxis else around.container
                around = replace(around, level="task", step=step, container=container)
                return self.inside(program, call, around, values)
            elif name in _CONTAINERS and (index == 0 or around.level == "task" or call.parent):
                verbs = _CONTAINERS[name]
                verb = next((w for w in enumerate(a.text for a in rest) if w[1] in verbs), None)
                if verb is not None:
                    name, rest = f"{name} {verb[1]}", rest[verb[0] + 1 :]
                if verb is not None or not verbs:
                    self.inside(rest, call, replace(around, container=name), values)
                return
            elif name in _SHELLS and (script := _of_shell(rest)) is not None:
                return self.again(script.spans, around, values, call)
            elif (launched := launcher_of(name, rest)) is not None:
                launcher, after = launched
                options, _, unsure = read_options(after, launcher.grammar)
                self.walk.torchruns.append(
                    Torchrun(
                        launcher=launcher,
                        options=options,
                        unsure=unsure or "config-file" in options,
                        line=argument.line_at(0),
                        step=around.step,
                        remote=around.remote,
                        call=call,
                    )
                )
                return

    def inside(
        self, program: Sequence[Argument], call: Call, around: _Surroundings, values: Values
    ) -> None:
        """Visit a command that another command starts."""
        if program:
            around = replace(around, depth=around.depth + 1, parent=call)
            self.start(self.call(call.node, program, around), program, around, values)

    def again(
        self, spans: Iterable[ast.SourceText], around: _Surroundings, values: Values, call: Call
    ) -> None:
        """Parse and visit a text of commands, such as the script of `bash -c`."""
        if around.depth > _DEEPEST:
            return
        try:
            commands = read_script(list(spans), self.source).commands
        except InputError:
            if any("\ue000" in span.text for span in spans):
                return  # an expansion at run time may be half of a command
            raise
        inside = replace(
            around,
            depth=around.depth + 1,
            parent=around.parent or call,
            on_nodes=around.level == "task",
        )
        with self.own_options():
            self.errexit = self.pipefail = False
            self.commands(commands, inside, values.copy())


def _of_shell(arguments: Sequence[Argument]) -> Argument | None:
    """Return the script of `bash -c SCRIPT`; None if the shell runs a file."""
    for index, argument in enumerate(arguments):
        if not argument.text.startswith(("-", "+")):
            return None
        if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", argument.text):
            after = arguments[index + 1 :]
            while after and after[0].text.startswith("-"):
                after = after[1:]
            return after[0] if after else None
    return None
