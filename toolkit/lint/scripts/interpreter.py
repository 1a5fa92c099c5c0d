"""One walk over a script: every command as it is called, steps and torchruns among them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Literal

from toolkit.errors import InputError
from toolkit.lint.bash.ast import (
    CommandList,
    Compound,
    FunctionDefinition,
    Node,
    SimpleCommand,
    SourceText,
    Word,
    WordPart,
)
from toolkit.lint.bash.parser import DECLARES, read_commands
from toolkit.lint.scripts.options import SRUN, TORCHRUN, Option, names, read_options
from toolkit.lint.scripts.values import Argument, Values

__all__ = [
    "QUIET",
    "REMOTE",
    "Call",
    "Level",
    "Setting",
    "SrunStep",
    "Torchrun",
    "Trap",
    "Walk",
    "walk",
]

Level = Literal["batch", "task", "handler"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SrunStep:
    """An srun."""

    options: dict[str, Option]
    program: tuple[Argument, ...]
    call: "Call"

    @property
    def line(self) -> int:
        """Where it stands."""
        return self.call.line


@dataclass(frozen=True, kw_only=True, eq=False)
class Torchrun:
    """A torchrun, or `python -m torch.distributed.run`."""

    options: dict[str, Option]
    line: int
    step: SrunStep | None
    remote: str
    """The program that starts it on other nodes, where that is not srun."""

    call: "Call"


@dataclass(frozen=True, kw_only=True)
class Trap:
    """A `trap`."""

    signals: tuple[str, ...]
    handler: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A variable that is set."""

    name: str
    value: Argument
    line: int
    exported: bool
    prefix: bool
    """Whether it is set for one command only."""

    call: "Call"


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A command as it is called."""

    arguments: tuple[Argument, ...]
    line: int
    node: SimpleCommand
    level: Level
    """`task` where it runs on every node; `handler` in what a trap calls."""

    function: str
    """The function in which it stands."""

    container: str
    """What runs the container around it; empty without one."""

    captured: bool
    """Whether its output becomes part of a word that is not only printed."""

    background: bool
    looped: bool
    piped_to: SimpleCommand | None
    """The command that reads its output."""

    on_nodes: bool
    """Whether a shell on each node expands its words."""

    errexit: bool
    pipefail: bool
    order: int
    parent: "Call | None" = None
    """The call that starts it: srun, or `bash -c`."""

    @property
    def name(self) -> str:
        """The program's name without its folder."""
        return self.arguments[0].text.rpartition("/")[2] if self.arguments else ""


@dataclass
class Walk:
    """The collected steps and settings, in the order of the script."""

    calls: list[Call] = field(default_factory=list)
    steps: list[SrunStep] = field(default_factory=list)
    torchruns: list[Torchrun] = field(default_factory=list)
    traps: list[Trap] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    functions: dict[str, FunctionDefinition] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)


QUIET = names("""
    : [ [[ alias cat complete declare echo export grep hash help local logger man pip pip3
    printf read readonly sed set sbatch test trap type typeset unset whereis which
""")
"""Commands whose arguments name a program without starting it."""

_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
_CONTAINERS = {
    **dict.fromkeys(("apptainer", "singularity"), ("exec", "run")),
    **dict.fromkeys(("podman", "docker", "nerdctl"), ("run", "exec")),
    "enroot": ("start", "exec"),
    "shifter": (),
}
"""Container runtimes, and the words after which a command in the container follows."""

REMOTE = frozenset({"mpirun", "mpiexec", "ssh", "pdsh", "clush", "parallel", "pbsdsh"})
"""Programs that start others on other nodes, each in its own way."""

