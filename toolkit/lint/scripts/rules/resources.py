"""Rules about the resources that a script requests of Slurm."""

import itertools
import re
from collections.abc import Iterator

from toolkit.errors import nearest
from toolkit.lint.scripts.options import PYXIS, SBATCH
from toolkit.lint.scripts.registry import Fault, rule
from toolkit.lint.scripts.script import BatchScript

__all__: list[str] = []


@rule(
    "shebang-missing",
    finds="the first line does not begin with `#!`",
    reason="sbatch refuses such a file: “This does not look like a batch script”.",
    fix="begin the file with #!/bin/bash",
)
def _shebang(script: BatchScript) -> Iterator[Fault]:
    first = script.text.partition("\n")[0]
    if not first.startswith("#!"):
        yield Fault(line=1, what="the first line does not begin with #!, and sbatch refuses that")


@rule(
    "dos-line-breaks",
    finds="lines end as on Windows (CR LF)",
    reason="sbatch refuses such a file: “Batch script contains DOS line breaks”.",
    fix="convert it: sed -i 's/\\r$//' FILE",
)
def _line_breaks(script: BatchScript) -> Iterator[Fault]:
    if (at := script.text.find("\r\n")) >= 0:
        line = script.text.count("\n", 0, at) + 1
        yield Fault(line=line, what="this line ends with CR LF, and sbatch refuses that")


@rule(
    "directive-late",
    finds="an `#SBATCH` line below the first command",
    reason="sbatch stops reading options at the first line that is neither empty nor a comment, "
    "and says nothing: the job runs without them.",
    fix="move it above the first command",
)
def _late(script: BatchScript) -> Iterator[Fault]:
    for directive in script.directives:
        if directive.late:
            yield Fault(
                line=directive.line,
                what="this #SBATCH line stands below a command, so sbatch does not read it",
            )


@rule(
    "directive-unknown",
    finds="an option that sbatch does not have, or a word that is none",
    reason="sbatch refuses the script, or another version of it does.",
    fix="write its name as in sbatch(1)",
)
def _unknown(script: BatchScript) -> Iterator[Fault]:
    for directive in script.directives:
        for option in directive.options:
            if option.name in SBATCH.names | PYXIS:
                if option.value is None and option.name not in SBATCH.flags | SBATCH.optional:
                    yield Fault(
                        line=directive.line,
                        what=f"--{option.name} has no value",
                        fix=f"write --{option.name}=VALUE",
                    )
                continue
            plain = option.name.replace("_", "-")
            meant = nearest(f"--{plain}", sorted(f"--{name}" for name in SBATCH.names))
            way_out = f"did you mean {meant!r}?" if meant else "write its name as in sbatch(1)"
            dashes = "--" if len(option.name) > 1 else "-"
            yield Fault(
                line=directive.line,
                what=f"sbatch has no option {dashes}{option.name}",
                fix=way_out,
            )
        for word in directive.stray:
            yield Fault(
                line=directive.line,
                what=f"{word!r} is no option, and sbatch refuses the line",
                fix="write --NAME=VALUE without blanks, and comments after #",
            )


@rule(
    "directive-variable",
    finds="a shell variable in an `#SBATCH` line",
    reason="No shell reads these lines: the log goes to a folder that is really called `$HOME`.",
    fix="write the value out, or give the option to sbatch on its command line",
)
def _variable(script: BatchScript) -> Iterator[Fault]:
    if script.rendered:  # its values stand as the job file has them
        return
    for directive in script.directives:
        for option in directive.options:
            text = option.value.text if option.value else ""
            if not directive.late and (match := re.search(r"\$\{?\w+\}?|\$\(|`", text)):
                yield Fault(
                    line=directive.line,
                    what=f"--{option.name} holds {match[0]}, which nothing expands here",
                )


@rule(
    "container-on-sbatch",
    finds="an option of pyxis in an `#SBATCH` line",
    reason="sbatch does not know it, or starts the batch script itself in the container, where "
    "there is no srun.",
    fix="give it to srun",
)
def _pyxis(script: BatchScript) -> Iterator[Fault]:
    for directive in script.directives:
        for option in directive.options:
            if option.name in PYXIS:
                yield Fault(line=directive.line, what=f"--{option.name} is pyxis' option for srun")


