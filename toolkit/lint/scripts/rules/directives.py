"""Rules about a script's first lines, its `#SBATCH` options and its secrets."""

import itertools
import re
from collections.abc import Iterator

from toolkit.errors import nearest
from toolkit.lint.rulebook import SCRIPTS, Violation
from toolkit.lint.scripts.interpreter import QUIET
from toolkit.lint.scripts.options import PYXIS, SBATCH, Option
from toolkit.lint.scripts.script import BatchScript
from toolkit.text import secret_scan

_EXPORTED = re.compile(r"""(?:[^,'"]|'[^']*'?|"[^"]*"?)+""")
"""An item of `--export`, as `find_quote_token` of Slurm's env.c splits it, after bash's quotes."""


@SCRIPTS.rule(
    "shebang-missing",
    finds="the first line does not begin with `#!`",
    reason="sbatch refuses such a file: “This does not look like a batch script”.",
    fix="begin the file with #!/bin/bash",
)
def _shebang(script: BatchScript) -> Iterator[Violation[int]]:
    if not script.text.partition("\n")[0].startswith("#!"):
        yield Violation(1, "the first line does not begin with #!, and sbatch refuses that")


@SCRIPTS.rule(
    "dos-line-breaks",
    finds="lines end as on Windows (CR LF)",
    reason="sbatch refuses such a file: “Batch script contains DOS line breaks”.",
    fix="convert it: sed -i 's/\\r$//' FILE",
)
def _line_breaks(script: BatchScript) -> Iterator[Violation[int]]:
    if (at := script.text.find("\r\n")) >= 0:
        line = script.text.count("\n", 0, at) + 1
        yield Violation(line, "this line ends with CR LF, and sbatch refuses that")


@SCRIPTS.rule(
    "directive-late",
    finds="an `#SBATCH` line below the first command",
    reason="sbatch stops reading options at the first line that is neither empty nor a comment, "
    "and says nothing: the job runs without them.",
    fix="move it above the first command",
)
def _late(script: BatchScript) -> Iterator[Violation[int]]:
    for directive in script.directives:
        if directive.late:
            what = "this #SBATCH line is below a command, so sbatch does not read it"
            yield Violation(directive.line, what)


_TYPO = 0.8
"""Minimum similarity of a mistyped option to a known option (difflib ratio)."""


@SCRIPTS.rule(
    "directive-unknown",
    finds="an option that sbatch does not have, one without its value, or a word that is none",
    reason="sbatch refuses the script, or another version of it does; options of a plug-in (SPANK) "
    "are taken where the site has it, as `plugin_options` of a profile or `--server` tell.",
    fix="write its name as in sbatch(1)",
)
def _unknown(script: BatchScript) -> Iterator[Violation[int]]:
    known = SBATCH.names | PYXIS | script.site.plugin_options
    for directive in script.directives:
        for option in directive.options:
            if option.name in known:
                if option.name in script.site.plugin_options:
                    continue  # only the plug-in knows whether it takes a value
                if option.value is None and option.name not in SBATCH.flags | SBATCH.optional:
                    yield Violation(
                        directive.line,
                        f"--{option.name} has no value",
                        fix=f"write --{option.name}=VALUE",
                    )
                continue
            plain = option.name.replace("_", "-")
            names = sorted(f"--{name}" for name in SBATCH.names)
            meant = nearest(f"--{plain}", names, cutoff=_TYPO)
            way_out = f"did you mean {meant!r}?" if meant else None
            if way_out is None and len(option.name) > 1:
                way_out = (
                    "is it an option of a plug-in of the site? `--server` asks it, and a profile "
                    f"allows it: plugin_options: [{option.name}]"
                )
            dashes = "--" if len(option.name) > 1 else "-"
            what = f"sbatch has no option {dashes}{option.name}"
            yield Violation(directive.line, what, fix=way_out)
        for word in directive.stray:
            yield Violation(
                directive.line,
                f"{word!r} is not an option, and sbatch refuses the line",
                fix="write --NAME=VALUE without blanks, and comments after #",
            )


@SCRIPTS.rule(
    "directive-variable",
    finds="a shell variable in an `#SBATCH` line",
    reason="No shell reads these lines. In the path of a log, `$HOME` is the name of a folder, "
    "which Slurm does not make: the job fails at its launch, without a log.",
    fix="write the value out, or give the option to sbatch on its command line",
)
def _variable(script: BatchScript) -> Iterator[Violation[int]]:
    if script.rendered:  # its values come literally from the job file
        return
    for directive in script.directives:
        for option in directive.options:
            if not directive.late and (match := re.search(r"\$\{?\w+\}?|\$\(|`", option.text)):
                what = f"--{option.name} holds {match[0]}, which nothing expands here"
                yield Violation(directive.line, what)


