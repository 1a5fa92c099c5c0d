"""Checks of a job's arguments for likely mistakes (`toolkit check`)."""

import re
from collections.abc import Iterator
from itertools import pairwise

from toolkit.errors import Problem
from toolkit.job.spec import JobSpec
from toolkit.job.types import RUN_VALUE
from toolkit.planning.plans import refusal

_VARIABLE = re.compile(r"(?<!\$)\$(?:([A-Z_][A-Z0-9_]*)(?![a-z])|\{([A-Z_][A-Z0-9_]*)\})")
"""An environment variable with a name in capitals: `$HOME`, not `$x`."""

_TWO_WORDS = re.compile(r"--?[A-Za-z][-\w.]*\s+\S.*", re.DOTALL)
"""An option and its value in one word: `--lr 0.1`."""

_FOLDER = re.compile(r"--(out|output|.*dir|.*directory)", re.IGNORECASE)
_OUTPUT = re.compile(r"--(out|save|ckpt|checkpoint).*", re.IGNORECASE)
_INPUT = re.compile(
    "data|input|cache|train|val|test|image|source|src|load|resume|from|pretrained|tokenizer",
    re.IGNORECASE,
)
"""Parts of option names that suggest an input."""

_ELSEWHERE = re.compile(r"[-/~$].*|.*://.*|[-+0-9.eE]*", re.DOTALL)
"""An absolute path, a URL or a variable, another option or a number."""


_PATH_VARIABLE = re.compile(rf"(?:^|[/:]){_VARIABLE.pattern}")


def argument_problems(job: JobSpec) -> Iterator[Problem]:
    """Yield the likely mistakes in the arguments and variables of a job."""
    for name, value in job.env.items():
        if match := _PATH_VARIABLE.search(value):
            yield refusal(
                "variable-in-env",
                f"env.{name}: ${match[1] or match[2]} reaches the program as it is: nothing "
                "expands variables here; write the value",
                *("env", name),
            )
    is_shell = "-c" in (job.command or ())
    for at, (before, word) in enumerate(pairwise(("", *job.args))):
        match = _VARIABLE.search(RUN_VALUE.sub("", word))
        if match and not is_shell:
            yield refusal(
                "variable-in-args",
                f"args[{at}]: {word!r} reaches the program as it is: only $TRAIN_RUN_DIR and "
                f"$TRAIN_ATTEMPT are replaced; write the value, or read "
                f"os.environ[{match[1] or match[2]!r}] in the program",
                *("args", at),
            )
        if not is_shell and _TWO_WORDS.fullmatch(word):
            name = word.split(None, 1)[0]  # the value may be a secret
            yield refusal(
                "option-with-its-value",
                f"args[{at}]: {name} and its value reach the program as one; write [{name}, …]",
                *("args", at),
            )
        option, equals, value = word.partition("=")
        if not equals or not option.startswith("--"):
            option, value = before, word
        if _is_relative_output(option, value):
            yield refusal(
                "output-outside-run-dir",
                f"args[{at}]: {option} {value} is the same path for each run, which would find the "
                f"files of an earlier one; write {option} $TRAIN_RUN_DIR/{value}",
                *("args", at),
            )


def _is_relative_output(option: str, value: str) -> bool:
    """Return whether an option's value is a relative path that a program writes to."""
    if _ELSEWHERE.fullmatch(value) or _INPUT.search(option):
        return False
    # The value of another option, such as `--save-strategy epoch`, may be a choice.
    is_path = "/" in value or "." in value
    return bool(_FOLDER.fullmatch(option) or (_OUTPUT.fullmatch(option) and is_path))
