"""The process that renders untrusted templates: plain data in, texts out, within hard limits.

`templates_dir` starts it. It reads one request in JSON from stdin and writes a line of JSON for
each plan: its text, or the first error with its location.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.environment import TemplateModule
from jinja2.runtime import BlockReference, LoopContext, Macro, TemplateReference
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from toolkit.errors import Problem, RenderError, nearest
from toolkit.job.types import ArgumentWord
from toolkit.rendering.environment import configured, our_loader, templates_folder

MEMORY_BYTES = 256 << 20
"""Memory limit in addition to the memory of Python and its modules."""

_SPARE_BYTES = 32 << 20
"""Memory reserved for the error report of a template that has used all of its memory."""

_MOST = 5_000_000
"""Maximum characters of a template, and of a rendered text."""

_MOST_OF_POINT = 200_000
"""Maximum characters of each further manifest of a sweep; the toolkit's use half of it."""

METHODS: Mapping[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values"}),
    str: frozenset(
        {"capitalize", "count", "endswith", "find", "format", "format_map", "isdigit", "join"}
        | {"lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rpartition"}
        | {"rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper"}
        | {"zfill"}
    ),
    list: frozenset({"count", "index"}),
}
"""Methods of plain data that a template may call. Jinja replaces `format` with a safe version that
reads only attributes allowed to templates."""

FUNCTIONS = frozenset({"cycler", "dict", "joiner", "namespace", "range"})
"""Jinja's functions that templates may call."""

_OF_JINJA = (
    *(BlockReference, Cycler, Joiner, LoopContext, Macro, Namespace),
    *(TemplateModule, TemplateReference),
)
"""Jinja's runtime types; Jinja's sandbox decides which of their attributes templates may see."""


def main() -> None:
    """Read a request, limit this process, and write the rendered text of each plan."""
    request = json.load(sys.stdin)
    # Jinja normalises paths, and errors are located by them.
    folder = Path(os.path.normpath(request["folder"]))
    name, plans = request["template"], request["plans"]
    environment = sandbox(folder)
    most = _MOST + _MOST_OF_POINT * (len(plans) - 1)
    _limit(request["cpu_s"], output_bytes=8 * most)
    for plan in plans:
        known = {"plan": plan, "job": plan["job"], "profile": plan["profile"]}
        for holder in (plan, plan["job"]):
            mark_arguments(holder["entry"], len(plan["job"]["args"]))
        for point in plan.get("points") or ():
            mark_arguments(point["args"], len(point["args"]))
        known |= {name: request[name] for name in ("version", "supervisor")}
        try:
            answer = {"text": _text(environment, name, known, min(most, _MOST))}
            most -= len(answer["text"])
        except Exception as error:
            _give_spare_memory()
            problem = _problem(error, folder, name, known)
            answer = {"place": str(problem.place), "message": problem.message}
        print(json.dumps(answer), flush=True)
        if "text" not in answer:
            return


def mark_arguments(entry: list[str], count: int) -> None:
    """Mark the last words of an entry, the job's `args`, for the filters."""
    first = len(entry) - count
    entry[first:] = map(ArgumentWord, entry[first:])


def _text(environment: jinja2.Environment, name: str, known: Mapping[str, Any], most: int) -> str:
    parts, size = [], 0
    for part in environment.get_template(name).generate(known):
        parts.append(part)
        size += len(part)
        if size > most:
            raise RenderError(f"renders more than {most:,} characters; is there a loop?")
    text = "".join(parts)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RenderError(f"renders {text[error.start]!r}, which is not a character") from None
    return text


def _limit(cpu_s: int, *, output_bytes: int) -> None:
    """Limit memory, CPU time and output, as far as the system supports it."""

    def too_long(*_: object) -> None:
        raise RenderError(f"takes more than {cpu_s} s; is there a loop that never ends?")

    signal.signal(signal.SIGXCPU, too_long)
    used_s = int(time.process_time())
    limits = {
        resource.RLIMIT_CORE: (0, 0),
        # Twice the time also ends the process within a single call, which no signal interrupts.
        resource.RLIMIT_CPU: (used_s + cpu_s, used_s + 2 * cpu_s),
        resource.RLIMIT_FSIZE: (output_bytes, output_bytes),
        resource.RLIMIT_NPROC: (0, 0),
    }
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        limits[resource.RLIMIT_AS] = (most, most + _SPARE_BYTES)
    for which, limit in limits.items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, limit)


def _give_spare_memory() -> None:
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def sandbox(folder: Path) -> jinja2.Environment:
    """Return the sandbox with templates from `folder`, then the toolkit's as `toolkit/…`."""
    ours = our_loader()
    loader = jinja2.ChoiceLoader(
        [_YourLoader(folder), jinja2.PrefixLoader({"toolkit": ours}), ours]
    )
    environment = configured(_Sandbox, loader=loader)
    environment.globals = {name: DEFAULT_NAMESPACE[name] for name in sorted(FUNCTIONS)}
    for name in ("attr", "random"):  # the same plan gives the same text
        del environment.filters[name]
    return environment


def _problem(error: Exception, folder: Path, name: str, known: Iterable[str]) -> Problem:
    """Return the error in templates, with the innermost template line that caused it."""
    place, ours = f"{folder / name}", templates_folder()
    for frame in traceback.extract_tb(error.__traceback__):
        if any(Path(frame.filename).is_relative_to(one) for one in (folder, ours)):
            place = f"{frame.filename}:{frame.lineno}"
    match error:
        case RenderError():
            message = str(error)
        case MemoryError():
            message = f"takes more than {MEMORY_BYTES >> 20} MiB of memory"
        case jinja2.TemplateNotFound():
            message = (
                f"template {error.name!r} does not exist; the toolkit's own is 'toolkit/{name}'"
            )
            if not str(error.name).endswith(".j2"):
                message = f"template {error.name!r} does not exist; template names end in .j2"
        case jinja2.TemplateSyntaxError():
            message = error.message or "not a template"
            place = f"{error.filename}:{error.lineno}" if error.filename else place
        case jinja2.UndefinedError():
            message = f"{error}; templates know {', '.join(known)}"
        case _:
            message = f"{type(error).__name__}: {error}"
    return Problem(place=place, message=message)


class _YourLoader(jinja2.FileSystemLoader):
    """Loads users' templates, which may not be text."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        if not template.endswith(".j2") or any(part[:1] == "." for part in template.split("/")):
            raise jinja2.TemplateNotFound(template)  # such as `.env`, or `.git/config`
        path = Path(self.searchpath[0], template)
        if path.is_file() and not path.resolve().is_relative_to(Path(self.searchpath[0]).resolve()):
            message = "leads out of templates_dir, and its text would get into the script"
            raise jinja2.TemplateSyntaxError(message, 1, template, str(path))
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
    """Templates read plain data by key, and call `METHODS`, `FUNCTIONS`, filters and macros."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a dictionary's value, or an attribute that `is_safe_attribute()` admits."""
        if not isinstance(obj, dict) or attribute in METHODS[dict] - obj.keys():
            return super().getattr(obj, attribute)
        if attribute in obj:
            return obj[attribute]
        meant = nearest(attribute, obj)
        hint = f"no key {attribute!r}" + (f"; did you mean {meant!r}?" if meant else "")
        return self.undefined(hint, obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may see an attribute of a value."""
        if isinstance(obj, _OF_JINJA):
            return super().is_safe_attribute(obj, attr, value)
        return attr in METHODS.get(str if isinstance(obj, str) else type(obj), ())