@SCRIPTS.rule(
    "container-on-sbatch",
    finds="a pyxis option in an `#SBATCH` line",
    reason="sbatch does not know it, or starts the batch script itself in the container, where "
    "most images have no srun.",
    fix="give it to srun",
)
def _pyxis(script: BatchScript) -> Iterator[Violation[int]]:
    for directive in script.directives:
        for option in directive.options:
            if option.name in PYXIS:
                yield Violation(directive.line, f"--{option.name} is pyxis' option for srun")


@SCRIPTS.rule(
    "time-missing",
    finds="no time limit",
    reason="The partition's default applies, which may be minutes, or so long that the scheduler "
    "finds no gap to backfill the job.",
    fix="add #SBATCH --time=HH:MM:SS",
)
def _time(script: BatchScript) -> Iterator[Violation[int]]:
    # A job file may omit the limit; `check --server` checks the limit against the partition.
    if "time" not in script.options and not script.rendered and not _submits_only(script):
        lines = [directive.line for directive in script.directives if not directive.late]
        yield Violation(lines[-1] if lines else 1, "the job names no time limit")


def _submits_only(script: BatchScript) -> bool:
    """Whether a script only submits another job."""
    submits = any(call.name == "sbatch" for call in script.walk.calls)
    return submits and not script.directives


@SCRIPTS.rule(
    "log-truncated",
    finds="`--requeue` or `scontrol requeue` without `--open-mode`",
    reason="Slurm truncates the log at each start, unless the site sets JobFileAppend, and the "
    "earlier output is lost.",
    fix="add #SBATCH --open-mode=append",
)
def _open_mode(script: BatchScript) -> Iterator[Violation[int]]:
    if "open-mode" in script.options:
        return
    if (requeue := script.options.get("requeue")) is not None:
        yield Violation(requeue.line, "--requeue without --open-mode: a new start empties the log")
        return
    for call in script.walk.calls:
        if call.name == "scontrol" and call.words[1:2] == ["requeue"]:
            what = "the job is queued again without --open-mode: a new start empties the log"
            yield Violation(call.line, what)
            return


@SCRIPTS.rule(
    "gpus-per-task-typed",
    finds="with a site of Slurm 22.05: `--gpus-per-task` with a type of GPU",
    reason="This version leaves CUDA_VISIBLE_DEVICES unset then, and each job sees all GPUs, "
    "unless the site confines devices by cgroup.",
    fix="use --gres=gpu:TYPE:N or --gpus-per-node=TYPE:N",
)
def _typed(script: BatchScript) -> Iterator[Violation[int]]:
    option = script.options.get("gpus-per-task")
    if option is not None and ":" in option.text and script.site.slurm == (22, 5):
        what = f"--gpus-per-task={option.text} names a type of GPU, and Slurm 22.05 then hides none"
        yield Violation(option.line, what)


@SCRIPTS.rule(
    "export-comma",
    finds="`--export` with a value that contains a comma",
    reason="Slurm splits the list at each comma outside quotes: of `K=a,b` the program sees `K=a`.",
    fix="export K='a,b' on a separate line, and keep --export=ALL",
)
def _commas(script: BatchScript) -> Iterator[Violation[int]]:
    names = {setting.name for setting in script.walk.settings}
    for option in _exports(script):
        for before, item in itertools.pairwise(_EXPORTED.findall(option.text)):
            whole = re.fullmatch(r"[A-Za-z_]\w*(=.*)?", item, re.DOTALL)
            meant = whole and ("=" in item or item.isupper() or item in names)
            if "=" in before and not meant and "$" not in item:
                name = before.lstrip("'\"").partition("=")[0]
                yield Violation(
                    option.line,
                    f"--export cuts the value of {name} at its comma: {item!r} is lost",
                    fix=f"write export {name}='…' on a separate line, and --export=ALL",
                )
                break


def _exports(script: BatchScript) -> list[Option]:
    """Return every `--export` option: first of sbatch, then of each srun."""
    owners = (script.options, *(step.options for step in script.walk.steps))
    return [options["export"] for options in owners if "export" in options]


