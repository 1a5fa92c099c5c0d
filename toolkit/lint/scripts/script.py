"""A batch script: its requests to Slurm and its steps."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from toolkit.job.sbatch_options import names
from toolkit.lint.bash.ast import CommandList, SimpleCommand, SourceText
from toolkit.lint.bash.parser import read_script
from toolkit.lint.scripts.interpreter import Call, Setting, SrunStep, Torchrun, Walk, walk
from toolkit.lint.scripts.options import Directive, Option, read_directives
from toolkit.text.quantities import whole_number

TOOLS = names("""
    [ cat chmod cp date df dcgmi du echo env free getent hostname id ibstat ip ln ls lscpu lsmem
    mkdir mktemp mount mv nproc numactl nvidia-smi ping printenv printf ps pwd rm rmdir rsync
    sbcast scontrol sleep stat sync tar test touch true ulimit umount uname uptime which
""")
"""Utilities; a step that runs only these programs is not a training step."""

_SHELL = re.compile(r"#!\s*(/usr/bin/env\s+(-S\s*)?)?\S*\b(bash|sh|dash|zsh|ksh)\b")


@dataclass(frozen=True, kw_only=True)
class Site:
    """The site settings that script rules depend on."""

    slurm: tuple[int, int] | None = None
    """Slurm's version, such as `(23, 2)`; None if unknown."""

    plugin_options: frozenset[str] = frozenset()
    """The long names of the options that the site's plug-ins add to sbatch."""


_ANY = Site()


@dataclass(frozen=True, kw_only=True)
class BatchScript:
    """A parsed batch script."""

    source: str
    text: str
    directives: tuple[Directive, ...]
    comments: tuple[SourceText, ...]
    commands: CommandList
    walk: Walk
    rendered: bool
    """Whether the toolkit rendered the script; omissions are then decisions of the job file."""

    site: Site

    @cached_property
    def supervised(self) -> bool:
        """Whether the toolkit's supervisor starts the step.

        The supervisor configures the rendezvous and forwards signals in the way that srun expects.
        """
        return re.search(r"^_supervisor=\(", self.text, re.MULTILINE) is not None

    @cached_property
    def options(self) -> dict[str, Option]:
        """The options that sbatch reads from the script, by long name; the last one wins."""
        return {
            option.name: option
            for directive in self.directives
            if not directive.late
            for option in directive.options
        }

    def value(self, name: str) -> str | None:
        """Return the value of an option; None without a value."""
        option = self.options.get(name)
        return option.text if option and option.value else None

    @cached_property
    def nodes(self) -> int | None:
        """The minimum number of nodes of the job; None if unknown."""
        return count(self.value("nodes")) if "nodes" in self.options else None

    @property
    def several_nodes(self) -> bool:
        """Whether the job has more than one node, as far as the script shows."""
        if "nodes" in self.options:
            most = whole_number((self.value("nodes") or "").rpartition("-")[2])
            return most is None or most > 1
        tasks, each = count(self.value("ntasks")), count(self.value("ntasks-per-node"))
        return bool(tasks and each and tasks > each)

    @cached_property
    def whole_nodes(self) -> bool:
        """Whether the job has exclusive nodes."""
        exclusive = self.options.get("exclusive")
        return (exclusive is not None and exclusive.text in ("", "exclusive")) or (
            self.value("mem") == "0"
        )

    def several(self, torchrun: Torchrun) -> bool:
        """Whether a torchrun is part of a launch on several nodes."""
        own = torchrun.step.options.get("nodes") if torchrun.step else None
        number = own.number if own else None
        return self.several_nodes if number is None else number > 1

    def stranded(self, torchrun: Torchrun) -> bool:
        """Whether a torchrun starts only on the first of several nodes."""
        return torchrun.step is None and not torchrun.remote and self.several_nodes

    def several_tasks(self, step: SrunStep) -> bool:
        """Whether a step starts more than one task, as far as the script shows."""

        def number(name: str) -> int | None:
            own = step.options.get(name)
            return own.number if own else count(self.value(name))

        tasks, each, nodes = (number(name) for name in ("ntasks", "ntasks-per-node", "nodes"))
        if tasks is None and "ntasks" in step.options:
            return self.several_nodes  # an unknown number of tasks
        return (tasks or (each or 1) * (nodes or 1)) > 1

    @cached_property
    def training(self) -> list[SrunStep]:
        """The training steps, without steps that run only utilities."""
        inside: dict[int, list[str]] = {}
        for call in self.walk.calls:
            if call.step is not None and call.on_nodes:
                inside.setdefault(id(call.step), []).append(call.name)
        steps = []
        for step in self.walk.steps:
            words = [argument.text for argument in step.program]
            while words and (words[0] in ("env", "exec", "time") or "=" in words[0]):
                words.pop(0)
            commands = inside.get(id(step), [PurePath(words[0]).name] if words else [])
            stops = words[:2] == ["ray", "stop"]
            if not stops and any(name not in TOOLS for name in commands):
                steps.append(step)
        return steps

    @cached_property
    def python(self) -> list[Call]:
        """The Python programs that the batch script itself runs, on a single node."""
        programs = []
        for call in self.walk.calls:
            own = call.level == "batch" and not (call.captured or call.parent or call.container)
            words = call.words
            while words and (words[0] in ("env", "exec", "time") or "=" in words[0]):
                words.pop(0)
            script = any(word.endswith(".py") for word in words[1:])
            if own and script and re.fullmatch(r"(\S*/)?python[0-9.]*", words[0]):
                programs.append(call)
        return programs

    @cached_property
    def starts(self) -> list[SrunStep]:
        """The steps that start torchrun."""
        steps = {id(run.step): run.step for run in self.walk.torchruns if run.step}
        return list(steps.values())

    def settings(self, *names: str) -> Iterator[Setting]:
        """Yield the assignments to variables."""
        return (setting for setting in self.walk.settings if setting.name in names)

    def exports(self, name: str) -> bool:
        """Whether the script exports a variable to its programs."""
        exported = name in self.walk.exported
        return any(one.exported or one.prefix or exported for one in self.settings(name))


def read_batch_script(text: str, source: str, site: Site = _ANY) -> BatchScript:
    """Parse a batch script.

    Raises:
        InputError: its bash cannot be parsed.
    """
    first = text.partition("\n")[0]
    commands: CommandList = ()
    comments: tuple[SourceText, ...] = ()
    if not first.startswith("#!") or _SHELL.match(first):
        read = read_script(text.replace("\r\n", "\n"), source)
        commands, comments = read.commands, read.comments
    # A script may contain other scripts below its end, and write them to files.
    rendered = any("rendered by torch-deploy-toolkit" in c.text for c in comments[:3])
    heads = [c for c in comments if c.line > 1 and c.text.startswith("#!/")]
    others = [c.line for c in heads if rendered or _ended(commands, c.line)]
    end = others[0] if others else text.count("\n") + 2
    commands = tuple(item for item in commands if item.line < end)
    comments = tuple(comment for comment in comments if comment.line < end)
    comment_lines = {comment.line for comment in comments} if commands else None
    directives = tuple(
        directive
        for directive in read_directives(text, range(end, text.count("\n") + 2))
        if comment_lines is None or directive.line in comment_lines
    )
    errexit = re.search(r"\s-[a-z]*e", first) is not None and "env" not in first
    return BatchScript(
        source=source,
        text=text,
        directives=directives,
        comments=comments,
        commands=commands,
        walk=walk(commands, source, errexit=errexit),
        rendered=rendered,
        site=site,
    )


def _ended(commands: CommandList, line: int) -> bool:
    """Whether the script ends above a line."""
    nodes = (item.pipelines[-1].nodes[-1] for item in commands if item.line < line)
    names = (node.name for node in nodes if isinstance(node, SimpleCommand))
    return any(name in ("exit", "exec") for name in names)


def count(text: str | None) -> int | None:
    """Return the number in `2`, or the minimum in `2-4`."""
    match = re.match(r"([0-9]+)(-[0-9]+)?$", text or "")
    return whole_number(match[1]) if match else None
