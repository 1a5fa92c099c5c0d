"""From a launch plan to text: the Jinja environment and the filters that every value passes.

Pure: the same plan gives the same bytes. Templates place values and decide nothing.
"""

import contextlib
import functools
import os
import re
import shlex
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import (
    BytecodeCache,
    ChoiceLoader,
    Environment,
    FileSystemBytecodeCache,
    FileSystemLoader,
    PrefixLoader,
    StrictUndefined,
    TemplateNotFound,
    TemplateSyntaxError,
    UndefinedError,
)
from jinja2 import __version__ as jinja2_version
from jinja2.bccache import Bucket
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolkit import extensions, version
from toolkit.errors import InputError, Problem, RenderError
from toolkit.job.types import IN_RUN_DIR
from toolkit.planning import KubernetesPlan, LaunchPlan, LocalPlan, SlurmPlan
from toolkit.rendering.patches import patched
from toolkit.text.yaml_writer import json_quote, yaml_block, yaml_flow

__all__ = [
    "kubernetes_literal",
    "page_environment",
    "render",
    "sbatch_quote",
    "shell_quote",
]

_TEMPLATES: dict[type[LaunchPlan], str] = {
    LocalPlan: "local/run.sh.j2",
    SlurmPlan: "slurm/train.sbatch.j2",
}

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ANSI_C = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "'": r"\'", "\\": r"\\"}

_SECONDS = 5.0  # of a processor, for a template that somebody else may have written
_MOST = 5_000_000  # characters of a template, of what is rendered, and entries of a value
_MOST_BITS = 10_000

_EXPANDED = re.compile(r"\$(?:[$(]|[^\x00-\x7f])")


def shell_quote(value: object) -> str:
    r"""Quote one word for bash, on one line for any content.

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
    # Unlike the shell, sbatch reads a backslash within single quotes as well.
    return shlex.quote(text.replace("\\", "\\\\"))


def path_quote(path: str) -> str:
    """Quote a path for bash; `~/` at its beginning stays the home folder.

    >>> path_quote("~/my keys/wandb"), path_quote("/etc/key")
    ("~/'my keys/wandb'", '/etc/key')
    """
    return "~/" + shell_quote(path[2:]) if path.startswith("~/") else shell_quote(path)


def entry_words(words: Iterable[str]) -> str:
    r"""Quote what torchrun starts; paths in the run directory are resolved where the script runs.

    >>> entry_words(["-m", "train"]), entry_words(["$TRAIN_RUN_DIR/my file.py", "--x"])
    ('-m train', '"$_run_dir"/\'my file.py\' --x')
    """
    first, *others = words
    quoted = shell_quote(first.removeprefix(IN_RUN_DIR))
    where = '"$_run_dir"/' if first.startswith(IN_RUN_DIR) else ""
    return " ".join([where + quoted, *map(shell_quote, others)])


def shell_line(value: str) -> str:
    """Return a line of bash that the user wrote, as it is.

    Raises:
        RenderError: it is more than a line.
    """
    if _CONTROL.search(value.replace("\t", " ")):
        raise RenderError(f"{value!r} holds a control character; write one line of bash per item")
    return value


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
        RenderError: a value that the format cannot hold, a template of the profile's
            `templates_dir` that does not work, with its line, or a patch that does not apply.
    """
    if plan.profile.kind not in extensions.BUILT_IN:
        return extensions.extension(plan.profile.kind).render(plan)
    if not isinstance(plan, KubernetesPlan):
        return _filled(plan, _TEMPLATES[type(plan)])
    text = "".join(_filled(one, _template_of(one)) for one in plan.parts or (plan,))
    return patched(text, plan.patches, workload=plan.workload) if plan.patches else text


def _template_of(plan: KubernetesPlan) -> str:
    return f"kubernetes/{plan.workload.lower()}.yaml.j2"


def _filled(plan: LaunchPlan, name: str) -> str:
    """Return a template with the values of a plan."""
    names: dict[str, object] = {"plan": plan, "version": version.__version__}
    folder = plan.profile.templates_dir
    if folder is None:
        return _environment().get_template(name).render(names)
    names = {"plan": plan, "job": plan.job, "profile": plan.profile, **names}
    text = _render_yours(Path(folder), name, names)
    if isinstance(plan, KubernetesPlan):
        _require_objects(text, Path(folder), plan)
    return text


def _render_yours(folder: Path, name: str, names: Mapping[str, object]) -> str:
    """Render templates that the user wrote; all that is wrong with them is the user's to mend."""
    if not _holds_ours(folder, name):
        what = f"holds no {_wanted(name)}" if folder.is_dir() else "is no folder"
        raise RenderError(
            f"templates_dir {str(folder)!r} {what}; write that template, or leave the key out"
        )
    try:
        environment = _environment(folder)
        with _limited(environment):
            parts, size = [], 0
            for part in environment.get_template(name).generate(names):
                parts.append(part)
                size += len(part)
                if size > _MOST:
                    raise RenderError(f"renders more than {_MOST:,} characters; is there a loop?")
        return "".join(parts)
    except Exception as error:
        problem = Problem(place=_place(error, folder, name), message=_said(error, name, names))
        raise RenderError([problem]) from error