@SCRIPTS.rule(
    "export-none",
    finds="`srun --export=NONE`, or `--export=NONE` of sbatch with an srun that does not take it "
    "back",
    reason="srun inherits that of sbatch (SLURM_EXPORT_ENV), and its programs lose even PATH.",
    fix="write srun --export=ALL",
)
def _none(script: BatchScript) -> Iterator[Violation[int]]:
    export = script.options.get("export")
    none = export is not None and export.text.upper() == "NONE"
    undone = script.exports("SLURM_EXPORT_ENV") or any(
        call.name == "unset" and "SLURM_EXPORT_ENV" in call.words for call in script.walk.calls
    )
    for step in script.walk.steps:
        own = step.options.get("export")
        if own is not None and own.text.upper() == "NONE":
            yield Violation(own.line, "srun --export=NONE: the program loses even PATH")
        elif none and own is None and not undone and step.program:
            what = "srun inherits --export=NONE from #SBATCH, and its program loses even PATH"
            yield Violation(step.line, what)


@SCRIPTS.rule(
    "brace-stray",
    finds="a path with an extra } after a variable: ${DIR}}/log",
    reason="bash keeps the brace as a character: the path leads into a folder with a brace in its "
    "name, or fails.",
    fix="leave one } out",
)
def _brace(script: BatchScript) -> Iterator[Violation[int]]:
    seen: set[int] = set()
    for call in script.walk.calls:
        node = call.node
        if id(node) in seen:
            continue
        seen.add(id(node))
        for word in (*node.words, *(assignment.value for assignment in node.assignments)):
            pairs = itertools.pairwise(word.parts)
            behind = [b for a, b in pairs if a.kind == "variable" and b.kind == "text"]
            text = "".join(part.text for part in word.parts if part.kind == "text")
            stray = next((part for part in behind if part.text.startswith("}/")), None)
            if stray is not None and "{" not in text:
                yield Violation(stray.line, f"{word.shown} has a }} too many")


# ---- Secrets


@SCRIPTS.rule(
    "secret-literal",
    finds="a token, key or password in the script",
    reason="Every reader of the script sees the value. Slurm keeps a copy of the script, the "
    "accounting may keep one, and the repository keeps it permanently.",
    fix="read it from a file that only you can read: export NAME=$(<~/.secrets/name); and replace "
    "the exposed secret",
)
def _secrets(script: BatchScript) -> Iterator[Violation[int]]:
    lines: dict[int, str] = {}
    for number, row in enumerate(script.text.splitlines(), start=1):
        words = row.split() if _FILLED in row.lower() else []
        shown = " ".join(word for word in words if _FILLED not in word.lower())
        if kind := secret_scan.kind_of(shown if words else row):
            lines.setdefault(number, kind)
    for comment in script.comments:
        for name, value in _WRITTEN.findall(comment.text):
            if (kind := _kind(value, name)) and re.search(r"[0-9]", value):
                lines.setdefault(comment.line, kind)
    for setting in script.walk.settings:
        if kind := _kind(setting.value.text, setting.name):
            lines.setdefault(setting.line, kind)
    for call in script.walk.calls:
        if call.name in QUIET:
            continue
        for index, kind in secret_scan.kinds_of_words(call.words):
            if secret_scan.is_placeholder(call.words[index].partition("=")[2] or call.words[index]):
                continue
            lines.setdefault(call.arguments[index].line_at(0), kind)
    for option in _exports(script):
        for item in option.text.split(","):
            name, _, value = item.partition("=")
            if kind := _kind(value, name):
                lines.setdefault(option.line, kind)
    for line, kind in sorted(lines.items()):
        yield Violation(line, f"the script contains what looks like {kind}")


@SCRIPTS.rule(
    "secret-printed",
    finds="all variables printed into the log, a token, key or password among them",
    reason="Every reader of the log sees the value.",
    fix="leave it out, or print what you look for: env | grep ^SLURM",
)
def _printed(script: BatchScript) -> Iterator[Violation[int]]:
    exported = [
        setting.name
        for setting in script.walk.settings
        if (setting.exported or setting.name in script.walk.exported)
        and secret_scan.is_telling(setting.name)
    ]
    for call in script.walk.calls if exported else ():
        kept = call.captured or call.piped_to is not None or call.node.redirections
        if call.words in (["printenv"], ["env"], ["export"]) and not (
            kept or call.node.assignments
        ):
            yield Violation(call.line, f"{call.name} prints {exported[0]} into the log")


_FILLED = "xxxxxxxx"  # hf_xxxxxxxxxxxxxxxx, a token's shape without a token
_WRITTEN = re.compile(r"\b([A-Za-z][\w-]{0,40})[=:] ?[\"']?([^\s\"']{6,200})")
"""A name with a value in a comment."""


def _kind(value: str, name: str) -> str | None:
    return None if secret_scan.is_placeholder(value) else secret_scan.kind_of(value, name=name)