@rule(
    "time-missing",
    finds="no time limit",
    reason="The partition's default holds, which may be minutes, and the scheduler cannot start "
    "the job in a gap.",
    fix="add #SBATCH --time=HH:MM:SS",
)
def _time(script: BatchScript) -> Iterator[Fault]:
    # A job file may leave it out; `check --server` compares that with the partition.
    if "time" not in script.options and not script.rendered:
        lines = [directive.line for directive in script.directives if not directive.late]
        yield Fault(line=lines[-1] if lines else 1, what="the job names no time limit")


@rule(
    "log-truncated",
    finds="a job that is queued again, without `--open-mode=append`",
    reason="Slurm opens the log anew at each start, and what the start before has printed is gone.",
    fix="add #SBATCH --open-mode=append",
)
def _open_mode(script: BatchScript) -> Iterator[Fault]:
    if "open-mode" in script.options:
        return
    if (asked := script.options.get("requeue")) is not None:
        yield Fault(
            line=asked.line, what="--requeue without --open-mode: a new start empties the log"
        )
        return
    for call in script.walk.calls:
        if call.name == "scontrol" and [a.text for a in call.arguments[1:2]] == ["requeue"]:
            yield Fault(
                line=call.line,
                what="the job is queued again without --open-mode: a new start empties the log",
            )
            return


@rule(
    "gpus-per-task-typed",
    finds="`--gpus-per-task` with a type of GPU",
    reason="Slurm 22.05 leaves CUDA_VISIBLE_DEVICES unset then, and each job sees all GPUs.",
    fix="use --gres=gpu:TYPE:N or --gpus-per-node=TYPE:N",
)
def _typed(script: BatchScript) -> Iterator[Fault]:
    asked = script.options.get("gpus-per-task")
    if asked is not None and asked.value is not None and ":" in asked.value.text:
        yield Fault(
            line=asked.line,
            what=f"--gpus-per-task={asked.value.text} names a type of GPU, and Slurm 22.05 then "
            "hides none",
        )


@rule(
    "export-comma",
    finds="`--export` with a value that holds a comma",
    reason="Slurm parts the list at every comma: of `K=a,b` the program sees `K=a`.",
    fix="export K='a,b' in a line of its own, and leave --export=ALL",
)
def _commas(script: BatchScript) -> Iterator[Fault]:
    names = {setting.name for setting in script.walk.settings}
    given = [script.options.get("export"), *(s.options.get("export") for s in script.walk.steps)]
    for option in given:
        if option is None or option.value is None:
            continue
        items = option.value.text.split(",")
        for before, item in itertools.pairwise(items):
            whole = re.fullmatch(r"[A-Za-z_]\w*(=.*)?", item, re.DOTALL)
            meant = whole and ("=" in item or item.isupper() or item in names)
            if "=" in before and not meant and "$" not in item:
                name = before.partition("=")[0]
                yield Fault(
                    line=option.line,
                    what=f"--export cuts the value of {name} at its comma: {item!r} is lost",
                    fix=f"write export {name}='…' in a line of its own, and --export=ALL",
                )
                break


@rule(
    "export-none",
    finds="`--export=NONE` with an srun that does not take it back",
    reason="srun inherits it (SLURM_EXPORT_ENV), and its programs lose even PATH.",
    fix="write srun --export=ALL",
)
def _none(script: BatchScript) -> Iterator[Fault]:
    asked = script.options.get("export")
    none = asked is not None and asked.value is not None and asked.value.text.upper() == "NONE"
    undone = script.exports("SLURM_EXPORT_ENV") or any(
        call.name == "unset" and "SLURM_EXPORT_ENV" in [a.text for a in call.arguments]
        for call in script.walk.calls
    )
    for step in script.walk.steps:
        own = step.options.get("export")
        if own is not None and own.value is not None and own.value.text.upper() == "NONE":
            yield Fault(line=own.line, what="srun --export=NONE: the program loses even PATH")
        elif none and own is None and not undone and step.program:
            yield Fault(
                line=step.line,
                what="srun inherits --export=NONE from #SBATCH, and its program loses even PATH",
            )
