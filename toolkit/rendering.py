"""From a launch plan to text: the Jinja environment and the filters that every value passes.

Pure: the same plan gives the same bytes. Templates place values and decide nothing.
"""

import functools
import json
import re
import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import toolkit
from toolkit.errors import RenderError
from toolkit.planning import KubernetesPlan, LaunchPlan, LocalPlan, SlurmPlan

__all__ = ["json_quote", "kubernetes_literal", "render", "sbatch_quote", "shell_quote"]

_TEMPLATES: dict[type[LaunchPlan], str] = {
    KubernetesPlan: "kubernetes/pytorchjob.yaml.j2",
    LocalPlan: "local/run.sh.j2",
    SlurmPlan: "slurm/train.sbatch.j2",
}

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ANSI_C = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "'": r"\'", "\\": r"\\"}

# JSON is YAML but for what YAML's reader takes for a line break or will not take at all.
_NOT_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")

_EXPANDED = re.compile(r"\$(?:[$(]|[^\x00-\x7f])")


def shell_quote(value: object) -> str:
    r"""Quote one word for bash, on one line whatever it holds.

    >>> print(shell_quote("plain"), shell_quote("it's $HOME"), shell_quote("two\nlines"))
    plain 'it'"'"'s $HOME' $'two\nlines'
    """
    text = str(value)
    if not _CONTROL.search(text):
        return shlex.quote(text)
    # sbatch refuses scripts with CR LF in them, and a line of a value must not look like ours.
    return "$'" + re.sub(r"[\x00-\x1f\x7f'\\]", _ansi_c, text) + "'"


def _ansi_c(match: re.Match[str]) -> str:
    return _ANSI_C.get(match[0]) or f"\\{ord(match[0]):03o}"


def sbatch_quote(value: object) -> str:
    """Quote the value of an `#SBATCH` option, which ends with its line.

    Raises:
        RenderError: the value holds a control character.
    """
    text = str(value)
    if _CONTROL.search(text):
        raise RenderError(f"{text!r} holds a control character, which no #SBATCH line can hold")
    return shlex.quote(text)


def json_quote(value: object) -> str:
    r"""Return the value as JSON that every YAML reader takes for the same value.

    >>> print(json_quote({"a": ["no", "caf\u00e9"]}))
    {"a": ["no", "café"]}
    """
    text = json.dumps(value, ensure_ascii=False)
    return _NOT_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def kubernetes_literal(value: str) -> str:
    """Return a text that Kubernetes' `$(NAME)` expansion turns into `value`.

    The expansion reads `$$` as `$`, and takes one byte after any other `$` for a character, which
    breaks what is longer (k8s.io/kubernetes, third_party/forked/golang/expansion). So where it
    would find anything to do, every `$` is doubled.

    >>> kubernetes_literal("$HOME"), kubernetes_literal("$(date) $$ $x")
    ('$HOME', '$$(date) $$$$ $$x')
    """
    return value.replace("$", "$$") if _EXPANDED.search(value) else value


def render(plan: LaunchPlan) -> str:
    """Return the script or manifest of a plan.

    Raises:
        RenderError: a value that the format cannot hold.
    """
    template = _environment().get_template(_TEMPLATES[type(plan)])
    return template.render(plan=plan, job=plan.job, profile=plan.profile, version=_version())


def _version() -> str:
    return toolkit.__version__


def _templates_folder() -> Path:
    """Find the templates inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_templates_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        auto_reload=False,
    )
    environment.filters |= {
        "json": json_quote,
        "literal": kubernetes_literal,
        "sbatch": sbatch_quote,
        "sh": shell_quote,
        "sh_words": lambda values: " ".join(map(shell_quote, values)),
    }
    return environment