_PRINTS = ("echo", "printf")
_PYTHON = re.compile(r"python[0-9.]*")
_RUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_DEEPEST = 8
_MOST_WORDS = 1000  # before the program that a command starts


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where the walk is."""

    level: Level = "batch"
    function: str = ""
    container: str = ""
    captured: bool = False
    background: bool = False
    looped: bool = False
    piped_to: SimpleCommand | None = None
    on_nodes: bool = False
    depth: int = 0
    step: SrunStep | None = None
    remote: str = ""
    parent: Call | None = None


def walk(commands: CommandList, source: str, *, errexit: bool = False) -> Walk:
    """Walk over a script.

    Raises:
        InputError: a script inside it (`bash -c '…'`) cannot be read.
    """
    walker = _Walker(source, errexit=errexit)
    walker.sequence(commands, _Place(), Values())
    return walker.found


class _Walker:
    def __init__(self, source: str, *, errexit: bool) -> None:
        self.source = source
        self.found = Walk()
        self.errexit, self.pipefail = errexit, False

    # ---- Over the grammar

    def sequence(self, commands: CommandList, place: _Place, values: Values) -> None:
        for item in commands:
            here = replace(place, background=place.background or item.background)
            for pipeline in item.pipelines:
                for node, after in zip(pipeline.nodes, (*pipeline.nodes[1:], None), strict=True):
                    reader = after if isinstance(after, SimpleCommand) else None
                    self._node(node, replace(here, piped_to=reader), values)

    def _node(self, node: Node, place: _Place, values: Values) -> None:
        if isinstance(node, FunctionDefinition):
            self.found.functions[node.name] = node
            state = self.errexit, self.pipefail
            self._node(node.body, replace(place, function=node.name), values)
            self.errexit, self.pipefail = state
        elif isinstance(node, Compound):
            inner = values.copy() if node.kind == "subshell" else values
            state = self.errexit, self.pipefail
            for word in node.words:
                self._substitutions(word, place, values)
            if node.variable:
                values.forget(node.variable)
            if node.kind in ("for", "while", "until"):
                place = replace(place, looped=True)
            for commands in (*node.conditions, *node.bodies):
                self.sequence(commands, place, inner)
            if node.kind == "subshell":
                self.errexit, self.pipefail = state
        else:
            self._command(node, place, values)

    def _substitutions(
        self, word: Word, place: _Place, values: Values, *, kept: bool = True
    ) -> None:
        for part in word.parts:
            self._inner(part, place, values, kept=kept)

    def _inner(self, part: WordPart, place: _Place, values: Values, *, kept: bool = True) -> None:
        if part.inner:
            inside = replace(place, captured=kept, background=False)
            state = self.errexit, self.pipefail
            self.sequence(part.inner, inside, values.copy())
            self.errexit, self.pipefail = state
        for below in part.argument:
            self._inner(below, place, values, kept=kept)

    # ---- One command

    def _command(self, node: SimpleCommand, place: _Place, values: Values) -> None:
        for redirection in node.redirections:
            for part in (*redirection.target.parts, *redirection.body):
                self._inner(part, place, values)
        for assignment in node.assignments:
            for word in (assignment.value, *(assignment.items or ())):
                self._substitutions(word, place, values)
        for word in node.words:
            self._substitutions(word, place, values, kept=node.name not in _PRINTS)
        arguments = tuple(a for word in node.words for a in values.arguments(word))
        call = self._call(node, arguments, place)
        declares = node.name in DECLARES
        scope = values if declares or not node.words else values.copy()
        for assignment in node.assignments:
            value = scope.assign(assignment)
            exported = node.name == "export" or any(a.text == "-x" for a in arguments[1:])
            if exported:
                self.found.exported.add(assignment.name)
            self.found.settings.append(
                Setting(
                    name=assignment.name,
                    value=value,
                    line=assignment.line,
                    exported=exported or assignment.name in self.found.exported,
                    prefix=bool(node.words) and not declares,
                    call=call,
                )
            )
        self._builtins(call, values)
        self._start(call, arguments, place, values)
        for redirection in node.redirections:
            if redirection.body and arguments and call.name in _SHELLS and len(arguments) == 1:
                body = values.one(Word(parts=redirection.body, line=node.line))
                self._again(body.spans, place, values, call)

    def _call(self, node: SimpleCommand, arguments: Sequence[Argument], place: _Place) -> Call:
        line = arguments[0].line if arguments else node.line
        call = Call(
            arguments=tuple(arguments),
            line=line,
            node=node,
            level=place.level,
            function=place.function,
            container=place.container,
            captured=place.captured,
            background=place.background,
            looped=place.looped,
            piped_to=place.piped_to,
            on_nodes=place.on_nodes,
            errexit=self.errexit,
            pipefail=self.pipefail,
            order=len(self.found.calls),
            parent=place.parent,
        )
        self.found.calls.append(call)
        return call

    def _builtins(self, call: Call, values: Values) -> None:
        words = [argument.text for argument in call.arguments]
        match words:
            case ["set", *options] if call.level == "batch":
                self._set(options)
            case ["export", *names]:
                self.found.exported |= {name for name in names if name.isidentifier()}
            case ["read" | "mapfile" | "readarray" | "unset", *names]:
                for name in names:
                    values.forget(name)
            case ["trap", handler, *signals] if signals and not handler.startswith("-"):
                self._trap(call, signals)

    def _set(self, options: Sequence[str]) -> None:
        for index, option in enumerate(options):
            if option[:1] not in "+-" or not option:
                continue
            on, after = option[0] == "-", options[index + 1 : index + 2]
            named = after if option[1:].endswith("o") else []
            if "e" in option[1:] or "errexit" in named:
                self.errexit = on
            if "pipefail" in named:
                self.pipefail = on

    def _trap(self, call: Call, signals: Sequence[str]) -> None:
        handler = call.arguments[1]
        names = tuple(signal.upper().removeprefix("SIG") for signal in signals)
        self.found.traps.append(Trap(signals=names, handler=handler.text, line=call.line))
        place = _Place(level="handler", parent=call, depth=1)
        self._again(handler.spans, place, Values(), call)

    # ---- What a command starts

    def _start(
        self, call: Call, arguments: Sequence[Argument], place: _Place, values: Values
    ) -> None:
        """Look for what the words start: a step, a container, a shell, torchrun."""
        if not arguments or place.depth > _DEEPEST:
            return
        words = [argument.text for argument in arguments[:2]]
        asks = words[0] == "command" and words[1:] in (["-v"], ["-V"])
        if asks or PurePath(words[0]).name in QUIET:
            return
        for index, argument in enumerate(arguments[:_MOST_WORDS]):
            name, rest = PurePath(argument.text).name, arguments[index + 1 :]
            if name in REMOTE:
                place = replace(place, remote=name, level="task")
            elif name == "eval":
                spans = [s for a in rest for s in (*a.spans, SourceText(" ", a.line))]
                return self._again(spans, place, values, call)
            elif name == "srun":
                return self._step(call, rest, place, values)
            elif name in _CONTAINERS and (index == 0 or place.level == "task" or call.parent):
                return self._container(name, call, rest, place, values)
            elif name in _SHELLS and (script := _of_shell(rest)) is not None:
                return self._again(script.spans, place, values, call)
            elif name == "torchrun" or (_PYTHON.fullmatch(name) and _runs(rest)):
                after = rest if name == "torchrun" else rest[_runs(rest) :]
                return self._torchrun(argument, after, call, place)

    def _step(self, call: Call, rest: Sequence[Argument], place: _Place, values: Values) -> None:
        options, program = read_options(rest, SRUN)
        step = SrunStep(options=options, program=program, call=call)
        self.found.steps.append(step)
        pyxis = any(name.startswith("container") for name in options)
        inside = replace(
            place,
            level="task",
            step=step,
            container="srun --container-image" if pyxis else place.container,
            depth=place.depth + 1,
            parent=call,
        )
        self._inside(program, call, inside, values)

    def _container(
        self, name: str, call: Call, rest: Sequence[Argument], place: _Place, values: Values
    ) -> None:
        verbs = _CONTAINERS[name]
        words = [argument.text for argument in rest]
        at = next((i for i, word in enumerate(words) if word in verbs), None if verbs else -1)
        if at is None:
            return
        inside = replace(
            place,
            container=f"{name} {words[at]}" if verbs else name,
            depth=place.depth + 1,
            parent=call,
        )
        self._inside(rest[at + 1 :], call, inside, values)

    def _inside(
        self, program: Sequence[Argument], call: Call, place: _Place, values: Values
    ) -> None:
        """Look at a command that another one starts."""
        if not program:
            return
        self._call(call.node, program, place)
        self._start(self.found.calls[-1], program, place, values)

    def _again(
        self, spans: Iterable[SourceText], place: _Place, values: Values, call: Call
    ) -> None:
        """Read a text of commands, as that of `bash -c`."""
        if place.depth > _DEEPEST:
            return
        state = self.errexit, self.pipefail
        self.errexit = self.pipefail = False
        try:
            commands = read_commands(list(spans), self.source)
        except InputError:
            if any("\ue000" in span.text for span in spans):
                return  # an expansion at run time may be half of a command
            raise
        inside = replace(
            place,
            depth=place.depth + 1,
            parent=place.parent or call,
            on_nodes=place.level == "task",
        )
        self.sequence(commands, inside, values.copy())
        self.errexit, self.pipefail = state

    def _torchrun(
        self, program: Argument, rest: Sequence[Argument], call: Call, place: _Place
    ) -> None:
        options, _ = read_options(rest, TORCHRUN)
        self.found.torchruns.append(
            Torchrun(
                options=options,
                line=program.line_at(0),
                step=place.step,
                remote=place.remote,
                call=call,
            )
        )


def _of_shell(arguments: Sequence[Argument]) -> Argument | None:
    """Return the script of `bash -c SCRIPT`; None where the shell runs a file."""
    for index, argument in enumerate(arguments):
        if not argument.text.startswith(("-", "+")):
            return None
        if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", argument.text):
            after = arguments[index + 1 :]
            while after and after[0].text.startswith("-"):
                after = after[1:]
            return after[0] if after else None
    return None


def _runs(arguments: Sequence[Argument]) -> int:
    """Return where torchrun's options begin after `python`; 0 where it runs something else."""
    for index, argument in enumerate(arguments):
        if argument.text == "-m":
            module = arguments[index + 1 : index + 2]
            return index + 2 if module and module[0].text in _RUN_MODULES else 0
        if not argument.text.startswith("-"):
            return 0
    return 0
