"""Renders the untrusted templates of a profile's `templates_dir`.

A separate process (`template_process`) renders them. It gets plain data, and has hard limits of
memory, CPU time and output.
"""

import dataclasses
import enum
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from toolkit import __version__
from toolkit.errors import InputError, Problem, RenderError
from toolkit.planning.kubernetes import KubernetesPlan
from toolkit.planning.plans import LaunchPlan
from toolkit.rendering.environment import templates_folder
from toolkit.rendering.payload import payload_of

CPU_S = 5
"""CPU seconds for rendering a script or manifest with a folder's templates."""

_PLANS_PER_CPU_S = 20
"""Plans per additional CPU second: each point of a sweep has a separate manifest."""

_MOST_CPU_S = 60

_WALL_S = 120.0
"""Timeout of the process in seconds, on a busy machine."""

_NOT_SHOWN = frozenset({"objects", "patches", "template"})
"""Properties of a plan that are only for the renderer."""

_START = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from toolkit.rendering.template_process import main; main()"
)


def render_with(folder: Path, plans: Sequence[LaunchPlan]) -> Iterator[str]:
    """Yield each plan as rendered by a folder's templates.

    The folder contains a template for the plans' kind, or one of its parts. Its templates see the
    same values as the toolkit's, and also the job and the profile, all as plain data.

    Raises:
        RenderError: the first error in the templates, with its line, or an exceeded limit.
    """
    _require_template(folder, plans[0].template)
    packed = payload_of(plans[0])
    request = {
        "folder": str(folder),
        "template": plans[0].template,
        "version": __version__,
        "supervisor": {"sha256": packed.sha256, "base64": packed.base64},
        "plans": list(map(plain, plans)),
        "cpu_s": min(CPU_S + len(plans) // _PLANS_PER_CPU_S, _MOST_CPU_S),
    }
    for plan, text in zip(plans, _rendered(request), strict=True):
        if isinstance(plan, KubernetesPlan):
            _require_objects(text, folder, plan)
        yield text


def plain(value: object) -> Any:
    """Return a value as JSON data: models and plans become dictionaries of their fields.

    >>> plain({"sizes": (1, 2), "path": Path("/tmp")})
    {'sizes': [1, 2], 'path': '/tmp'}
    """
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str):
        return str(value)  # the process detects the words of `args` itself
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        return {name: plain(getattr(value, name)) for name in _public(type(value))}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    assert isinstance(value, set | frozenset), type(value)
    return sorted(map(plain, value))


def _public(model: type) -> Iterator[str]:
    """Yield the names of fields and properties of a model, a dataclass or a named tuple."""
    if issubclass(model, BaseModel):
        yield from model.model_fields
    elif dataclasses.is_dataclass(model):
        yield from (field.name for field in dataclasses.fields(model))
    else:
        yield from model._fields  # type: ignore[attr-defined]
    for base in model.__mro__:
        if not base.__module__.startswith("pydantic"):
            for name, value in vars(base).items():
                computed = isinstance(value, property | cached_property)
                if computed and name[0] != "_" and name not in _NOT_SHOWN:
                    yield name


def _rendered(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts rendered by the process, one after the other.

    Only environment variables that Python may need to start are passed on.
    """
    environ = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    paths = [path for path in sys.path if path]  # the current folder may be untrusted
    with tempfile.TemporaryFile() as answer:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-X", "utf8", "-c", _START, *paths],
                input=json.dumps(request).encode(),
                stdout=answer,
                stderr=subprocess.DEVNULL,
                env=environ,
                timeout=_WALL_S,
                check=False,
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        answer.seek(0)
        for line in answer:
            if not line.endswith(b"\n"):
                break  # the process was killed within this line
            if not line.startswith(b"{"):
                continue  # a site's Python may print at startup
            content = json.loads(line)
            if "text" not in content:
                raise RenderError([Problem(place=content["place"], message=content["message"])])
            yield content["text"]
    if status:
        place = str(Path(request["folder"], request["template"]))
        ended = f"takes more than {request['cpu_s']} s; is there a loop that never ends?"
        if status not in (-signal.SIGKILL, -signal.SIGXCPU):
            name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            ended = f"ends the process that renders it ({name})"
        raise RenderError(ended, place=place)


def _require_template(folder: Path, name: str) -> None:
    """Require that a folder contains the template, or one of its parts."""
    room, names = name.partition("/")[0], [name]
    if room == "kubernetes":
        names += [f"{room}/{path.name}" for path in (templates_folder() / room).iterdir()]
    if not any((folder / name).is_file() for name in names):
        which = f"{name} or other template of kubernetes/" if room == "kubernetes" else name
        what = f"holds no {which}" if folder.is_dir() else "is not a folder"
        raise RenderError(
            f"templates_dir {str(folder)!r} {what}; write that template, or leave the key out"
        )


def _require_objects(text: str, folder: Path, plan: KubernetesPlan) -> None:
    """Require that the rendered text is a manifest and contains the workload."""
    from toolkit.text.manifests import read_manifests

    place = f"what {folder} renders"
    try:
        manifests = read_manifests(text, place).manifests
    except InputError as error:
        raise RenderError(error.problems) from None
    if not any(one.kind == plan.workload and one.name == plan.run_name for one in manifests):
        message = f"holds no {plan.workload} named {plan.run_name!r}, which makes the pods"
        raise RenderError(message, place=place)
