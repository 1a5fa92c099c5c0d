"""The templates of a profile's `templates_dir`, which a stranger may have written.

They run in Jinja's sandbox, within limits of time and size. A mistake in one is reported with its
line.
"""

import contextlib
import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolkit.errors import InputError, Problem, RenderError
from toolkit.planning.kubernetes import KubernetesPlan
from toolkit.planning.plans import LaunchPlan
from toolkit.rendering.environment import configured, templates_folder

_SECONDS = 5.0
"""CPU seconds that a template may take."""

_MOST = 5_000_000
"""Characters of a template and of the rendered text, and entries of a value."""

_MOST_BITS = 10_000
"""Bits of a number."""


def render_with(folder: Path, plan: LaunchPlan, values: Mapping[str, object]) -> str:
    """Return what a folder's templates make of a plan.

    The folder holds a template of the plan's kind or one of its parts. Its templates see the values
    of our own, and the job and the profile, too.

    Raises:
        RenderError: every mistake in the templates, with its line.
    """
    values = {"plan": plan, "job": plan.job, "profile": plan.profile, **values}
    _require_template(folder, plan.template)
    try:
        environment = _environment(folder)
        with _limited(environment):
            parts, size = [], 0
            for part in environment.get_template(plan.template).generate(values):
                parts.append(part)
                size += len(part)
                if size > _MOST:
                    raise RenderError(f"renders more than {_MOST:,} characters; is there a loop?")
    except Exception as error:
        raise RenderError([_problem(error, folder, plan.template, values)]) from error
    text = "".join(parts)
    if isinstance(plan, KubernetesPlan):
        _require_objects(text, folder, plan)
    return text


def _require_template(folder: Path, name: str) -> None:
    """Make sure that a folder has the template, or one of its parts."""
    room, names = name.partition("/")[0], [name]
    if room == "kubernetes":
        names += [f"{room}/{path.name}" for path in (templates_folder() / room).iterdir()]
    if not any((folder / name).is_file() for name in names):
        which = f"{name} or other template of kubernetes/" if room == "kubernetes" else name
        what = f"holds no {which}" if folder.is_dir() else "is no folder"
        raise RenderError(
            f"templates_dir {str(folder)!r} {what}; write that template, or leave the key out"
        )


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    """Return where templates come from: `folder` first, then ours, which are always `toolkit/…`."""
    ours = jinja2.FileSystemLoader(templates_folder())
    loader = jinja2.ChoiceLoader(
        [_YourLoader(folder), jinja2.PrefixLoader({"toolkit": ours}), ours]
    )
    return configured(_Sandbox, loader=loader)


@contextlib.contextmanager
def _limited(environment: jinja2.Environment) -> Iterator[None]:
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
    """Make sure that the rendered text is a manifest and contains the workload."""
    from toolkit.text.manifests import read_manifests

    place = f"what {folder} renders"
    try:
        manifests = read_manifests(text, place).manifests
    except InputError as error:
        raise RenderError(error.problems) from None
    if not any(one.kind == plan.workload and one.name == plan.run_name for one in manifests):
        message = f"holds no {plan.workload} named {plan.run_name!r}, which makes the pods"
        raise RenderError(message, place=place)


def _problem(error: Exception, folder: Path, name: str, values: Iterable[str]) -> Problem:
    """Return the mistake in templates, with the innermost template line that led to it."""
    place, ours = f"{folder / name}", templates_folder()
    for frame in traceback.extract_tb(error.__traceback__):
        if any(Path(frame.filename).is_relative_to(one) for one in (folder, ours)):
            place = f"{frame.filename}:{frame.lineno}"
    match error:
        case RenderError():
            message = str(error)
        case jinja2.TemplateNotFound():
            message = f"there is no template {error.name!r}; the toolkit's own is 'toolkit/{name}'"
        case jinja2.TemplateSyntaxError():
            message = error.message or "not a template"
            place = f"{error.filename}:{error.lineno}" if error.filename else place
        case jinja2.UndefinedError():
            message = f"{error}; templates know {', '.join(values)}"
        case _:
            message = f"{type(error).__name__}: {error}"
    return Problem(place=place, message=message)


class _YourLoader(jinja2.FileSystemLoader):
    """Loads templates that people have written, which need not be text."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        path = Path(self.searchpath[0], template)
        if path.is_file() and path.stat().st_size > _MOST:
            raise jinja2.TemplateSyntaxError(
                f"has more than {_MOST:,} bytes", 1, template, str(path)
            )
        try:
            return super().get_source(environment, template)
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            message = f"not UTF-8: byte 0x{error.object[error.start]:02x}"
            raise jinja2.TemplateSyntaxError(message, line, template, str(path)) from None


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox for templates of a project's folder, which a stranger may have written.

    They only fill in values, and cannot take all memory with one operation.
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