@contextlib.contextmanager
def _limited(environment: Environment) -> Iterator[None]:
    """End templates that take too long, in any thread: each line of one looks at the clock.

    A signal would reach the main thread only. A single filter runs to its end.
    """
    until = time.thread_time() + _SECONDS

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > until:
            raise RenderError(f"takes more than {_SECONDS:g} s; is there a loop that never ends?")
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_globals.get("environment") is environment else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def _require_objects(text: str, folder: Path, plan: KubernetesPlan) -> None:
    """Make sure that what the user's templates make of a plan is what a cluster takes."""
    from toolkit.text.manifest_reader import read_manifests

    place = f"what {folder} renders"
    try:
        manifests = read_manifests(text, place).manifests
    except InputError as error:
        raise RenderError(error.problems) from None
    if not any(one.kind == plan.workload and one.name == plan.run_name for one in manifests):
        message = f"holds no {plan.workload} named {plan.run_name!r}, which makes the pods"
        raise RenderError([Problem(place=place, message=message)])


def _holds_ours(folder: Path, name: str) -> bool:
    """Whether a folder has the template, or one of its parts."""
    room = name.partition("/")[0]
    ours = (_templates_folder() / room).iterdir() if room == "kubernetes" else ()
    return any(
        (folder / room / one).is_file() for one in (Path(name).name, *(p.name for p in ours))
    )


def _wanted(name: str) -> str:
    return f"{name} or other template of kubernetes/" if name.startswith("kubernetes/") else name


def _said(error: Exception, name: str, names: Iterable[str]) -> str:
    match error:
        case RenderError():
            return str(error)
        case TemplateNotFound():
            return f"there is no template {error.name!r}; the toolkit's own is 'toolkit/{name}'"
        case TemplateSyntaxError():
            return error.message or "not a template"
        case UndefinedError():
            return f"{error}; templates know {', '.join(names)}"
    return f"{type(error).__name__}: {error}"


def _place(error: Exception, folder: Path, name: str) -> str:
    """Return the innermost line of a template that led to an error."""
    if isinstance(error, TemplateSyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    places = (folder, _templates_folder())
    for frame in reversed(frames):
        if any(Path(frame.filename).is_relative_to(place) for place in places):
            return f"{frame.filename}:{frame.lineno}"
    return str(folder / name)


def _templates_folder() -> Path:
    """Find the templates inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


class _YourLoader(FileSystemLoader):
    """Loads templates that people have written, which need not be text."""

    def get_source(
        self, environment: Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        path = Path(self.searchpath[0], template)
        if path.is_file() and path.stat().st_size > _MOST:
            raise TemplateSyntaxError(f"has more than {_MOST:,} bytes", 1, template, str(path))
        try:
            return super().get_source(environment, template)
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            message = f"not UTF-8: byte 0x{error.object[error.start]:02x}"
            raise TemplateSyntaxError(message, line, template, str(path)) from None


class _Sandbox(ImmutableSandboxedEnvironment):
    """Where templates of a project's folder run, which may be a stranger's.

    They fill in values, do nothing else, and make nothing that takes all memory at once.
    """

    intercepted_binops = frozenset({"*", "**", "+"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operation if its result has a reasonable size."""
        if _size(operator, left, right) > _MOST:
            raise RenderError(f"a value of more than {_MOST:,} entries")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Return how many entries a result will have; of a number that is too large, too many."""
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * right}
        return _MOST + 1 if bits.get(operator, 0) > _MOST_BITS else 0
    one, other = (len(v) if hasattr(v, "__len__") else v for v in (left, right))
    if not isinstance(one, int) or not isinstance(other, int):
        return 0
    return one * other if operator == "*" else one + other if operator == "+" else 0


def _yaml(value: object, indent: int | None = None) -> str:
    """Write a block; a value of several lines without an indent would leave its place."""
    if indent is None:
        raise RenderError(
            "the filter 'yaml' needs the column of its block, such as yaml(4); for a value on one "
            "line, use 'yaml_flow'"
        )
    return yaml_block(value, indent)


class _BytecodeCache(FileSystemBytecodeCache):
    """Compiled templates in the user's cache folder: to compile them anew takes 0.06 s."""

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Write a compiled template, if there is room for it."""
        with contextlib.suppress(OSError):
            super().dump_bytecode(bucket)


def _bytecode_cache() -> BytecodeCache | None:
    """Return the user's cache of compiled templates; None if others could write there.

    What lies in it is run. jinja2 compares it with the template's text and Python's version.
    """
    home = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '/')}/.cache"
    folder = Path(home, "torch-deploy-toolkit", f"jinja2-{jinja2_version}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(info.st_mode) and not info.st_mode & 0o022
    return _BytecodeCache(str(folder)) if private and info.st_uid == os.getuid() else None


@functools.cache
def _environment(folder: Path | None = None) -> Environment:
    """Return where templates come from: `folder` first, then ours, which are always `toolkit/…`."""
    ours = FileSystemLoader(_templates_folder())
    yours = [_YourLoader(folder), PrefixLoader({"toolkit": ours})] if folder else []
    environment = (_Sandbox if folder else Environment)(
        loader=ChoiceLoader([*yours, ours]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        auto_reload=folder is not None,
        bytecode_cache=None if folder else _bytecode_cache(),
    )
    environment.filters |= {
        "json": json_quote,
        "literal": kubernetes_literal,
        "sbatch": sbatch_quote,
        "sh": shell_quote,
        "sh_entry": entry_words,
        "sh_line": shell_line,
        "sh_path": path_quote,
        "yaml": _yaml,
        "yaml_flow": yaml_flow,
        "sh_words": lambda values: " ".join(map(shell_quote, values)),
    }
    return environment


@functools.cache
def page_environment() -> Environment:
    """Return where the templates of notebooks come from; every value is escaped for HTML."""
    return Environment(
        loader=FileSystemLoader(_templates_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
